// Bytes of HBM: w once, 2 k p, which is the bound: 58.7 MB, 13.7 us at 4.3 TB/s, for k 3584 and p
// 8192. Bytes over the link, each way: (ranks - 1) 2 m p of an all_reduce, twice that by low
// latency; from some 64 rows on they cost more than the rest of the exchange. Flops: 2 k p times 64
// or 128 rows.
#include "kernels/few_rows.h"
#include "kernels/few_rows_instances.cuh"

namespace pk {
namespace {

using matmul::ceil_div;
using matmul::kMostSize;
using Shape = matmul::FewRowsShape;

matmul::FewRowsInstance instance_of(bool bfloat16, bool transpose_w) {
  return bfloat16 ? matmul::few_rows_bfloat16_instance(transpose_w)
                  : matmul::few_rows_float16_instance(transpose_w);
}

}  // namespace

int64_t few_rows_most_cols(int64_t m, int num_ranks, bool all_reduce, bool low_latency) {
  // Strips are numbered in the mailbox, or by their flags.
  const int64_t most =
      low_latency ? static_cast<int64_t>(low_latency_bytes(num_ranks)) / StripLayout::kBytes
                  : tile_flags(num_ranks);
  const auto strips = StripLayout::make(m, num_ranks, all_reduce);
  return most / strips.strips_of_column() * StripLayout::kCols;
}

int64_t few_rows_scratch(int64_t m, int64_t p, int num_ranks, bool all_reduce, bool low_latency) {
  const auto strips = StripLayout::make(m, num_ranks, all_reduce);
  return low_latency ? 0 : (num_ranks - 1) * strips.num_strips(p) * StripLayout::kBytes;
}

cudaError_t launch_few_rows(const CommView& comm, const FewRowsOperands& in,
                            const FewRowsPlan& plan, cudaStream_t stream) {
  if (in.m <= 0 || in.m > kMostFewRows || in.p <= 0 || in.k <= 0 || in.k > kMostSize ||
      (!in.all_reduce && in.m % comm.num_ranks != 0) || comm.num_ranks < 2 ||
      comm.num_ranks > kFewRowsRanks ||
      in.p > few_rows_most_cols(in.m, comm.num_ranks, in.all_reduce, plan.low_latency) ||
      plan.num_blocks <= 0 || plan.num_blocks > kMaxBlocks)
    return cudaErrorInvalidValue;
  const auto instance = instance_of(in.bfloat16, in.transpose_w);
  matmul::FewRowsArgs args{};
  MatmulWalk& walk = args.product.walk;
  walk.num_m = 1;
  walk.num_n = ceil_div(in.p, Shape::kN);
  walk.num_steps = ceil_div(in.k, kBlockK);
  walk.num_blocks = plan.num_blocks;
  walk.split_tiles = plan.split_tiles;
  walk.split = plan.split;
  walk.band_rows = 1;
  if (!walk.is_valid() || (plan.split_tiles > 0) != (plan.split > 1)) return cudaErrorInvalidValue;
  args.strips = StripLayout::make(in.m, comm.num_ranks, in.all_reduce);
  args.num_strips = static_cast<int>(args.strips.num_strips(in.p));
  args.scratch = in.scratch;
  args.op = in.all_reduce ? Op::kMatmulAllReduce : Op::kMatmulReduceScatter;
  args.channel = in.channel;
  args.low_latency = plan.low_latency;
  args.product.policy_b = ptx::kEvictFirst;
  const Matrix a{const_cast<void*>(in.x), in.m, in.k, in.pitch_x};
  const Matrix b{const_cast<void*>(in.w), in.transpose_w ? in.p : in.k,
                 in.transpose_w ? in.k : in.p, in.pitch_w};
  const Matrix c{in.y, args.strips.share, in.p, in.pitch_y};
  // As in launch_matmul().
  const int rows_past = Shape::kM - ceil_div(in.m, 8) * 8;
  if (cudaError_t error = fill(instance, args.product, a, b, c, in.bfloat16, false, rows_past))
    return error;
  return launch_clusters(instance, plan.num_blocks, plan.split, stream, comm, args);
}

cudaError_t load_few_rows() {
  for (int which = 0; which < 4; ++which) {
    if (cudaError_t error = matmul::load(instance_of(which & 1, which & 2))) return error;
  }
  return cudaSuccess;
}

}  // namespace pk

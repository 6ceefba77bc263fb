// Flops a rank: 2 m k p. Bytes over the link, each way: (ranks - 1) / ranks of a partial of m p
// elements, which are written to the owner's scratch and read there again, mostly out of the L2; an
// all_reduce sends as much again. Below about 1400 flops for each such byte, a k of some 1400 in 16
// bits, the link is the bound, and tensor cores above it.
#include <algorithm>

#include "kernels/matmul_reduce.h"
#include "kernels/matmul_reduce_instances.cuh"

namespace pk {
namespace {

using matmul::ceil_div;
using matmul::kBandRows;
using matmul::kMostSize;
using Shape = matmul::ReduceShape;

matmul::ReduceInstance instance_of(bool bfloat16, bool transpose_w) {
  return bfloat16 ? matmul::reduce_bfloat16_instance(transpose_w)
                  : matmul::reduce_float16_instance(transpose_w);
}

}  // namespace

int64_t matmul_reduce_rows(int64_t m, int num_ranks, bool all_reduce) {
  if (!all_reduce) return m / num_ranks;
  return int64_t{ceil_div(m, num_ranks * Shape::kM)} * Shape::kM;
}

bool matmul_reduce_takes(int64_t outer, int64_t m, int num_ranks) {
  return outer == 1 || (outer > 1 && m % (outer * num_ranks * Shape::kM) == 0);
}

int64_t matmul_reduce_scratch(int64_t m, int64_t p, int num_ranks, bool all_reduce) {
  const int64_t rows = matmul_reduce_rows(m, num_ranks, all_reduce);
  const int64_t tiles = int64_t{ceil_div(rows, Shape::kM)} * ceil_div(p, Shape::kN);
  return (num_ranks - 1) * tiles * PartialLayout::kTileBytes;
}

cudaError_t launch_matmul_reduce(const CommView& comm, const MatmulReduceOperands& in,
                                 const MatmulReducePlan& plan, cudaStream_t stream) {
  if (in.m <= 0 || in.p <= 0 || in.k <= 0 || in.m > kMostSize || in.p > kMostSize ||
      in.k > kMostSize || comm.num_ranks < 2 || comm.num_ranks > kMatmulReduceRanks ||
      (in.all_reduce
           ? in.outer != 1
           : in.m % comm.num_ranks != 0 || !matmul_reduce_takes(in.outer, in.m, comm.num_ranks)) ||
      plan.num_blocks <= 0 || plan.num_blocks > kMaxBlocks || plan.lead < 1)
    return cudaErrorInvalidValue;
  const auto instance = instance_of(in.bfloat16, in.transpose_w);
  const int64_t rows = matmul_reduce_rows(in.m, comm.num_ranks, in.all_reduce);
  matmul::ReduceArgs args{};
  MatmulWalk tiles{};
  tiles.num_m = ceil_div(rows, Shape::kM);
  tiles.num_n = ceil_div(in.p, Shape::kN);
  tiles.num_steps = ceil_div(in.k, kBlockK);
  tiles.num_blocks = plan.num_blocks;
  tiles.split = 1;
  tiles.band_rows = std::max(kBandRows / Shape::kM, plan.num_blocks / tiles.num_n);
  // Rows, tiles and a block's slots are counted in 32 bits.
  const int64_t num_tiles = int64_t{tiles.num_m} * tiles.num_n;
  if (num_tiles * comm.num_ranks + plan.num_blocks > INT32_MAX || rows * comm.num_ranks > kMostSize)
    return cudaErrorInvalidValue;
  args.product.walk = ScatterWalk::make(tiles, comm.num_ranks, comm.rank, static_cast<int>(rows),
                                        plan.lead, static_cast<int>(in.outer));
  args.panel_steps = PartialLayout::panel_steps(tiles.num_steps, plan.lead);
  args.y = in.y;
  args.scratch = in.scratch;
  args.cols = static_cast<int>(in.p);
  args.first_row = in.all_reduce ? comm.rank * static_cast<int>(rows) : 0;
  args.channel = in.channel;
  args.all_reduce = in.all_reduce;
  args.product.policy_b = ptx::kEvictNormal;
  const Matrix a{const_cast<void*>(in.x), in.m, in.k, in.pitch_x};
  const Matrix b{const_cast<void*>(in.w), in.transpose_w ? in.p : in.k,
                 in.transpose_w ? in.k : in.p, in.pitch_w};
  const Matrix c{in.y.address, in.all_reduce ? in.m : rows, in.p, in.pitch_y};
  if (cudaError_t error = fill(instance, args.product, a, b, c, in.bfloat16, false, 0))
    return error;
  instance.kernel<<<plan.num_blocks, instance.num_threads, instance.shared_bytes, stream>>>(comm,
                                                                                            args);
  return cudaGetLastError();
}

cudaError_t load_matmul_reduce() {
  for (int which = 0; which < 4; ++which) {
    if (cudaError_t error = matmul::load(instance_of(which & 1, which & 2))) return error;
  }
  return cudaSuccess;
}

}  // namespace pk

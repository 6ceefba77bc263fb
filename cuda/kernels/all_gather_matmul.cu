// Flops of a rank: 2 n m k p. Bytes over the link, each way: (n - 1) m k in 16 bits. Bytes of HBM:
// x read, the others' rows written and read again, w read, y written. The bound is the larger of
// the product alone on the SMs that are left, and of the bytes at the communicators' rate.
#include <algorithm>

#include "kernels/all_gather_matmul.cuh"
#include "kernels/all_gather_matmul.h"

namespace pk {
namespace {

using matmul::ceil_div;
using matmul::GatherArgs;
using matmul::GatherInstance;
using matmul::kBandRows;
using matmul::kMostSize;

GatherInstance instance_of(MatmulTile tile, bool bfloat16, bool transpose_w) {
  return bfloat16 ? matmul::gather_bfloat16_instance(tile, transpose_w)
                  : matmul::gather_float16_instance(tile, transpose_w);
}

}  // namespace

cudaError_t launch_all_gather_matmul(const CommView& comm, const AllGatherMatmulOperands& in,
                                     const AllGatherMatmulPlan& plan, cudaStream_t stream) {
  const int n = comm.num_ranks;
  // So that the chunks of the rows are those of the steps of k: mover and watcher count the same.
  const bool packed = in.pitch_x == (in.k + 7) / 8 * 8;
  const bool has_tile = plan.tile == MatmulTile::k128x256 || plan.tile == MatmulTile::k128x128;
  if (in.outer <= 0 || in.m <= 0 || in.k <= 0 || in.p <= 0 || in.outer > kMostSize ||
      in.m > kMostSize / n || in.outer * in.m > kMostSize / n || in.k > kMostSize ||
      in.p > kMostSize || !packed || !has_tile || plan.num_blocks < 1 ||
      plan.num_blocks > kMaxBlocks || plan.num_comm_blocks < 0 ||
      plan.num_comm_blocks >= plan.num_blocks || in.m * in.pitch_x / 8 > kMostSize ||
      in.outer > tile_flags(n))
    return cudaErrorInvalidValue;
  const GatherInstance instance = instance_of(plan.tile, in.bfloat16, in.transpose_w);
  GatherArgs args{};
  args.channel = in.channel;
  args.own_rows = in.own_rows;

  auto pieces =
      GatherPieces::make(static_cast<int>(in.outer), static_cast<int>(in.m), in.pitch_x * 2,
                         comm.rank, n, plan.num_comm_blocks == 0, tile_flags(n));
  // Each has pieces for every peer: the entry rests on that.
  args.num_communicators = n == 1 ? 0 : std::min(plan.num_comm_blocks, pieces.num_pieces);

  MatmulWalk tiles{};
  tiles.num_n = ceil_div(in.p, instance.tile_n);
  tiles.num_steps = ceil_div(in.k, kBlockK);
  tiles.num_blocks = plan.num_blocks - args.num_communicators;
  tiles.split = 1;
  tiles.band_rows = std::max(kBandRows / instance.tile_m, tiles.num_blocks / tiles.num_n);
  args.product.walk = GatherWalk::make(tiles, static_cast<int>(in.outer), static_cast<int>(in.m),
                                       comm.rank, n, instance.tile_m);
  MatmulWalk& walk = args.product.walk.tiles;
  if (int64_t{walk.num_m} * walk.num_n > INT32_MAX - kMaxBlocks) return cudaErrorInvalidValue;
  walk.num_blocks = std::min(walk.num_blocks, walk.num_tiles());

  pieces.set_groups(walk.band_rows * instance.tile_m);
  args.chunk_steps = ceil_div(pieces.chunk_bytes, kBlockK * 2);
  args.push = {static_cast<const char*>(in.x), in.gathered, pieces};

  const int64_t rows = in.outer * in.m * n;
  args.product.policy_b = ptx::kEvictNormal;
  const Matrix own{const_cast<void*>(in.x), in.outer * in.m, in.k, in.pitch_x};
  const Matrix gathered{in.gathered.address, rows, in.k, in.pitch_x};
  const Matrix w{const_cast<void*>(in.w), in.transpose_w ? in.p : in.k,
                 in.transpose_w ? in.k : in.p, in.pitch_w};
  const Matrix y{in.y, rows, in.p, in.pitch_y};
  if (cudaError_t error =
          matmul::fill(instance, args.product, gathered, w, y, in.bfloat16, in.float32_result, 0))
    return error;
  if (cudaError_t error = make_tensor_map(&args.own, own, in.bfloat16, instance.box_a, kPanel))
    return error;
  instance.kernel<<<args.num_communicators + walk.num_blocks, instance.num_threads,
                    instance.shared_bytes, stream>>>(comm, args);
  return cudaGetLastError();
}

cudaError_t load_all_gather_matmul() {
  for (MatmulTile tile : kAllGatherMatmulTiles) {
    for (int which = 0; which < 4; ++which) {
      if (cudaError_t error = matmul::load(instance_of(tile, which & 1, which & 2))) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace pk

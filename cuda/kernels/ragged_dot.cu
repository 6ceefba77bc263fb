// Flops: 2 k n for each row of a group. Bytes: A and C once, B once for each 128 or 64 rows of a
// group, out of the L2 but for the first time. Tensor cores are the bound where groups have
// hundreds of rows; where they have few, it is the reading of B.
#include "kernels/matmul_instances.cuh"
#include "kernels/ragged_dot.h"
#include "schedule/grouped_walk.cuh"

namespace pk {
namespace {

using matmul::ceil_div;
using matmul::Instance;

template <ptx::Type kType, Major kMajorB>
Instance<GroupedWalk> of_tile(MatmulTile tile) {
  return matmul::visit_shape(tile, [](auto shape) {
    return matmul::make_instance<decltype(shape), kType, Major::kK, kMajorB, GroupedWalk>();
  });
}

Instance<GroupedWalk> instance_of(MatmulTile tile, bool bfloat16, bool transpose_b) {
  if (bfloat16) {
    return transpose_b ? of_tile<ptx::Type::kBfloat16, Major::kK>(tile)
                       : of_tile<ptx::Type::kBfloat16, Major::kMn>(tile);
  }
  return transpose_b ? of_tile<ptx::Type::kFloat16, Major::kK>(tile)
                     : of_tile<ptx::Type::kFloat16, Major::kMn>(tile);
}

}  // namespace

cudaError_t launch_ragged_dot(const RaggedDotOperands& in, MatmulTile tile, int num_blocks,
                              cudaStream_t stream) {
  const auto instance = instance_of(tile, in.bfloat16, in.transpose_b);
  // The walk adds up the rows of 32 groups at a time, none longer than A, in 32 bits.
  constexpr int64_t kMost = INT32_MAX / 32;
  if (in.m <= 0 || in.n <= 0 || in.k <= 0 || in.num_groups <= 0 || in.m > kMost || in.n > kMost ||
      in.k > kMost || in.num_groups > kMost || num_blocks <= 0)
    return cudaErrorInvalidValue;
  matmul::Args<GroupedWalk> args{};
  GroupedWalk& walk = args.walk;
  walk.group_sizes = in.group_sizes;
  walk.num_groups = static_cast<int>(in.num_groups);
  walk.num_rows = static_cast<int>(in.m);
  walk.num_n = ceil_div(in.n, instance.tile_n);
  walk.num_steps = ceil_div(in.k, kBlockK);
  walk.num_blocks = num_blocks;
  walk.tile_rows = instance.tile_m;
  // Each group may end with a tile of its own.
  const int64_t most_tiles = (in.m / instance.tile_m + in.num_groups) * walk.num_n;
  if (most_tiles + 32 * walk.num_n + num_blocks > INT32_MAX) return cudaErrorInvalidValue;
  args.policy_b = ptx::kEvictNormal;
  const Matrix a{const_cast<void*>(in.a), in.m, in.k, in.pitch_a};
  const Matrix b{const_cast<void*>(in.b), in.transpose_b ? in.n : in.k,
                 in.transpose_b ? in.k : in.n, in.pitch_b, in.num_groups};
  const Matrix c{in.c, in.m, in.n, in.pitch_c};
  return launch(instance, args, Epilogue{}, a, b, c, in.bfloat16, in.float32_result, 0, num_blocks,
                1, stream);
}

cudaError_t load_ragged_dot() {
  for (MatmulTile tile : kMatmulTiles) {
    for (int which = 0; which < 4; ++which) {
      if (cudaError_t error = load(instance_of(tile, which & 1, which & 2))) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace pk

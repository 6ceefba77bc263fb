// Flops: 2 m n k. Bytes of HBM: operands and result once. A step of a 128 x 256 tile is 48 KiB for
// 4.2 Mflop, 85 flop a byte out of the L2; tensor cores are the bound but for a few rows, where it
// is the reading of B.
#include "kernels/matmul.h"
#include "kernels/matmul_instances.cuh"
#include "tile/tensor_map.h"

namespace pk {
namespace {

using matmul::Instance;

constexpr MatmulTile kTiles[] = {MatmulTile::k128x256, MatmulTile::k2x128x256, MatmulTile::k128x128,
                                 MatmulTile::k64x256};
constexpr int kBandRows = 2048;                 // of C: about as many as a wave has columns
constexpr int64_t kMostSize = INT32_MAX - 256;  // a tile past the edge is still an int
constexpr int64_t kFlagBytes = 256;             // flags are rounded up to it

Instance instance_of(MatmulTile tile, bool bfloat16, bool transpose_a, bool transpose_b) {
  const auto find = bfloat16 ? matmul::bfloat16_instance : matmul::float16_instance;
  // A transposed A has m contiguous, a transposed B has k.
  return find(tile, transpose_a, !transpose_b);
}

// Of a split tile every part but the last is left for the last one's block.
int64_t num_left(const MatmulPlan& plan, const Instance& instance) {
  return int64_t{plan.split_tiles} * (plan.split - 1) * instance.cluster;
}

int64_t flag_bytes(int64_t num_left) {
  return (num_left * 4 + kFlagBytes - 1) / kFlagBytes * kFlagBytes;
}

int ceil_div(int64_t x, int64_t by) { return static_cast<int>((x + by - 1) / by); }

}  // namespace

int64_t matmul_scratch_bytes(const MatmulPlan& plan) {
  const Instance instance = instance_of(plan.tile, true, false, false);
  const int64_t left = num_left(plan, instance);
  return flag_bytes(left) + 4 * left * instance.tile_m * instance.tile_n;
}

cudaError_t launch_matmul(const MatmulOperands& in, const MatmulPlan& plan, void* scratch,
                          cudaStream_t stream) {
  if (in.m <= 0 || in.n <= 0 || in.k <= 0 || in.m > kMostSize || in.n > kMostSize ||
      in.k > kMostSize)
    return cudaErrorInvalidValue;
  // Vectors of the result, and what tensor maps ask for.
  if (in.pitch_a % 8 != 0 || in.pitch_b % 8 != 0 || in.pitch_c % 8 != 0 || in.pitch_c < in.n ||
      reinterpret_cast<uintptr_t>(in.c) % 16 != 0)
    return cudaErrorInvalidValue;
  const Instance instance = instance_of(plan.tile, in.bfloat16, in.transpose_a, in.transpose_b);
  matmul::Args args{};
  const int tile_m = instance.tile_m * instance.cluster;
  args.walk = {ceil_div(in.m, tile_m),  ceil_div(in.n, instance.tile_n),
               ceil_div(in.k, kBlockK), plan.num_blocks / instance.cluster,
               plan.split_tiles,        plan.split,
               kBandRows / tile_m,      0};
  const MatmulWalk& walk = args.walk;
  if (int64_t{walk.num_m} * walk.num_n > INT32_MAX || plan.num_blocks <= 0 ||
      plan.num_blocks % instance.cluster != 0 || plan.split_tiles < 0 || plan.split < 1 ||
      walk.whole_tiles() < 0 || plan.split > walk.num_steps ||
      int64_t{plan.split_tiles} * plan.split > walk.num_workers ||
      (plan.split_tiles > 0 && walk.whole_tiles() % walk.num_workers != 0))
    return cudaErrorInvalidValue;

  const Matrix a{const_cast<void*>(in.a), in.transpose_a ? in.k : in.m,
                 in.transpose_a ? in.m : in.k, in.pitch_a};
  const Matrix b{const_cast<void*>(in.b), in.transpose_b ? in.n : in.k,
                 in.transpose_b ? in.k : in.n, in.pitch_b};
  if (cudaError_t error = make_tensor_map(&args.a, a, in.bfloat16, instance.box_a, kPanel))
    return error;
  if (cudaError_t error = make_tensor_map(&args.b, b, in.bfloat16, instance.box_b, kPanel))
    return error;
  if (in.float32_result) {
    args.c32 = static_cast<float*>(in.c);
  } else {
    const Matrix c{in.c, in.m, in.n, in.pitch_c};
    if (cudaError_t error = make_tensor_map(&args.c, c, in.bfloat16, 64, kPanel)) return error;
  }
  args.m = static_cast<int>(in.m);
  args.pitch_c = in.pitch_c;
  if (const int64_t left = num_left(plan, instance); left > 0) {
    if (scratch == nullptr) return cudaErrorInvalidValue;
    args.flags = static_cast<uint32_t*>(scratch);
    args.partials = reinterpret_cast<float*>(static_cast<char*>(scratch) + flag_bytes(left));
    if (cudaError_t error = cudaMemsetAsync(scratch, 0, flag_bytes(left), stream)) return error;
  }
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(instance.cluster), 1, 1};
  cudaLaunchConfig_t launch{};
  launch.gridDim = plan.num_blocks;
  launch.blockDim = matmul::Crew::kThreads;
  launch.dynamicSmemBytes = instance.shared_bytes;
  launch.stream = stream;
  launch.attrs = &cluster;
  launch.numAttrs = instance.cluster > 1;
  return cudaLaunchKernelEx(&launch, instance.kernel, args, matmul::WholeSource{},
                            matmul::PlainEpilogue{});
}

cudaError_t load_matmul() {
  for (MatmulTile tile : kTiles) {
    for (int which = 0; which < 8; ++which) {
      const Instance instance = instance_of(tile, which & 1, which & 2, which & 4);
      if (cudaError_t error = cudaFuncSetAttribute(kernel_pointer(instance.kernel),
                                                   cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   instance.shared_bytes))
        return error;
      if (cudaError_t error = load_kernels({kernel_pointer(instance.kernel)})) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace pk

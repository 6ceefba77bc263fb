// The kernels of matrix products by name, and how the host launches them.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/matmul.cuh"
#include "kernels/matmul.h"
#include "schedule/epilogue.cuh"
#include "schedule/matmul_walk.h"
#include "tile/launch.h"
#include "tile/tensor_map.h"

namespace pk::matmul {

inline constexpr int kBandRows = 2048;  // of C at least: about as many as a wave has columns
inline constexpr int64_t kMostSize = INT32_MAX - 256;  // a tile past the edge is still an int

// Each with as many stages as shared memory holds.
using Tile128x256 = TileShape<128, 256, 4>;
using Tile128x128 = TileShape<128, 128, 6>;
using Tile64x256 = TileShape<64, 256, 4>;
using Tile64x128 = TileShape<64, 128, 8>;
using Tile64x64 = TileShape<64, 64, 13, 1>;

// f(TileShape) of a tile.
template <typename F>
auto visit_shape(MatmulTile tile, F f) {
  switch (tile) {
    case MatmulTile::k128x256:
      return f(Tile128x256{});
    case MatmulTile::k128x128:
      return f(Tile128x128{});
    case MatmulTile::k64x256:
      return f(Tile64x256{});
    case MatmulTile::k64x128:
      return f(Tile64x128{});
    case MatmulTile::k64x64:
      break;
  }
  return f(Tile64x64{});
}

// What the host must know of a kernel.
template <typename Kernel>
struct InstanceOf {
  Kernel kernel;
  int shared_bytes;
  int num_threads;
  int tile_m, tile_n;
  // What one copy of a tensor map brings: rows and columns, of A and of B.
  int box_a, box_b;
};

template <typename Shape, Major kMajorA, Major kMajorB, typename Kernel>
InstanceOf<Kernel> instance_of(Kernel kernel) {
  using Memory = Shared<Shape, kMajorA, kMajorB>;
  return {kernel,
          static_cast<int>(sizeof(Memory)) + kSwizzleBytes,
          Shape::Crew::kThreads,
          Shape::kM,
          Shape::kN,
          Memory::A::kBoxOuter,
          Memory::B::kBoxOuter};
}

template <typename Walk>
using Instance = InstanceOf<void (*)(Args<Walk>, WholeSource, Epilogue)>;

template <typename Shape, ptx::Type kType, Major kMajorA, Major kMajorB, typename Walk>
Instance<Walk> make_instance() {
  return instance_of<Shape, kMajorA, kMajorB>(
      matmul<Shape, kType, kMajorA, kMajorB, Walk, WholeSource, Epilogue>);
}

// Fills in what all products have in common. `rows_past`: rows of A that no tile has and that are
// not loaded, so long as the first tile is the only one.
template <typename Kernel, typename Walk>
cudaError_t fill(const InstanceOf<Kernel>& instance, Args<Walk>& args, const Matrix& a,
                 const Matrix& b, const Matrix& c, bool bfloat16, bool float32, int rows_past) {
  // Vectors of the result, and what tensor maps ask for.
  if (a.pitch % 8 != 0 || b.pitch % 8 != 0 || c.pitch % 8 != 0 || a.pitch < a.cols ||
      b.pitch < b.cols || c.pitch < c.cols || reinterpret_cast<uintptr_t>(c.address) % 16 != 0)
    return cudaErrorInvalidValue;
  args.step_bytes = 2 * kBlockK * (instance.tile_m - rows_past + instance.tile_n);
  if (cudaError_t error = make_tensor_map(&args.a, a, bfloat16, instance.box_a - rows_past, kPanel))
    return error;
  if (cudaError_t error = make_tensor_map(&args.b, b, bfloat16, instance.box_b, kPanel))
    return error;
  args.c.address = c.address;
  args.c.rows = static_cast<int>(c.rows);
  args.c.pitch = c.pitch;
  args.c.float32 = float32;
  if (!float32) {
    if (cudaError_t error =
            make_tensor_map(&args.c.map, c, bfloat16, ResultPanel::kRows, ResultPanel::kCols))
      return error;
  }
  return cudaSuccess;
}

// Launches a kernel in clusters of `cluster` blocks.
template <typename Kernel, typename... Arguments>
cudaError_t launch_clusters(const InstanceOf<Kernel>& instance, int num_blocks, int cluster,
                            cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = num_blocks;
  config.blockDim = instance.num_threads;
  config.dynamicSmemBytes = instance.shared_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = cluster > 1;
  return cudaLaunchKernelEx(&config, instance.kernel, arguments...);
}

template <typename Walk>
cudaError_t launch(const Instance<Walk>& instance, Args<Walk>& args, const Epilogue& epilogue,
                   const Matrix& a, const Matrix& b, const Matrix& c, bool bfloat16, bool float32,
                   int rows_past, int num_blocks, int cluster, cudaStream_t stream) {
  if (cudaError_t error = fill(instance, args, a, b, c, bfloat16, float32, rows_past)) return error;
  return launch_clusters(instance, num_blocks, cluster, stream, args, WholeSource{}, epilogue);
}

// Loads a kernel on the current device and gives it its shared memory.
template <typename Kernel>
cudaError_t load(const InstanceOf<Kernel>& instance) {
  if (cudaError_t error =
          cudaFuncSetAttribute(kernel_pointer(instance.kernel),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, instance.shared_bytes))
    return error;
  return load_kernels({kernel_pointer(instance.kernel)});
}

inline int ceil_div(int64_t x, int64_t by) { return static_cast<int>((x + by - 1) / by); }

// Of one operand type, each compiled by itself.
Instance<MatmulWalk> bfloat16_instance(MatmulTile tile, bool m_contiguous, bool n_contiguous);
Instance<MatmulWalk> float16_instance(MatmulTile tile, bool m_contiguous, bool n_contiguous);
Instance<MatmulWalk> float8_instance(MatmulTile tile);  // without a kernel for most tiles

template <typename Shape, ptx::Type kType>
Instance<MatmulWalk> of_majors(bool m_contiguous, bool n_contiguous) {
  constexpr Major kK = Major::kK, kMn = Major::kMn;
  if (m_contiguous) {
    return n_contiguous ? make_instance<Shape, kType, kMn, kMn, MatmulWalk>()
                        : make_instance<Shape, kType, kMn, kK, MatmulWalk>();
  }
  return n_contiguous ? make_instance<Shape, kType, kK, kMn, MatmulWalk>()
                      : make_instance<Shape, kType, kK, kK, MatmulWalk>();
}

template <ptx::Type kType>
Instance<MatmulWalk> of_tile(MatmulTile tile, bool m_contiguous, bool n_contiguous) {
  return visit_shape(tile, [=](auto shape) {
    return of_majors<decltype(shape), kType>(m_contiguous, n_contiguous);
  });
}

}  // namespace pk::matmul

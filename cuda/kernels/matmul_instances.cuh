// The kernels of plain matmul for one operand type, and how the host names them.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/matmul.cuh"
#include "kernels/matmul.h"
#include "tile/launch.h"

namespace pk::matmul {

// As many stages as shared memory holds.
using Shape128x256 = TileShape<128, 256, 4>;
using Shape2x128x256 = TileShape<128, 256, 4, 2>;
using Shape128x128 = TileShape<128, 128, 6>;
using Shape64x256 = TileShape<64, 256, 4>;

using Kernel = void (*)(Args, WholeSource, PlainEpilogue);

struct Instance {
  Kernel kernel;
  int shared_bytes;
  int cluster;         // blocks
  int tile_m, tile_n;  // of a block
  // What one copy of a tensor map brings: rows and columns, of A and of B.
  int box_a, box_b;
};

template <typename Shape, ptx::Half kType, Major kMajorA, Major kMajorB>
Instance make_instance() {
  using Memory = Shared<Shape, kMajorA, kMajorB>;
  return {matmul<Shape, kType, kMajorA, kMajorB, WholeSource, PlainEpilogue>,
          static_cast<int>(sizeof(Memory)) + kSwizzleBytes,
          Shape::kCluster,
          Shape::kM,
          Shape::kN,
          Memory::A::kBoxOuter,
          Memory::B::kBoxOuter};
}

template <typename Shape, ptx::Half kType>
Instance of_majors(bool m_contiguous, bool n_contiguous) {
  if (m_contiguous) {
    return n_contiguous ? make_instance<Shape, kType, Major::kMn, Major::kMn>()
                        : make_instance<Shape, kType, Major::kMn, Major::kK>();
  }
  return n_contiguous ? make_instance<Shape, kType, Major::kK, Major::kMn>()
                      : make_instance<Shape, kType, Major::kK, Major::kK>();
}

template <ptx::Half kType>
Instance of_tile(MatmulTile tile, bool m_contiguous, bool n_contiguous) {
  switch (tile) {
    case MatmulTile::k128x256:
      return of_majors<Shape128x256, kType>(m_contiguous, n_contiguous);
    case MatmulTile::k2x128x256:
      return of_majors<Shape2x128x256, kType>(m_contiguous, n_contiguous);
    case MatmulTile::k128x128:
      return of_majors<Shape128x128, kType>(m_contiguous, n_contiguous);
    case MatmulTile::k64x256:
      break;
  }
  return of_majors<Shape64x256, kType>(m_contiguous, n_contiguous);
}

Instance bfloat16_instance(MatmulTile tile, bool m_contiguous, bool n_contiguous);
Instance float16_instance(MatmulTile tile, bool m_contiguous, bool n_contiguous);

}  // namespace pk::matmul

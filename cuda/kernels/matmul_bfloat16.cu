#include "kernels/matmul_instances.cuh"

namespace pk::matmul {

Instance<MatmulWalk> bfloat16_instance(MatmulTile tile, bool m_contiguous, bool n_contiguous) {
  return of_tile<ptx::Type::kBfloat16>(tile, m_contiguous, n_contiguous);
}

}  // namespace pk::matmul

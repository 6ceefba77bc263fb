#include "kernels/all_gather_matmul.cuh"

namespace pk::matmul {

GatherInstance gather_float16_instance(MatmulTile tile, bool transpose_w) {
  return gather_instance_of<ptx::Type::kFloat16>(tile, transpose_w);
}

}  // namespace pk::matmul

#include "kernels/all_gather_matmul.cuh"

namespace pk::matmul {

GatherInstance gather_bfloat16_instance(MatmulTile tile, bool transpose_w) {
  return gather_instance_of<ptx::Type::kBfloat16>(tile, transpose_w);
}

}  // namespace pk::matmul

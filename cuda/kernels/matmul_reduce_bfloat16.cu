#include "kernels/matmul_reduce_instances.cuh"

namespace pk::matmul {

ReduceInstance reduce_bfloat16_instance(bool transpose_w) {
  return reduce_instance<ptx::Type::kBfloat16>(transpose_w);
}

}  // namespace pk::matmul

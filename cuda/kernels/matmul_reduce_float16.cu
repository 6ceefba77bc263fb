#include "kernels/matmul_reduce_instances.cuh"

namespace pk::matmul {

ReduceInstance reduce_float16_instance(bool transpose_w) {
  return reduce_instance<ptx::Type::kFloat16>(transpose_w);
}

}  // namespace pk::matmul

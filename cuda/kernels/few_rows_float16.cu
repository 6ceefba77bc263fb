#include "kernels/few_rows_instances.cuh"

namespace pk::matmul {

FewRowsInstance few_rows_float16_instance(bool transpose_w) {
  return few_rows_instance<ptx::Type::kFloat16>(transpose_w);
}

}  // namespace pk::matmul

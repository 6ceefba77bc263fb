#include "kernels/few_rows_instances.cuh"

namespace pk::matmul {

FewRowsInstance few_rows_bfloat16_instance(bool transpose_w) {
  return few_rows_instance<ptx::Type::kBfloat16>(transpose_w);
}

}  // namespace pk::matmul

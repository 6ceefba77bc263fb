// Attention's derivatives of bfloat16.
#include "kernels/attention_backward_instances.cuh"

namespace pk::attention {

BackwardInstance bfloat16_backward(int i, bool capped) {
  return backward_of_index<ptx::Type::kBfloat16>(i, capped);
}

}  // namespace pk::attention

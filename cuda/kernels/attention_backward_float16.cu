// Attention's derivatives of float16.
#include "kernels/attention_backward_instances.cuh"

namespace pk::attention {

BackwardInstance float16_backward(int i, bool capped) {
  return backward_of_index<ptx::Type::kFloat16>(i, capped);
}

}  // namespace pk::attention

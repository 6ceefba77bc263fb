// Attention of bfloat16.
#include "kernels/attention_instances.cuh"

namespace pk::attention {

Instance bfloat16_instance(int i) { return of_index<ptx::Type::kBfloat16>(i); }

}  // namespace pk::attention

// Attention of float16.
#include "kernels/attention_instances.cuh"

namespace pk::attention {

Instance float16_instance(int i) { return of_index<ptx::Type::kFloat16>(i); }

}  // namespace pk::attention

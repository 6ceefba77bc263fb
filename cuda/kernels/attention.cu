// Flops: 4 queries keys width for each head, half of them under a causal mask. Bytes: what is
// computed with lies in the L2 but for the first time. A block of 128 keys with 128 queries is 8.4
// Mflop of width 128, 2048 cycles of the tensor cores of an SM, and 16384 exponentials, 1024 cycles
// of its special-function units: tensor cores are the bound, if the two overlap. Of width 64 both
// take 1024.
#include "kernels/attention.h"
#include "kernels/attention_instances.cuh"

namespace pk {
namespace {

using attention::Instance;

Instance instance_of(int i, bool bfloat16) {
  return bfloat16 ? attention::bfloat16_instance(i) : attention::float16_instance(i);
}

Instance find(int64_t width, int64_t value_width, bool bfloat16) {
  for (int i = 0; i < attention::kNumInstances; ++i) {
    const Instance instance = instance_of(i, bfloat16);
    if (instance.width == width && instance.value_width == value_width) return instance;
  }
  return {};
}

}  // namespace

bool has_attention(int64_t width, int64_t value_width) {
  return find(width, value_width, true).kernel != nullptr;
}

cudaError_t launch_attention(const AttentionOperands& operands, int num_blocks,
                             cudaStream_t stream) {
  const AttentionShape& in = operands.shape;
  const Instance instance = find(in.width, in.value_width, in.bfloat16);
  if (instance.kernel == nullptr || num_blocks <= 0 || !attention::is_valid(in))
    return cudaErrorInvalidValue;
  attention::Args args{};
  const int group = static_cast<int>(in.num_heads / in.num_kv_heads);
  // The last rows see the most under a causal mask.
  args.walk =
      attention::walk_of(in, in.num_queries, instance.rows, in.num_heads, group, in.right >= 0);
  if (!args.walk.is_valid()) return cudaErrorInvalidValue;
  num_blocks = std::min(num_blocks, args.walk.num_tiles());
  const bool is_even = in.left < 0 && in.right < 0 && in.query_segments == nullptr;
  if (num_blocks < args.walk.num_tiles() && !is_even) {
    args.tickets = operands.tickets;
    if (cudaError_t error = cudaMemsetAsync(args.tickets, 0, sizeof(uint32_t), stream))
      return error;
  }
  args.log_sum_exp = operands.log_sum_exp;
  args.num_heads = static_cast<int>(in.num_heads);
  args.group = group;
  args.queries = attention::queries_of(in);
  args.keys = attention::keys_of(in);
  args.left = attention::reach(in.left);
  args.right = attention::reach(in.right);
  args.logits = attention::logits_of(in);
  const auto matrix = attention::rows_of;
  const Matrix q = matrix(operands.q, in.batch, in.num_queries, in.num_heads, in.width);
  const Matrix k = matrix(operands.k, in.batch, in.num_keys, in.num_kv_heads, in.width);
  const Matrix v = matrix(operands.v, in.batch, in.num_keys, in.num_kv_heads, in.value_width);
  const Matrix out = matrix(operands.out, in.batch, in.num_queries, in.num_heads, in.value_width);
  args.out.address = operands.out;
  args.out.rows = static_cast<int>(in.batch * in.num_queries);
  args.out.pitch = out.pitch;
  args.out.float32 = in.float32_result;
  struct {
    CUtensorMap* map;
    const Matrix& matrix;
    int rows;
  } maps[] = {{&args.q, q, instance.rows},
              {&args.k, k, instance.block},
              {&args.v, v, instance.block},
              {&args.out.map, out, ResultPanel::kRows}};
  for (const auto& each : maps) {
    if (each.map == &args.out.map && in.float32_result) continue;
    if (cudaError_t error = make_tensor_map(each.map, each.matrix, in.bfloat16, each.rows, kPanel))
      return error;
  }
  void* arguments[] = {&args};
  return cudaLaunchKernel(kernel_pointer(instance.kernel), dim3(num_blocks),
                          dim3(instance.num_threads), arguments, instance.shared_bytes, stream);
}

cudaError_t load_attention() {
  for (int i = 0; i < attention::kNumInstances; ++i) {
    for (bool bfloat16 : {false, true}) {
      const Instance instance = instance_of(i, bfloat16);
      if (cudaError_t error = attention::load(instance.kernel, instance.shared_bytes)) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace pk

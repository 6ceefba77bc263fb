// Flops: 10 queries keys width for each head of queries, half of them under a causal mask. A step
// is 64 queries with 128 keys: of width 128 it is 10.5 Mflop, 2560 cycles of the tensor cores of an
// SM, and some 390 KiB through its shared memory, 3050 cycles at 128 bytes each: most of it
// operands of products with 64 rows and 64 columns, which read as fast as they compute. Its 8192
// exponentials take 512 cycles of the special-function units, beside that. The L2 adds up 32 KiB of
// dQ a step.
#include "kernels/attention_backward.h"
#include "kernels/attention_backward_instances.cuh"

namespace pk {
namespace {

using attention::BackwardInstance;

BackwardInstance instance_of(int i, bool bfloat16, bool capped) {
  return bfloat16 ? attention::bfloat16_backward(i, capped)
                  : attention::float16_backward(i, capped);
}

BackwardInstance find(int64_t width, bool bfloat16, bool capped) {
  for (int i = 0; i < attention::kBackwardInstances; ++i) {
    const BackwardInstance instance = instance_of(i, bfloat16, capped);
    if (instance.width == width) return instance;
  }
  return {};
}

bool is_aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

}  // namespace

bool has_attention_backward(int64_t width, int64_t value_width) {
  return width == value_width && find(width, true, false).kernel != nullptr;
}

cudaError_t launch_attention_backward(const AttentionBackwardOperands& operands, int num_blocks,
                                      cudaStream_t stream) {
  static_assert(kBackwardQueries == attention::kQueries && kBackwardQueries == kBoundRows);
  const AttentionShape& in = operands.shape;
  if (!has_attention_backward(in.width, in.value_width) || num_blocks <= 0 ||
      !attention::is_valid(in) || !is_aligned(operands.lse) || !is_aligned(operands.delta) ||
      !is_aligned(operands.dk) || !is_aligned(operands.dv))
    return cudaErrorInvalidValue;
  const BackwardInstance instance = find(in.width, in.bfloat16, in.soft_cap > 0);
  attention::BackwardArgs args{};
  const int64_t query_blocks = (in.num_queries + kBackwardQueries - 1) / kBackwardQueries;
  const int64_t num_turns = in.batch * in.num_heads * query_blocks;
  // The first keys are seen by most under a causal mask.
  args.walk = attention::walk_of(in, in.num_keys, attention::kKeys, in.num_kv_heads, 1, false);
  if (!args.walk.is_valid() || num_turns > INT32_MAX || query_blocks > INT32_MAX / 2 / kBoundRows)
    return cudaErrorInvalidValue;
  args.lse = operands.lse;
  args.delta = operands.delta;
  args.turns = operands.turns;
  args.ticket = operands.turns + num_turns;
  args.num_heads = static_cast<int>(in.num_heads);
  args.num_kv_heads = static_cast<int>(in.num_kv_heads);
  args.group = args.num_heads / args.num_kv_heads;
  args.query_blocks = static_cast<int>(query_blocks);
  args.queries = attention::queries_of(in);
  args.keys = attention::keys_of(in);
  args.before = attention::reach(in.right);
  args.after = attention::reach(in.left);
  args.scale = in.scale;
  args.logits = attention::logits_of(in);

  const auto matrix = attention::rows_of;
  const Matrix dq = matrix(operands.dq, in.batch, in.num_queries, in.num_heads, in.width);
  if (cudaError_t error =
          make_float32_tensor_map(&args.dq, dq, attention::kQueries, attention::kFloats))
    return error;
  const struct {
    CUtensorMap* map;
    const void* address;
    int64_t rows, heads;
    int box_rows;
  } maps[] = {{&args.q, operands.q, in.num_queries, in.num_heads, attention::kQueries},
              {&args.d_out, operands.d_out, in.num_queries, in.num_heads, attention::kQueries},
              {&args.k, operands.k, in.num_keys, in.num_kv_heads, attention::kKeys},
              {&args.v, operands.v, in.num_keys, in.num_kv_heads, attention::kKeys},
              {&args.dk.map, operands.dk, in.num_keys, in.num_kv_heads, attention::kKeys},
              {&args.dv.map, operands.dv, in.num_keys, in.num_kv_heads, attention::kKeys}};
  for (const auto& each : maps) {
    const bool is_result = each.map == &args.dk.map || each.map == &args.dv.map;
    if (is_result && in.float32_result) continue;
    const Matrix of = matrix(each.address, in.batch, each.rows, each.heads, in.width);
    if (cudaError_t error = make_tensor_map(each.map, of, in.bfloat16, each.box_rows, kPanel))
      return error;
  }
  const auto fill = [&](Result& result, void* address) {
    result.address = address;
    result.rows = static_cast<int>(in.batch * in.num_keys);
    result.pitch = in.num_kv_heads * in.width;
    result.float32 = in.float32_result;
  };
  fill(args.dk, operands.dk);
  fill(args.dv, operands.dv);
  // Tiles add to dq.
  const size_t dq_bytes = sizeof(float) * dq.batch * dq.rows * dq.pitch;
  if (cudaError_t error = cudaMemsetAsync(operands.dq, 0, dq_bytes, stream)) return error;
  if (cudaError_t error =
          cudaMemsetAsync(operands.turns, 0, sizeof(uint32_t) * (num_turns + 1), stream))
    return error;
  num_blocks = std::min(num_blocks, args.walk.num_tiles());
  void* arguments[] = {&args};
  return cudaLaunchKernel(kernel_pointer(instance.kernel), dim3(num_blocks),
                          dim3(instance.num_threads), arguments, instance.shared_bytes, stream);
}

cudaError_t load_attention_backward() {
  for (int i = 0; i < attention::kBackwardInstances; ++i) {
    for (int which = 0; which < 4; ++which) {
      const BackwardInstance instance = instance_of(i, which & 1, which & 2);
      if (cudaError_t error = attention::load(instance.kernel, instance.shared_bytes)) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace pk

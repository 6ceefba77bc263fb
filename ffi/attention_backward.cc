// attention_backward for XLA: decode, check that buffers and attributes fit, launch. No maths.
#include "ffi/attention_backward.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <string>

#include "ffi/attention_shape.h"
#include "ffi/attributes.h"
#include "ffi/handler.h"
#include "ffi/matrix.h"
#include "kernels/attention_backward.h"

namespace pk {
namespace {

namespace ffi = xla::ffi;

ffi::Error initialize(int32_t device) {
  static std::atomic<bool> loaded[kMaxLocalDevices];
  return load_once("attention_backward", loaded, load_attention_backward, device);
}

ffi::Error execute(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                   ffi::Dictionary attributes) {
  return guarded("attention_backward", [&] {
    using Type = ffi::DataType;
    AttentionBackwardOperands in{attention_shape(operands, 6, attributes)};
    AttentionShape& shape = in.shape;
    if (!has_attention_backward(shape.width, shape.value_width))
      throw Error("no kernel for heads of " + std::to_string(shape.width) + " and " +
                  std::to_string(shape.value_width));
    const int64_t blocks = (shape.num_queries + kBackwardQueries - 1) / kBackwardQueries;
    const int64_t padded = blocks * kBackwardQueries;
    const auto d_out = operand(operands, 3), lse = operand(operands, 4);
    const auto delta = operand(operands, 5);
    require_shape("the cotangent", d_out, shape.bfloat16 ? Type::BF16 : Type::F16,
                  {shape.batch, shape.num_queries, shape.num_heads, shape.value_width});
    require_shape("the log-sum-exp", lse, Type::F32, {shape.batch, shape.num_heads, padded});
    require_shape("delta", delta, Type::F32, {shape.batch, shape.num_heads, padded});
    const auto dq = result(results, 0), dk = result(results, 1), dv = result(results, 2);
    const auto turns = result(results, 3);
    require_shape("dq", dq, Type::F32,
                  {shape.batch, shape.num_queries, shape.num_heads, shape.width});
    shape.float32_result = is_float32(dk, shape);
    require_shape("dk", dk, dk.element_type(),
                  {shape.batch, shape.num_keys, shape.num_kv_heads, shape.width});
    require_shape("dv", dv, dk.element_type(),
                  {shape.batch, shape.num_keys, shape.num_kv_heads, shape.value_width});
    require_shape("turns", turns, Type::U32, {shape.batch * shape.num_heads * blocks + 1});
    in.q = operand(operands, 0).untyped_data();
    in.k = operand(operands, 1).untyped_data();
    in.v = operand(operands, 2).untyped_data();
    in.d_out = d_out.untyped_data();
    in.lse = static_cast<const float*>(lse.untyped_data());
    in.delta = static_cast<const float*>(delta.untyped_data());
    in.dq = static_cast<float*>(dq.untyped_data());
    in.dk = dk.untyped_data();
    in.dv = dv.untyped_data();
    in.turns = static_cast<uint32_t*>(turns.untyped_data());
    const int64_t num_blocks = integer(attributes, "num_blocks", 1, kMaxBlocksOfMatmul);
    check(launch_attention_backward(in, static_cast<int>(num_blocks), stream), "launch");
  });
}

}  // namespace

PK_DEFINE_PRODUCT(attention_backward);

}  // namespace pk

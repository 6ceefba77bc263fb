// attention for XLA: decode, check that buffers and attributes fit, launch. No maths.
#include "ffi/attention.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <string>

#include "ffi/attention_shape.h"
#include "ffi/attributes.h"
#include "ffi/handler.h"
#include "ffi/matrix.h"
#include "kernels/attention.h"

namespace pk {
namespace {

namespace ffi = xla::ffi;

ffi::Error initialize(int32_t device) {
  static std::atomic<bool> loaded[kMaxLocalDevices];
  return load_once("attention", loaded, load_attention, device);
}

ffi::Error execute(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                   ffi::Dictionary attributes) {
  return guarded("attention", [&] {
    AttentionOperands in{attention_shape(operands, 3, attributes)};
    AttentionShape& shape = in.shape;
    const ffi::AnyBuffer out = result(results, 0), log_sum_exp = result(results, 1);
    shape.float32_result = is_float32(out, shape);
    require_shape("the result", out, out.element_type(),
                  {shape.batch, shape.num_queries, shape.num_heads, shape.value_width});
    require_shape("the log-sum-exp", log_sum_exp, ffi::DataType::F32,
                  {shape.batch, shape.num_queries, shape.num_heads});
    if (!has_attention(shape.width, shape.value_width))
      throw Error("no kernel for heads of " + std::to_string(shape.width) + " and " +
                  std::to_string(shape.value_width));
    in.q = operand(operands, 0).untyped_data();
    in.k = operand(operands, 1).untyped_data();
    in.v = operand(operands, 2).untyped_data();
    in.out = out.untyped_data();
    in.log_sum_exp = static_cast<float*>(log_sum_exp.untyped_data());
    const ffi::AnyBuffer tickets = result(results, 2);
    require_shape("tickets", tickets, ffi::DataType::U32, {1});
    in.tickets = static_cast<uint32_t*>(tickets.untyped_data());
    const int64_t num_blocks = integer(attributes, "num_blocks", 1, kMaxBlocksOfMatmul);
    check(launch_attention(in, static_cast<int>(num_blocks), stream), "launch");
  });
}

}  // namespace

PK_DEFINE_PRODUCT(attention);

}  // namespace pk

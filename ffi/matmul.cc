// matmul for XLA: decode, check that buffers and attributes fit, launch. No maths.
#include "ffi/matmul.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <string>
#include <string_view>

#include "ffi/attributes.h"
#include "ffi/handler.h"
#include "ffi/matrix.h"
#include "ffi/names.h"
#include "kernels/matmul.h"

namespace pk {
namespace {

namespace ffi = xla::ffi;

ffi::Error initialize(int32_t device) {
  static std::atomic<bool> loaded[kMaxLocalDevices];
  return load_once("matmul", loaded, load_matmul, device);
}

// A scale of float8 operands: one number, or one for each row or column.
const float* scale(const ffi::AnyBuffer& buffer, int64_t each, bool* is_each) {
  const auto count = static_cast<int64_t>(buffer.element_count());
  if (buffer.element_type() != ffi::DataType::F32 || (count != 1 && count != each))
    throw Error("a scale must be float32, one number or " + std::to_string(each));
  *is_each = count == each;
  return static_cast<const float*>(buffer.untyped_data());
}

ffi::Error execute(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                   ffi::Dictionary attributes) {
  return guarded("matmul", [&] {
    const ffi::AnyBuffer a = operand(operands, 0), b = operand(operands, 1), c = result(results, 0);
    MatmulOperands in{};
    in.m = integer(attributes, "m", 1, INT32_MAX);
    in.n = integer(attributes, "n", 1, INT32_MAX);
    in.k = integer(attributes, "k", 1, INT32_MAX);
    in.transpose_a = attribute<bool>(attributes, "transpose_a");
    in.transpose_b = attribute<bool>(attributes, "transpose_b");
    in.float8 = is_float8(a, b, c);
    in.bfloat16 = in.float8 || is_bfloat16(a, b, c);
    in.float32_result = c.element_type() == ffi::DataType::F32;
    const int64_t multiple = in.float8 ? 16 : 8;  // 16 bytes
    in.pitch_a = in.transpose_a ? pitch_of("a", a, in.k, in.m, 0, multiple)
                                : pitch_of("a", a, in.m, in.k, 0, multiple);
    in.pitch_b = in.transpose_b ? pitch_of("b", b, in.n, in.k, 0, multiple)
                                : pitch_of("b", b, in.k, in.n, 0, multiple);
    in.pitch_c = pitch_of("the result", c, in.m, in.n);
    in.a = a.untyped_data();
    in.b = b.untyped_data();
    in.c = c.untyped_data();
    in.activation = matmul_activation_from(attribute<std::string_view>(attributes, "activation"));
    size_t next = 2;
    if (attribute<bool>(attributes, "scales")) {
      in.row_scale = scale(operand(operands, next++), in.m, &in.scale_each_row);
      in.col_scale = scale(operand(operands, next++), in.n, &in.scale_each_col);
    }
    if (attribute<bool>(attributes, "bias")) {
      const ffi::AnyBuffer bias = operand(operands, next++);
      const auto half = in.bfloat16 ? ffi::DataType::BF16 : ffi::DataType::F16;
      in.float32_bias = bias.element_type() == ffi::DataType::F32;
      if (!in.float32_bias && bias.element_type() != half)
        throw Error("the bias must be float32, or bfloat16 or float16 as the product is");
      if (static_cast<int64_t>(bias.element_count()) != in.pitch_c)
        throw Error("the bias has " + std::to_string(bias.element_count()) + " elements for " +
                    std::to_string(in.pitch_c) + " columns");
      in.bias = bias.untyped_data();
    }
    MatmulPlan plan{};
    plan.tile = matmul_tile_from(attribute<std::string_view>(attributes, "tile"));
    plan.num_blocks = static_cast<int>(integer(attributes, "num_blocks", 1, kMaxBlocksOfMatmul));
    plan.split_tiles = static_cast<int>(integer(attributes, "split_tiles", 0, kMaxBlocksOfMatmul));
    plan.split = static_cast<int>(integer(attributes, "split", 1, kMaxBlocksOfMatmul));
    check(launch_matmul(in, plan, stream), "launch");
  });
}

}  // namespace

PK_DEFINE_PRODUCT(matmul);

}  // namespace pk

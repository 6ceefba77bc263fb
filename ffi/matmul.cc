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
    in.pitch_a = in.transpose_a ? pitch_of("a", a, in.k, in.m) : pitch_of("a", a, in.m, in.k);
    in.pitch_b = in.transpose_b ? pitch_of("b", b, in.n, in.k) : pitch_of("b", b, in.k, in.n);
    in.pitch_c = pitch_of("the result", c, in.m, in.n);
    in.bfloat16 = is_bfloat16(a, b, c);
    in.float32_result = c.element_type() == ffi::DataType::F32;
    in.a = a.untyped_data();
    in.b = b.untyped_data();
    in.c = c.untyped_data();
    in.activation = matmul_activation_from(attribute<std::string_view>(attributes, "activation"));
    if (attribute<bool>(attributes, "bias")) {
      const ffi::AnyBuffer bias = operand(operands, 2);
      in.float32_bias = bias.element_type() == ffi::DataType::F32;
      if (!in.float32_bias && bias.element_type() != a.element_type())
        throw Error("the bias must be float32 or of the operands' type");
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

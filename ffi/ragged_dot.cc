// ragged_dot for XLA: decode, check that buffers and attributes fit, launch. No maths.
#include "ffi/ragged_dot.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <string>
#include <string_view>

#include "ffi/attributes.h"
#include "ffi/handler.h"
#include "ffi/matrix.h"
#include "ffi/names.h"
#include "kernels/ragged_dot.h"

namespace pk {
namespace {

namespace ffi = xla::ffi;

ffi::Error initialize(int32_t device) {
  static std::atomic<bool> loaded[kMaxLocalDevices];
  return load_once("ragged_dot", loaded, load_ragged_dot, device);
}

ffi::Error execute(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                   ffi::Dictionary attributes) {
  return guarded("ragged_dot", [&] {
    const ffi::AnyBuffer a = operand(operands, 0), b = operand(operands, 1);
    const ffi::AnyBuffer sizes = operand(operands, 2), c = result(results, 0);
    RaggedDotOperands in{};
    in.m = integer(attributes, "m", 1, INT32_MAX);
    in.n = integer(attributes, "n", 1, INT32_MAX);
    in.k = integer(attributes, "k", 1, INT32_MAX);
    in.num_groups = integer(attributes, "num_groups", 1, INT32_MAX);
    in.transpose_b = attribute<bool>(attributes, "transpose_b");
    in.pitch_a = pitch_of("lhs", a, in.m, in.k);
    in.pitch_b = in.transpose_b ? pitch_of("rhs", b, in.n, in.k, in.num_groups)
                                : pitch_of("rhs", b, in.k, in.n, in.num_groups);
    in.pitch_c = pitch_of("the result", c, in.m, in.n);
    in.bfloat16 = is_bfloat16(a, b, c);
    in.float32_result = c.element_type() == ffi::DataType::F32;
    if (sizes.element_type() != ffi::DataType::S32 ||
        static_cast<int64_t>(sizes.element_count()) != in.num_groups)
      throw Error("group_sizes must be int32, one for each of " + std::to_string(in.num_groups) +
                  " groups");
    in.a = a.untyped_data();
    in.b = b.untyped_data();
    in.group_sizes = static_cast<const int32_t*>(sizes.untyped_data());
    in.c = c.untyped_data();
    const MatmulTile tile = matmul_tile_from(attribute<std::string_view>(attributes, "tile"));
    const int64_t num_blocks = integer(attributes, "num_blocks", 1, kMaxBlocksOfMatmul);
    check(launch_ragged_dot(in, tile, static_cast<int>(num_blocks), stream), "launch");
  });
}

}  // namespace

PK_DEFINE_PRODUCT(ragged_dot);

}  // namespace pk

// matmul for XLA: decode, check that buffers and attributes fit, launch. No maths.
//
// Without state: the attributes are decoded at every execution, which a captured graph does once.
#include "ffi/matmul.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <string>

#include "ffi/attributes.h"
#include "ffi/call_site.h"
#include "ffi/handler.h"
#include "ffi/names.h"
#include "ffi/status.h"
#include "kernels/matmul.h"

namespace pk {
namespace {

namespace ffi = xla::ffi;

constexpr int kMaxBlocksOfMatmul = 1024;

// Loaded before any kernel of the run is started, see launch.h.
ffi::Error initialize(int32_t device) {
  static std::atomic<bool> loaded[kMaxLocalDevices];
  return guarded("matmul", [&] {
    int current = -1;
    check(cudaGetDevice(&current), "cudaGetDevice");
    if (device != current || device >= kMaxLocalDevices)
      throw Error("device " + std::to_string(device) + " while " + std::to_string(current) +
                  " is current; at most " + std::to_string(kMaxLocalDevices) + " are known");
    if (loaded[device].load(std::memory_order_acquire)) return;
    check(load_matmul(), "loading the matmul kernels");
    loaded[device].store(true, std::memory_order_release);
  });
}

// The pitch of a buffer that must hold `rows` rows of at least `cols`.
int64_t pitch_of(const char* name, const ffi::AnyBuffer& buffer, int64_t rows, int64_t cols) {
  const auto dims = buffer.dimensions();
  if (dims.size() == 2 && dims[0] == rows && dims[1] >= cols && dims[1] % 8 == 0) return dims[1];
  std::string shape;
  for (int64_t size : dims) shape += " " + std::to_string(size);
  throw Error(std::string(name) + " has shape" + shape + "; " + std::to_string(rows) + " rows of " +
              std::to_string(cols) + " elements, padded to a multiple of 8, are needed");
}

bool is_bfloat16(ffi::DataType type) {
  if (type != ffi::DataType::BF16 && type != ffi::DataType::F16)
    throw Error("operands must be bfloat16 or float16");
  return type == ffi::DataType::BF16;
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
    in.bfloat16 = is_bfloat16(a.element_type());
    in.float32_result = c.element_type() == ffi::DataType::F32;
    if (b.element_type() != a.element_type() ||
        (!in.float32_result && c.element_type() != a.element_type()))
      throw Error("operands must have one type, and the result that one or float32");
    in.a = a.untyped_data();
    in.b = b.untyped_data();
    in.c = c.untyped_data();
    MatmulPlan plan{};
    plan.tile = matmul_tile_from(attribute<std::string_view>(attributes, "tile"));
    plan.num_blocks = static_cast<int>(integer(attributes, "num_blocks", 1, kMaxBlocksOfMatmul));
    plan.split_tiles = static_cast<int>(integer(attributes, "split_tiles", 0, kMaxBlocksOfMatmul));
    plan.split = static_cast<int>(integer(attributes, "split", 1, kMaxBlocksOfMatmul));
    const int64_t needed = matmul_scratch_bytes(plan);
    void* scratch = nullptr;
    if (needed > 0) {
      const ffi::AnyBuffer buffer = result(results, 1);
      if (static_cast<int64_t>(buffer.size_bytes()) < needed)
        throw Error("scratch of " + std::to_string(buffer.size_bytes()) + " bytes; " +
                    std::to_string(needed) + " are needed");
      scratch = buffer.untyped_data();
    }
    check(launch_matmul(in, plan, scratch, stream), "launch");
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(pk_matmul_initialize, initialize,
                              ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(pk_matmul_execute, execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs<ffi::Dictionary>(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace pk

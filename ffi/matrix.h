// What the handlers of matrix products share.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "ffi/call_site.h"
#include "ffi/status.h"
#include "runtime/check.h"
#include "xla/ffi/api/ffi.h"

namespace pk {

inline constexpr int kMaxBlocksOfMatmul = 1024;

// Calls `load` once for each device: kernels are loaded before any of the run is started, see
// launch.h.
inline xla::ffi::Error load_once(const char* op, std::atomic<bool> (&loaded)[kMaxLocalDevices],
                                 cudaError_t (*load)(), int32_t device) {
  return guarded(op, [&] {
    int current = -1;
    check(cudaGetDevice(&current), "cudaGetDevice");
    if (device != current || device >= kMaxLocalDevices)
      throw Error("device " + std::to_string(device) + " while " + std::to_string(current) +
                  " is current; at most " + std::to_string(kMaxLocalDevices) + " are known");
    if (loaded[device].load(std::memory_order_acquire)) return;
    check(load(), "loading kernels");
    loaded[device].store(true, std::memory_order_release);
  });
}

// Products with a collective move data in one way, by blocks of the plan's number.
inline void require_bulk_stores(const Plan& plan) {
  if (plan.mechanism != Mechanism::kTma || plan.protocol != Protocol::kSimple ||
      plan.num_blocks < 1)
    throw Error("products with a collective go by mechanism tma, protocol simple, and num_blocks");
}

// The pitch of a buffer that must hold `rows` rows of at least `cols`, in a batch of `batch` if
// that is not 0, with rows of a multiple of `multiple` elements.
inline int64_t pitch_of(const char* name, const xla::ffi::AnyBuffer& buffer, int64_t rows,
                        int64_t cols, int64_t batch = 0, int64_t multiple = 8) {
  const auto dims = buffer.dimensions();
  const size_t first = batch > 0;
  if (dims.size() == first + 2 && (batch == 0 || dims[0] == batch) && dims[first] == rows &&
      dims[first + 1] >= cols && dims[first + 1] % multiple == 0)
    return dims[first + 1];
  std::string shape;
  for (int64_t size : dims) shape += " " + std::to_string(size);
  throw Error(std::string(name) + " has shape" + shape + "; " +
              (batch > 0 ? std::to_string(batch) + " times " : "") + std::to_string(rows) +
              " rows of " + std::to_string(cols) + " elements, padded to a multiple of " +
              std::to_string(multiple) + ", are needed");
}

// Whether two operands and a result are of bfloat16, rather than float16.
inline bool is_bfloat16(const xla::ffi::AnyBuffer& a, const xla::ffi::AnyBuffer& b,
                        const xla::ffi::AnyBuffer& c) {
  using Type = xla::ffi::DataType;
  const Type type = a.element_type();
  if (type != Type::BF16 && type != Type::F16) throw Error("operands must be bfloat16 or float16");
  if (b.element_type() != type || (c.element_type() != type && c.element_type() != Type::F32))
    throw Error("operands must have one type, and the result that one or float32");
  return type == Type::BF16;
}

// Whether two operands are of float8_e4m3fn, with a result that goes with them.
inline bool is_float8(const xla::ffi::AnyBuffer& a, const xla::ffi::AnyBuffer& b,
                      const xla::ffi::AnyBuffer& c) {
  using Type = xla::ffi::DataType;
  if (a.element_type() != Type::F8E4M3FN) return false;
  if (b.element_type() != Type::F8E4M3FN ||
      (c.element_type() != Type::BF16 && c.element_type() != Type::F32))
    throw Error("float8_e4m3fn is multiplied by the same, to bfloat16 or float32");
  return true;
}

// The handlers of a product from its functions initialize and execute. Without state: attributes
// are decoded at every execution, which a captured graph does once.
#define PK_DEFINE_PRODUCT(op)                                                                    \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(pk_##op##_initialize, initialize,                                \
                                xla::ffi::Ffi::BindInitialize().Ctx<xla::ffi::DeviceOrdinal>()); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(pk_##op##_execute, execute,                                      \
                                xla::ffi::Ffi::Bind()                                            \
                                    .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()               \
                                    .RemainingArgs()                                             \
                                    .RemainingRets()                                             \
                                    .Attrs<xla::ffi::Dictionary>(),                              \
                                {xla::ffi::Traits::kCmdBufferCompatible})

// What the products summed over ranks share: the sizes of the call site, and buffers that must fit
// them. The result's address and scratch are the op's.
template <typename Operands, typename Site>
Operands operands_of_sum(const Site& site, const xla::ffi::AnyBuffer& x,
                         const xla::ffi::AnyBuffer& w, const xla::ffi::AnyBuffer& y) {
  Operands in{};
  in.m = site.m;
  in.k = site.k;
  in.p = site.p;
  in.transpose_w = site.transpose_w;
  in.all_reduce = site.all_reduce;
  in.channel = site.channel;
  in.pitch_x = pitch_of("x", x, in.m, in.k);
  in.pitch_w = in.transpose_w ? pitch_of("w", w, in.p, in.k) : pitch_of("w", w, in.k, in.p);
  in.pitch_y = pitch_of("the result", y, in.all_reduce ? in.m : in.m / site.num_ranks(), in.p);
  in.bfloat16 = is_bfloat16(x, w, y);
  if (y.element_type() == xla::ffi::DataType::F32) throw Error("no sums in float32");
  in.x = x.untyped_data();
  in.w = w.untyped_data();
  return in;
}

}  // namespace pk

// Ops of other libraries: what such a library has, and what pk_jax gives it.
//
// An op is kernels in the words of tile/, mechanism/ and schedule/, and an XLA handler for the
// execute stage alone, which asks for a pk::Call. The stages before it are pk_jax's own, as for its
// ops: they build the communicator and load the kernels. docs/write_a_kernel.md has an example.
//
// Only plain data and functions of C cross between the two libraries, so that each may have its own
// compiler and XLA headers. But kernels of both take turns on the same signal pages: a library must
// be built from the headers of the pk_jax that loads it, and CustomOps lets pk_jax see that it was.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>

#include "ffi/attributes.h"
#include "ffi/status.h"
#include "runtime/check.h"
#include "tile/comm_view.h"
#include "tile/error_record.h"
#include "tile/published.h"
#include "xla/ffi/api/ffi.h"

namespace pk {

// To be raised when what follows changes, or what kernels leave in a Channel, and no size tells.
inline constexpr uint32_t kCustomOpVersion = 1;

struct CustomOp {
  const char* name;  // as pk_jax.call_op() knows it
  XLA_FFI_Handler* execute;
  cudaError_t (*load)();  // load_kernels() of all its kernels, on the current device
};

// One rank's call of an op, as a handler gets it by .Ctx<pk::Call>().
struct Call {
  CommView comm;  // for the kernel; holds for the life of the process
  Op op;          // for the kernel's Waiter: error records name the op by it
  int channel;    // likewise
  int num_sms;
  cudaStream_t stream;
  const void* communicator;

  // A buffer of XLA's that peers read or write during this call. Throws Error.
  template <typename Buffer>
  Published publish(const Buffer& buffer) const;
};

// What pk_jax does for a handler. Both return null or what went wrong, a text that holds until the
// thread's next call.
struct CallFunctions {
  const char* (*begin)(const XLA_FFI_Api* api, XLA_FFI_InvokeContext* context, Call* call);
  const char* (*publish)(const void* communicator, const void* pointer, size_t bytes,
                         uint64_t* offset);
};

// Set when pk_jax loads the library.
inline const CallFunctions* call_functions = nullptr;

// What must be equal on both sides, as the compiler of each saw it.
struct CustomOpLayout {
  uint32_t custom_op, call, comm_view, signal_page, error_record, mailbox;

  bool operator==(const CustomOpLayout&) const = default;
};
inline constexpr CustomOpLayout kCustomOpLayout{sizeof(CustomOp),    sizeof(Call),
                                                sizeof(CommView),    sizeof(SignalPage),
                                                sizeof(ErrorRecord), low_latency_bytes(2)};

// The one symbol of a library. The version comes first, so that it can be read whatever follows.
struct CustomOps {
  uint32_t version;
  CustomOpLayout layout;
  uint32_t num_ops;
  const CustomOp* ops;
  const CallFunctions** functions;
};

// Once a library, with all its ops: PK_JAX_CUSTOM_OPS({"name", execute, load}, ...).
#define PK_JAX_CUSTOM_OPS(...)                                                     \
  static const pk::CustomOp pk_jax_custom_op_list[] = {__VA_ARGS__};               \
  extern "C" {                                                                     \
  __attribute__((visibility("default"))) pk::CustomOps pk_jax_custom_ops = {       \
      pk::kCustomOpVersion, pk::kCustomOpLayout, std::size(pk_jax_custom_op_list), \
      pk_jax_custom_op_list, &pk::call_functions};                                 \
  }                                                                                \
  static_assert(true)

template <typename Buffer>
Published Call::publish(const Buffer& buffer) const {
  Published published{static_cast<char*>(buffer.untyped_data()), 0};
  if (const char* problem = call_functions->publish(communicator, published.address,
                                                    buffer.size_bytes(), &published.offset)) {
    throw Error(problem);
  }
  return published;
}

}  // namespace pk

template <>
struct xla::ffi::CtxDecoding<pk::Call> {
  using Type = pk::Call;

  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_InvokeContext* context,
                                    DiagnosticEngine& diagnostic) {
    pk::Call call;
    const char* problem = pk::call_functions
                              ? pk::call_functions->begin(api, context, &call)
                              : "the library of this op was not loaded by pk_jax.load_ops()";
    if (!problem) return call;
    diagnostic.Emit("pk_jax: ") << problem;
    return std::nullopt;
  }
};

// What the handlers of all collectives share: how a call site is made, and what they do when they
// execute.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "ffi/attributes.h"
#include "ffi/call_site.h"
#include "ffi/names.h"
#include "ffi/status.h"
#include "runtime/check.h"
#include "schedule/push_args.h"
#include "xla/ffi/api/ffi.h"

namespace pk {

// A handler that decodes attributes and returns a call site.
#define PK_DEFINE_INSTANTIATE(symbol, function)   \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, function, \
                                xla::ffi::Ffi::BindInstantiate().Attrs<xla::ffi::Dictionary>())

// Command-buffer compatible: launches and async copies only, and nothing that differs from call to
// call (epochs live on the device).
#define PK_DEFINE_EXECUTE(symbol, function)                                        \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(symbol, function,                                  \
                                xla::ffi::Ffi::Bind()                              \
                                    .Ctx<xla::ffi::State<CallSite>>()              \
                                    .Ctx<xla::ffi::PlatformStream<cudaStream_t>>() \
                                    .Ctx<xla::ffi::DeviceOrdinal>()                \
                                    .RemainingArgs()                               \
                                    .RemainingRets(),                              \
                                {xla::ffi::Traits::kCmdBufferCompatible})

// A call site of an op: what all have in common, then what decode(site) takes from the attributes.
template <typename Site, typename Decode>
xla::ffi::ErrorOr<std::unique_ptr<CallSite>> make_site(const char* op,
                                                       const xla::ffi::Dictionary& attributes,
                                                       Decode decode) {
  using Ids = xla::ffi::Span<const int64_t>;
  auto site = std::make_unique<Site>();
  xla::ffi::Error failed = guarded(op, [&] {
    site->op = op;
    site->groups =
        Groups::intern(attribute<Ids>(attributes, "groups"), attribute<Ids>(attributes, "devices"),
                       attribute<int64_t>(attributes, "group_size"));
    site->channel = static_cast<int>(integer(attributes, "channel", 0, kNumChannels - 1));
    site->plan.mechanism = mechanism_from(attribute<std::string_view>(attributes, "mechanism"));
    site->plan.protocol = protocol_from(attribute<std::string_view>(attributes, "protocol"));
    site->plan.num_blocks = static_cast<int>(integer(attributes, "num_blocks", 0, kMaxBlocks));
    decode(*site);
  });
  if (failed.failure()) return xla::ffi::Unexpected(failed);
  return std::unique_ptr<CallSite>(std::move(site));
}

inline xla::ffi::AnyBuffer operand(const xla::ffi::RemainingArgs& operands, size_t i) {
  auto buffer = operands.get<xla::ffi::AnyBuffer>(i);
  if (!buffer.has_value()) throw Error("no operand " + std::to_string(i));
  return *buffer;
}

// Peers store into results with vectors that their own addresses allow, so ours must allow them.
inline xla::ffi::AnyBuffer result(const xla::ffi::RemainingRets& results, size_t i) {
  auto buffer = results.get<xla::ffi::AnyBuffer>(i);
  if (!buffer.has_value()) throw Error("no result " + std::to_string(i));
  if (reinterpret_cast<uintptr_t>((*buffer)->untyped_data()) % 16 != 0)
    throw Error("a result is not 16-byte aligned, as XLA's buffers are");
  return **buffer;
}

// A size that the attributes and the buffers must agree on.
inline void require(bool fits, const CallSite& site, int64_t operand_bytes, int64_t result_bytes) {
  if (fits) return;
  throw Error("operand of " + std::to_string(operand_bytes) + " bytes, result of " +
              std::to_string(result_bytes) + " bytes, " + std::to_string(site.num_ranks()) +
              " ranks and the attributes do not fit");
}

// What every op that only moves data fills in the same way.
inline PushArgs push_args(const CallSite& site, const Communicator& communicator,
                          const xla::ffi::AnyBuffer& source, const xla::ffi::AnyBuffer& target) {
  PushArgs args{};
  args.source = static_cast<const char*>(source.untyped_data());
  args.result.address = static_cast<char*>(target.untyped_data());
  args.channel = site.channel;
  args.num_blocks = site.plan.num_blocks;
  args.num_sms = communicator.num_sms();
  return args;
}

}  // namespace pk

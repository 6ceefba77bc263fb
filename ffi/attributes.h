// Decoding the attributes of a call, once when it is instantiated.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "ffi/call_site.h"
#include "ffi/names.h"
#include "ffi/status.h"
#include "runtime/check.h"
#include "xla/ffi/api/ffi.h"

namespace pk {

template <typename T>
T attribute(const xla::ffi::Dictionary& attributes, std::string_view name) {
  auto value = attributes.get<T>(name);
  if (!value.has_value()) {
    throw Error("attribute " + std::string(name) + ": " + value.error().message());
  }
  return *value;
}

// An integer attribute between two limits, both allowed.
inline int64_t integer(const xla::ffi::Dictionary& attributes, std::string_view name, int64_t least,
                       int64_t most) {
  const auto value = attribute<int64_t>(attributes, name);
  if (value < least || value > most) {
    throw Error("attribute " + std::string(name) + " is " + std::to_string(value) + ", not in " +
                std::to_string(least) + ".." + std::to_string(most));
  }
  return value;
}

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

}  // namespace pk

// Decoding single attributes of a call.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

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

}  // namespace pk

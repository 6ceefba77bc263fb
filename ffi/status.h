// Where exceptions of the runtime become errors of XLA: nothing may throw through an FFI boundary.
#pragma once

#include <exception>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace pk {

template <typename Body>
xla::ffi::Error guarded(const char* op, Body body) {
  try {
    body();
    return xla::ffi::Error::Success();
  } catch (const std::exception& error) {
    return xla::ffi::Error::Internal(std::string("pk_jax ") + op + ": " + error.what());
  }
}

}  // namespace pk

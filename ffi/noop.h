#pragma once

#include "xla/ffi/api/ffi.h"

namespace pk {

extern "C" XLA_FFI_Error* pk_noop_execute(XLA_FFI_CallFrame* frame);

}  // namespace pk

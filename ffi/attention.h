// The XLA handlers of pk_jax_attention. It runs on one GPU and knows no communicator.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace pk {

extern "C" XLA_FFI_Error* pk_attention_initialize(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* pk_attention_execute(XLA_FFI_CallFrame* frame);

}  // namespace pk

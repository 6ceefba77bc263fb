// The XLA handlers of all_gather, stage by stage, for registration.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace pk {

extern "C" XLA_FFI_Error* pk_all_gather_instantiate(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* pk_all_gather_prepare(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* pk_all_gather_initialize(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* pk_all_gather_execute(XLA_FFI_CallFrame* frame);

XLA_FFI_TypeId* all_gather_site_type_id();
const XLA_FFI_TypeInfo* all_gather_site_type_info();

}  // namespace pk

// The XLA handlers of the collectives: each has a way to decode its attributes and a way to
// execute; what lies between is call_site.h's.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace pk {

extern "C" XLA_FFI_Error* pk_all_gather_instantiate(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* pk_all_gather_execute(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* pk_all_gather_matmul_instantiate(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* pk_all_gather_matmul_execute(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* pk_all_to_all_instantiate(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* pk_all_to_all_execute(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* pk_few_rows_reduce_scatter_instantiate(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* pk_few_rows_all_reduce_instantiate(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* pk_few_rows_execute(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* pk_matmul_reduce_scatter_instantiate(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* pk_matmul_reduce_scatter_execute(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* pk_matmul_all_reduce_instantiate(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* pk_matmul_all_reduce_execute(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* pk_ppermute_instantiate(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* pk_ppermute_execute(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* pk_psum_instantiate(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* pk_psum_execute(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* pk_psum_scatter_instantiate(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* pk_psum_scatter_execute(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* pk_ragged_all_to_all_instantiate(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* pk_ragged_all_to_all_execute(XLA_FFI_CallFrame* frame);

}  // namespace pk

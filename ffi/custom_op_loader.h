// The ops that other libraries brought (custom_op.h): loading them, and the stages that they share.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace pk {

// Opens a library, for good, and returns the names of the ops that were not here before. Throws
// Error, with nothing added, if it does not fit this pk_jax, or has an op of a name that is
// `taken`, another library's or another op's of its own.
std::vector<std::string> load_custom_ops(const std::string& path,
                                         const std::set<std::string>& taken);

// Name -> execute of all of them.
std::map<std::string, XLA_FFI_Handler*> custom_ops();

// Finds its op by the attribute `custom_op`.
extern "C" XLA_FFI_Error* pk_custom_op_instantiate(XLA_FFI_CallFrame* frame);

}  // namespace pk

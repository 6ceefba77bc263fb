// XLA's FFI Collectives extension: the only way for a handler outside XLA to ask for the
// communicator of a replica group.
//
// jaxlib ships the C structs and a generic wrapper but not this tag. Minor versions only add fields
// so far (0.1 in jaxlib 0.11.2, 0.2 in 0.12).
#pragma once

#include "xla/ffi/api/collectives_api.h"
#include "xla/ffi/api/ffi.h"

namespace pk {

class XlaCommunicators
    : public xla::ffi::internal::CommunicatorContextBase<xla::ffi::internal::ErrorPolicy> {
  using Base = xla::ffi::internal::CommunicatorContextBase<xla::ffi::internal::ErrorPolicy>;

 public:
  using Base::Base;
};

struct CollectivesExtension : xla::ffi::internal::CollectivesExtensionBase<XlaCommunicators> {
  static bool Support(int32_t major, int32_t minor) { return major == 0 && minor >= 1; }
};

}  // namespace pk

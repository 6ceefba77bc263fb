// An FFI call that does nothing but launch an empty kernel: what a captured custom call costs at
// the least. Benchmarks subtract it.
#include "ffi/noop.h"

#include <cuda_runtime_api.h>

#include "kernels/noop.h"

namespace pk {
namespace {

namespace ffi = xla::ffi;

ffi::Error execute(cudaStream_t stream, ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer>) {
  const cudaError_t status = launch_noop(stream);
  return status == cudaSuccess ? ffi::Error::Success()
                               : ffi::Error::Internal(cudaGetErrorString(status));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(pk_noop_execute, execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace pk

// What every kernel file needs from the CUDA runtime besides launching.
#pragma once

#include <cuda_runtime_api.h>

#include <initializer_list>

namespace pk {

// Loads kernels on the current device, so that no launch ever has to: a load may wait for kernels
// that are running, and one of them may be spinning for a peer that is still loading.
inline cudaError_t load_kernels(std::initializer_list<const void*> kernels) {
  for (const void* kernel : kernels) {
    cudaFuncAttributes attributes;
    if (cudaError_t error = cudaFuncGetAttributes(&attributes, kernel)) return error;
  }
  return cudaSuccess;
}

// A kernel as the runtime names it.
template <typename Kernel>
const void* kernel_pointer(Kernel* kernel) {
  return reinterpret_cast<const void*>(kernel);
}

}  // namespace pk

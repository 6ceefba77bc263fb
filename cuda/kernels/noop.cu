#include "kernels/noop.h"

namespace pk {
namespace {
__global__ void noop() {}
}  // namespace

cudaError_t launch_noop(cudaStream_t stream) {
  noop<<<1, 32, 0, stream>>>();
  return cudaGetLastError();
}

}  // namespace pk

// The empty kernel: the floor under every launch.
#pragma once

#include <cuda_runtime_api.h>

namespace pk {

cudaError_t launch_noop(cudaStream_t stream);

}  // namespace pk

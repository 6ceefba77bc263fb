// Failures of the runtime are exceptions whose text names the call; ffi/ turns them into ffi::Error
// at the boundary.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace pk {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw Error(std::string(what) + ": " + cudaGetErrorName(status) + ": " +
                cudaGetErrorString(status));
  }
}

}  // namespace pk

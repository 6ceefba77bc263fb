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

// A rank did not take part: what the ranks have in common is no longer known.
class Lost : public Error {
 public:
  using Error::Error;
};

inline void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    cudaGetLastError();  // reported here; the next launch must not report it again
    throw Error(std::string(what) + ": " + cudaGetErrorName(status) + ": " +
                cudaGetErrorString(status));
  }
}

}  // namespace pk

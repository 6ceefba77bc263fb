// The widest access that all addresses of a copy allow, and a dispatch over it.
#pragma once

#include <cuda_runtime_api.h>
#include <vector_types.h>

#include <cstdint>

namespace pk {

// The largest power of two, at most `limit`, that divides both addresses and the row length.
inline uint32_t granule(const void* source, const void* destination, int64_t inner,
                        uint32_t limit) {
  const uint64_t all = reinterpret_cast<uintptr_t>(source) |
                       reinterpret_cast<uintptr_t>(destination) | static_cast<uint64_t>(inner) |
                       limit;
  return static_cast<uint32_t>(all & -all);
}

// launch(vector) with a vector type of `bytes` bytes: 1, 2, 4, 8 or 16.
template <typename Launch>
cudaError_t by_granule(uint32_t bytes, Launch launch) {
  switch (bytes) {
    case 1:
      return launch(uint8_t{});
    case 2:
      return launch(uint16_t{});
    case 4:
      return launch(uint32_t{});
    case 8:
      return launch(uint64_t{});
    default:
      return launch(uint4{});
  }
}

}  // namespace pk

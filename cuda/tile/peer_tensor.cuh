// The same matrix of bytes on every rank: a base pointer a rank, one row pitch.
//
// Indexing by rank gives an ordinary address; whether it lies on this GPU or across NVLink is the
// hardware's business. That is the whole idea: a peer's memory is one more level of the hierarchy,
// and needs no second set of verbs.
#pragma once

#include <cstdint>

namespace pk {

struct PeerTensor {
  char* const* base;  // [num_ranks], in shared memory
  int num_ranks;
  int64_t pitch;   // bytes from one row to the next
  int64_t offset;  // bytes from the base to this rank's part

  __device__ __forceinline__ char* at(int rank, int64_t row, int64_t col) const {
    return base[rank] + row * pitch + offset + col;
  }
};

}  // namespace pk

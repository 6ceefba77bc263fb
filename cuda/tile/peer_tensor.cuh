// The same part of the same tensor on every rank: a base pointer a rank, one layout.
//
// Indexing by rank gives an ordinary address; whether it lies on this GPU or across NVLink is the
// hardware's business. That is the whole idea: a peer's memory is one more level of the hierarchy,
// and needs no second set of verbs.
#pragma once

#include <cstdint>

#include "tile/part_layout.h"

namespace pk {

struct PeerTensor {
  char* const* base;  // [num_ranks], in shared memory
  int num_ranks;
  PartLayout layout;
  int part;  // whose part it is, in the layout: the sender's own

  __device__ __forceinline__ char* at(int rank, int64_t row, int64_t col) const {
    return base[rank] + layout.at(part, row) + col;
  }
};

}  // namespace pk

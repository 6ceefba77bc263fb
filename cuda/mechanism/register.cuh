// Register mechanism: 16-byte loads into registers, stores to wherever the data belongs, peers
// included.
//
// Needs nothing of the addresses but the alignment of its vector type, so it is the mechanism that
// always works.
#pragma once

#include <cstdint>

#include "tile/peer_tensor.cuh"
#include "tile/row_tiles.h"

namespace pk::reg {

// One block copies a tile of a packed source to its place in the tensors of `count` ranks, starting
// with `first_rank`. The source is read once, however many ranks there are; each rank starts with
// another one, so that they do not all load the same link first.
template <typename Vector>
__device__ __forceinline__ void store_tile(const PeerTensor& destination, const char* source,
                                           const RowTile& tile, int first_rank, int count) {
  constexpr int kUnroll = 4;
  const uint32_t per_row = tile.num_cols / sizeof(Vector);
  const uint32_t total = tile.num_rows * per_row;
  const Vector* from = reinterpret_cast<const Vector*>(source);
  for (uint32_t start = threadIdx.x; start < total; start += kUnroll * blockDim.x) {
    Vector value[kUnroll];
    int64_t place[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint32_t i = start + u * blockDim.x;
      if (i >= total) continue;
      value[u] = from[i];
      const uint32_t row = tile.num_rows == 1 ? 0 : i / per_row;
      place[u] = row * destination.pitch + static_cast<int64_t>(i - row * per_row) * sizeof(Vector);
    }
    for (int k = 0; k < count; ++k) {
      int rank = first_rank + k;
      if (rank >= destination.num_ranks) rank -= destination.num_ranks;
      char* to = destination.at(rank, tile.row, tile.col);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (start + u * blockDim.x < total) *reinterpret_cast<Vector*>(to + place[u]) = value[u];
      }
    }
  }
}

}  // namespace pk::reg

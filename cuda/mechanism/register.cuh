// Register mechanism: 16-byte loads into registers, stores to wherever the data belongs, peers
// included.
//
// Needs nothing of the addresses but the alignment of its vector type, so it is the mechanism that
// always works.
#pragma once

#include <cstdint>

#include "tile/move.h"
#include "tile/peer_tensor.cuh"

namespace pk::reg {

// One block carries out a move. The source is read once, however many ranks it goes to. A tile of a
// single row may end with less than a vector; the rows of others are whole vectors.
template <typename Vector>
__device__ __forceinline__ void store_tile(const PeerTensor& destination, const Move& move) {
  const auto& [source, tile, first_rank, count] = move;
  constexpr int kUnroll = 4;
  constexpr uint32_t kBytes = sizeof(Vector);
  const uint32_t per_row = tile.num_cols / kBytes;
  const uint32_t total = tile.num_rows * per_row;
  const char* from = source.at(tile.row, tile.col);
  const int64_t part = destination.layout.at(destination.part, tile.row) + tile.col;
  const auto wrap = [&](int rank) {
    return rank >= destination.num_ranks ? rank - destination.num_ranks : rank;
  };
  for (uint32_t start = threadIdx.x; start < total; start += kUnroll * blockDim.x) {
    Vector value[kUnroll];
    int64_t place[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint32_t i = start + u * blockDim.x;
      if (i >= total) continue;
      if (tile.num_rows == 1) {
        value[u] = reinterpret_cast<const Vector*>(from)[i];
        place[u] = part + static_cast<int64_t>(i) * kBytes;
      } else {
        const uint32_t row = i / per_row;
        const int64_t col = tile.col + static_cast<int64_t>(i - row * per_row) * kBytes;
        value[u] = *reinterpret_cast<const Vector*>(source.at(tile.row + row, col));
        place[u] = destination.layout.at(destination.part, tile.row + row) + col;
      }
    }
    for (int k = 0; k < count; ++k) {
      char* to = destination.base[wrap(first_rank + k)];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (start + u * blockDim.x < total) *reinterpret_cast<Vector*>(to + place[u]) = value[u];
      }
    }
  }
  if constexpr (kBytes > 1) {
    const uint32_t tail = tile.num_rows == 1 ? tile.num_cols % kBytes : 0;
    if (threadIdx.x < tail) {
      const uint32_t at = per_row * kBytes + threadIdx.x;
      for (int k = 0; k < count; ++k) destination.base[wrap(first_rank + k)][part + at] = from[at];
    }
  }
}

// One of `num_warps` warps: its share of `count` vectors, to one place. Few registers.
__device__ __forceinline__ void copy_share(uint4* to, const uint4* from, uint32_t count,
                                           uint32_t warp, uint32_t num_warps) {
  constexpr uint32_t kUnroll = 2, kPiece = 32 * kUnroll;
#pragma unroll 1
  for (uint32_t i = warp * kPiece + threadIdx.x % 32; i < count; i += num_warps * kPiece) {
    uint4 value[kUnroll];
#pragma unroll
    for (uint32_t u = 0; u < kUnroll; ++u) {
      if (i + 32 * u < count) value[u] = from[i + 32 * u];
    }
#pragma unroll
    for (uint32_t u = 0; u < kUnroll; ++u) {
      if (i + 32 * u < count) to[i + 32 * u] = value[u];
    }
  }
}

// One block puts zeros into a tile of the own result.
template <typename Vector>
__device__ __forceinline__ void clear_tile(char* result, const PartLayout& layout,
                                           const RowTile& tile) {
  const uint32_t per_row = tile.num_cols / sizeof(Vector);
  for (uint32_t i = threadIdx.x; i < tile.num_rows * per_row; i += blockDim.x) {
    const uint32_t row = i / per_row;
    char* to = result + layout.at(0, tile.row + row) + tile.col;
    reinterpret_cast<Vector*>(to)[i - row * per_row] = Vector{};
  }
  const uint32_t tail = tile.num_rows == 1 ? tile.num_cols % sizeof(Vector) : 0;
  if (threadIdx.x < tail) {
    char* to = result + layout.at(0, tile.row) + tile.col;
    to[per_row * sizeof(Vector) + threadIdx.x] = 0;
  }
}

}  // namespace pk::reg

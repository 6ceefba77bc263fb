// TMA mechanism: one warp moves tiles global -> shared -> global with 1-D bulk copies; no register
// sees the data.
//
// Bulk copies take any global address, so one tile in shared memory can be stored into every rank's
// buffer. Addresses, row length and pitch must be multiples of 16 bytes (the host checks).
#pragma once

#include <cstdint>

#include "tile/peer_tensor.cuh"
#include "tile/ptx.cuh"
#include "tile/row_tiles.h"

namespace pk::tma {

// A ring of stages: half of them may hold loads in flight, the other half stores in flight.
template <int kStages, uint32_t kStageBytes>
struct Ring {
  static_assert(kStages >= 2 && kStages % 2 == 0);
  static_assert(kStageBytes % 128 == 0);
  alignas(128) char stage[kStages][kStageBytes];
  uint64_t loaded[kStages];

  static constexpr int kLookahead = kStages / 2;

  __device__ void init() {
    if (threadIdx.x == 0) {
      for (int s = 0; s < kStages; ++s) ptx::mbarrier_init(&loaded[s], 1);
      ptx::fence_mbarrier_init();
    }
    __syncwarp();
  }
};

// One warp (the whole block). Copies tiles first_tile, first_tile + stride, ... of the packed
// source to the same place in every rank's tensor. `before_store` is called once, after the first
// loads are under way and before the first store: the op waits for its peers there.
template <int kStages, uint32_t kStageBytes, typename BeforeStore>
__device__ __forceinline__ void broadcast_tiles(Ring<kStages, kStageBytes>& ring,
                                                const PeerTensor& destination, const char* source,
                                                const RowTiles& tiles, int64_t first_tile,
                                                int64_t stride, int first_rank,
                                                BeforeStore before_store) {
  constexpr int kLookahead = Ring<kStages, kStageBytes>::kLookahead;
  const int lane = threadIdx.x;
  const int64_t count =
      tiles.num_tiles > first_tile ? (tiles.num_tiles - first_tile + stride - 1) / stride : 0;
  const auto load = [&](int64_t i) {
    if (lane != 0) return;
    const RowTile tile = tiles.tile(first_tile + i * stride);
    const int s = i % kStages;
    ptx::mbarrier_arrive_expect_tx(&ring.loaded[s], tile.bytes());
    ptx::cp_async_bulk_load(ring.stage[s], source + tile.row * tiles.inner + tile.col, tile.bytes(),
                            &ring.loaded[s]);
  };
  for (int64_t i = 0; i < count && i < kLookahead; ++i) load(i);
  before_store();
  for (int64_t i = 0; i < count; ++i) {
    const RowTile tile = tiles.tile(first_tile + i * stride);
    const int s = i % kStages;
    while (!ptx::mbarrier_try_wait_parity(&ring.loaded[s], (i / kStages) & 1)) {
    }
    // One piece a (row, rank); lanes share them. Ranks rotate so that the senders do not all load
    // the same link first.
    const uint32_t pieces = tile.num_rows * destination.num_ranks;
    for (uint32_t piece = lane; piece < pieces; piece += 32) {
      const uint32_t row = piece / destination.num_ranks;
      int rank = first_rank + static_cast<int>(piece - row * destination.num_ranks);
      if (rank >= destination.num_ranks) rank -= destination.num_ranks;
      ptx::cp_async_bulk_store(destination.at(rank, tile.row + row, tile.col),
                               ring.stage[s] + row * tile.num_cols, tile.num_cols);
    }
    ptx::cp_async_bulk_commit_group();
    if (i + kLookahead < count) {
      // The stage that tile i + kLookahead will fill was last stored from by tile i - kLookahead:
      // its group must have been read.
      ptx::cp_async_bulk_wait_group_read<kLookahead>();
      __syncwarp();
      load(i + kLookahead);
    }
  }
  // In full, not `.read`: the caller is about to tell the peers that the data is there. The proxy
  // fence orders these async writes before the generic-proxy release that announces them.
  ptx::cp_async_bulk_wait_group<0>();
  ptx::fence_proxy_async();
}

}  // namespace pk::tma

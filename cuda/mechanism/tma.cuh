// TMA mechanism: one warp moves tiles global -> shared -> global with 1-D bulk copies; no register
// sees the data.
//
// Bulk copies take any global address, so one tile in shared memory can be stored into every rank's
// buffer. Addresses, row length and pitch must be multiples of 16 bytes (the host checks).
#pragma once

#include <cstdint>
#include <type_traits>

#include "tile/move.h"
#include "tile/peer_tensor.cuh"
#include "tile/ptx.cuh"

namespace pk::tma {

// A ring of stages: half of them may hold loads in flight, the other half stores in flight, of
// which kBehind have not arrived if somebody waits for that: enough for the link where many SMs
// share it, and no more, for what follows is late by as much.
template <int kStages, uint32_t kStageBytes, int kBehind = 3>
struct Ring {
  static_assert(kStages >= 2 && kStages % 2 == 0 && kBehind <= kStages / 2);
  static_assert(kStageBytes % 128 == 0);
  alignas(128) char stage[kStages][kStageBytes];
  uint64_t loaded[kStages];

  __device__ void init() {
    if (threadIdx.x == 0) {
      for (int s = 0; s < kStages; ++s) ptx::mbarrier_init(&loaded[s], 1);
      ptx::fence_mbarrier_init();
    }
    __syncwarp();
  }
};

// Whether the rows of a tile follow each other in memory.
__device__ __forceinline__ bool one_piece(const PartLayout& layout, const RowTile& tile) {
  return tile.num_rows == 1 ||
         (layout.row_pitch == tile.num_cols && layout.rows_per_band == PartLayout::kOneBand);
}

// For ops that tell the peers only when all is stored.
struct AtEnd {};

// One warp. Carries out move(first), move(first + stride), ... below `end`, each to its place in
// the destination. `before_store` is called once, after the first loads are under way and before
// the first store: the op waits for its peers there. `stored(i, m)`, unless AtEnd, is called in
// order, by all lanes, a few moves behind: the i-th move m, and those before it, have arrived. It
// is called for every `every`-th move (a power of two), and at the end for all that are left.
// Whoever then tells a peer fences first (fence_proxy_async): the bytes are written through the
// async proxy, and words of release are not.
template <int kStages, uint32_t kStageBytes, int kBehind, typename MoveOf, typename BeforeStore,
          typename Stored = AtEnd>
__device__ __forceinline__ void store_tiles(Ring<kStages, kStageBytes, kBehind>& ring,
                                            const PeerTensor& destination, MoveOf move,
                                            int64_t first, int64_t stride, int64_t end,
                                            BeforeStore before_store, Stored stored = {},
                                            uint32_t every = 1) {
  constexpr int kLookahead = kStages / 2;
  constexpr bool kAtEnd = std::is_same_v<Stored, AtEnd>;
  const int lane = threadIdx.x % 32;
  const int64_t count = end > first ? (end - first + stride - 1) / stride : 0;
  const auto move_of = [&](int64_t i) -> Move { return move(first + i * stride); };
  const auto load = [&](int64_t i) {
    const Move m = move_of(i);
    const int s = i % kStages;
    // Bytes may land before they are expected: the phase cannot end before this arrival.
    if (lane == 0) ptx::mbarrier_arrive_expect_tx(&ring.loaded[s], m.tile.bytes());
    const bool whole = one_piece(m.source.layout, m.tile);
    const uint32_t pieces = m.tile.bytes() == 0 ? 0 : whole ? 1 : m.tile.num_rows;
    const uint32_t bytes = whole ? m.tile.bytes() : m.tile.num_cols;
    for (uint32_t row = lane; row < pieces; row += 32) {
      ptx::cp_async_bulk_load(ring.stage[s] + row * m.tile.num_cols,
                              m.source.at(m.tile.row + row, m.tile.col), bytes, &ring.loaded[s]);
    }
  };
  for (int64_t i = 0; i < count && i < kLookahead; ++i) load(i);
  before_store();
  for (int64_t i = 0; i < count; ++i) {
    const Move m = move_of(i);
    const int s = i % kStages;
    while (!ptx::mbarrier_try_wait_parity(&ring.loaded[s], (i / kStages) & 1)) {
    }
    // One piece a (row, rank), or a rank where the rows follow each other; lanes share them. Ranks
    // rotate so that the senders do not all load the same link first.
    const bool whole = one_piece(destination.layout, m.tile);
    const uint32_t bytes = whole ? m.tile.bytes() : m.tile.num_cols;
    const uint32_t pieces = m.tile.bytes() == 0 ? 0 : whole ? m.count : m.tile.num_rows * m.count;
    for (uint32_t piece = lane; piece < pieces; piece += 32) {
      const uint32_t row = m.count == 1 ? piece : piece / m.count;
      int rank = m.first_rank + static_cast<int>(piece - row * m.count);
      if (rank >= destination.num_ranks) rank -= destination.num_ranks;
      ptx::cp_async_bulk_store(destination.at(rank, m.tile.row + row, m.tile.col),
                               ring.stage[s] + row * m.tile.num_cols, bytes);
    }
    ptx::cp_async_bulk_commit_group();
    if constexpr (!kAtEnd) {
      const int64_t arrived = i - kBehind;
      if (arrived >= 0 && ((arrived + 1) & (every - 1)) == 0) {
        ptx::cp_async_bulk_wait_group<kBehind>();
        stored(arrived, move_of(arrived));
      }
    }
    if (i + kLookahead < count) {
      // The stage that move i + kLookahead will fill was last stored from by move i - kLookahead:
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
  if constexpr (!kAtEnd) {
    __syncwarp();
    const int64_t told = count > kBehind ? (count - kBehind) & -int64_t{every} : 0;
    for (int64_t i = told; i < count; ++i) stored(i, move_of(i));
  }
}

}  // namespace pk::tma

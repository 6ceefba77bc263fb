// What leaves a block of matmul_reduce.cuh: the panels of its tiles, from the consumers' warps to
// the owner's scratch, or, of own ones, to the result, and to all peers' of an all_reduce.
//
//   storer 0   panels of tile 0 | arrive | announce | panels of tile 2 | ...
//   storer 1                    | panels of tile 1  | arrive | announce | panels of tile 3 | ...
//
// Two warps, for stores take some us to arrive, and their announcement waits for that. What the
// owner counts are tiles, so announcements are in order.
//
// Entry: storer 0 invites the peers while the first tile is being made, and waits for the
// invitations of those whom its block sends something. Exit: the block of the same number of such a
// peer waits for that, so the peer ends after this block has read its invitation; and an own tile
// waits for all that comes into the scratch. Only the results of an all_reduce, which are stored
// into the peers' too, need an announcement of their own at the end (leave()).
#pragma once

#include <cstdint>

#include "kernels/matmul.cuh"
#include "schedule/bulletin.cuh"
#include "schedule/partial_layout.h"
#include "schedule/partial_tile.cuh"
#include "schedule/rendezvous.cuh"
#include "schedule/scatter_walk.h"

namespace pk::matmul {

struct ReduceArgs {
  Args<ScatterWalk> product;  // its c is y
  Published y, scratch;
  int cols;
  int panel_steps;  // see PartialLayout
  int first_row;    // of y that this rank adds up
  int channel;
  bool all_reduce;
};

// A tile as the consumers and the storers have to know it.
struct Partial {
  int owner;  // -1: there is none
  int row;    // among the owner's
  int col;
  int tile;  // its number among the owner's
};

// What a block has in shared memory besides the product's.
struct ReduceMemory {
  Bulletin<Partial, 4> tiles;  // read by each of the consumers' warps, and the storers
  Outbox outbox[PartialLayout::kWarps];
  GuestsUpTo<ScatterWalk::kMostRanks> guests;
  uint32_t arrived;  // own tiles that all peers have sent
  uint32_t stored;   // tiles, own ones and others
  int number;        // of the block
};

struct ReduceStore {
  static constexpr int kBarrier = 3;

  const ReduceArgs& all;
  const Waiter& waiter;
  ReduceMemory& memory;
  PanelBuffers* panels;  // of each consumer

  // The storers, `which` 0 and 1.
  __device__ __forceinline__ void run(int which) {
    const int lane = threadIdx.x % 32;
    if (which == 0) enter_call();
    ptx::named_barrier_sync(kBarrier, 32 * Outbox::kStorers);  // passes on the guests
    ptx::fence_proxy_async();  // the invitations, before stores of the other proxy
    uint32_t count = 0;
    for (;; ++count) {
      const Partial tile = memory.tiles.read(count);
      if (tile.owner < 0) break;
      if (Outbox::storer(count) == which) store(tile, count);
    }
    if (which != 0) return;
    if (lane == 0) wait_stored(count);
    __syncwarp();
    Channel& channel = channel_of(waiter);
    // The watcher has read it: it was before the last own tile.
    if (lane == 0) {
      channel.staged_before[memory.number] +=
          all.product.walk.count(waiter.comm.rank, memory.number);
    }
    const uint32_t epoch = this_epoch(channel);
    if (all.all_reduce) {
      leave<OneWarp>(waiter, epoch, memory.guests);
    } else {
      end_block<OneWarp>(channel, epoch);
    }
  }

 private:
  static constexpr int kChunksOfPanel = PartialLayout::kChunks / PartialLayout::kPanels;

  __device__ __forceinline__ void enter_call() {
    const auto expects = [&](int peer) {
      return all.all_reduce || all.product.walk.has_tiles(peer, memory.number);
    };
    const Published mine[] = {all.scratch, all.y};
    enter<OneWarp>(waiter, mine, memory.guests, expects);
    check_grids<OneWarp>(waiter, memory.guests, expects);
    if (threadIdx.x % 32 == 0) timeline::lap(Did::kEnter);
  }

  // Tile number `count` of the block.
  __device__ __forceinline__ void store(const Partial& tile, uint32_t count) {
    const int rank = waiter.comm.rank;
#pragma unroll 1
    for (int panel = 0; panel < PartialLayout::kPanels; ++panel)
      store_panel(tile, Outbox::storer(count), panel);
    if (tile.owner != rank) {
      ptx::cp_async_bulk_wait_group<0>();
      ptx::fence_proxy_async();
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      if (tile.owner == rank) timeline::lap(Did::kStore);
      wait_stored(count);
      if (tile.owner != rank) {
        SignalPage& page = signal_page(waiter.comm, tile.owner);
        // Release of the tile, which has arrived; pairs with the acquire in communicate() there.
        ptx::red_add_release_sys(&page.channels[waiter.channel].staged[rank][memory.number], 1);
        timeline::lap(Did::kSend, timeline::kNoId, tile.owner, PartialLayout::kTileBytes);
      }
      // Release of what was stored; pairs with the acquire in wait_stored().
      ptx::st_release_cta(&memory.stored, count + 1);
    }
    __syncwarp();
  }

  // Until so many tiles have been stored, and announced. Without a limit of its own: what the other
  // storer may wait for long are the consumers, who have the watcher's, and invitations, at entry.
  __device__ __forceinline__ void wait_stored(uint32_t tiles) const {
    while (ptx::ld_acquire_cta(&memory.stored) != tiles) {
    }
  }

  // A panel of each of the consumers' warps, a lane for each, which gives its buffer back when it
  // has been read.
  __device__ __forceinline__ void store_panel(const Partial& tile, int storer, int panel) {
    const CommView& comm = waiter.comm;
    const Result& y = all.product.c;
    const int warp = threadIdx.x % 32, buffer = Outbox::buffer(panel),
              col = tile.col + panel * kPanel;
    const bool own = tile.owner == comm.rank, has_panel = warp < PartialLayout::kWarps;
    const auto panel_of = [&](int warp) -> ResultPanel& {
      return panels[warp / 4][warp % 4][buffer];
    };
    if (has_panel) {
      const int row = tile.row + warp * ResultPanel::kRows;
      memory.outbox[warp].wait_full(storer, panel);
      if (own) {
        panel_of(warp).store(&y.map, all.first_row + row, col);
      } else if (row < all.product.walk.rows && col < all.cols) {
        send(tile, panel, panel_of(warp), warp);
      }
      ptx::cp_async_bulk_commit_group();
    }
    if (own && all.all_reduce) {
      __syncwarp();  // for memory: what the lanes have waited for
#pragma unroll 1
      for (int k = 1; k < comm.num_ranks; ++k) {
        char* peer = memory.guests.address[1][(comm.rank + k) % comm.num_ranks];
#pragma unroll 1
        for (int w = 0; w < PartialLayout::kWarps; ++w)
          y.store_rows<1>(peer, panel_of(w), ResultPanel::kRows,
                          all.first_row + tile.row + w * ResultPanel::kRows, col, y.rows);
      }
      __syncwarp();
    }
    ptx::cp_async_bulk_wait_group_read<0>();
    if (has_panel) memory.outbox[warp].release(panel);
  }

  // A warp's panel, to its place in the scratch of the owner.
  __device__ __forceinline__ void send(const Partial& tile, int index, const ResultPanel& panel,
                                       int warp) const {
    const int64_t tiles = all.product.walk.tiles.num_tiles();
    const int64_t number = peer_index(waiter.comm.rank, tile.owner) * tiles + tile.tile;
    char* to = memory.guests.address[0][tile.owner] + number * PartialLayout::kTileBytes;
    ptx::cp_async_bulk_store(to + PartialLayout::offset(warp, index * kChunksOfPanel), panel.data,
                             kChunksOfPanel * PartialLayout::kChunkBytes);
  }
};

}  // namespace pk::matmul

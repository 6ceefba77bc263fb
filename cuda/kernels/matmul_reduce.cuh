// The kernel of matmul_reduce_scatter and matmul_all_reduce: the main loop of matmul.cuh over the
// partial tiles of all owners, which leave to them, or are added up, under the next one's products.
//
//   mover       loads, tile i     | loads, tile i + 1     | ...
//   consumers   wgmma, tile i     | wgmma, tile i + 1     | ...     panels of the tile before, and
//                                                           at the end of an own tile peers' parts
//   storer      panels, tile i - 1 | panels, tile i       | ...     to the owner's scratch,
//   announced;
//                                                           or to y
//   watcher     what peers have sent
//
// Three steps before the end of an own tile the consumers ask for the first peer's part of it,
// whose registers are free by then, and add it to their accumulators after the last; other peers'
// parts follow. The storer waits for its stores to arrive, the consumers for neither, unless the
// link falls behind.
//
// Entry: the storer invites the peers while the first tile is being made, and waits for the
// invitations of those whom its block sends something. Exit: the block of the same number of such a
// peer waits for that, so the peer ends after this block has read its invitation; and an own tile
// waits for all that comes into the scratch. Only the results of an all_reduce, which are stored
// into the peers' too, need an announcement of their own at the end (leave()).
//
// Progress: see schedule/scatter_walk.h. Blocks are numbered as they arrive, so those that are
// resident have the same numbers on all ranks, from 0 on. A tile for a peer leaves under the
// products of the next one, and what that one's loads wait for is of tiles before; so it waits for
// no more than the walk says.
#pragma once

#include "kernels/matmul.cuh"
#include "schedule/bulletin.cuh"
#include "schedule/inter_sm.cuh"
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

// A tile as the consumers and the storer have to know it.
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

struct NoEpilogue {};

template <typename Shape, ptx::Type kType, Major kMajorB>
struct ReduceMatmul
    : Matmul<Shape, kType, Major::kK, kMajorB, ScatterWalk, WholeSource, NoEpilogue> {
  using Base = Matmul<Shape, kType, Major::kK, kMajorB, ScatterWalk, WholeSource, NoEpilogue>;
  using typename Base::At, typename Base::Part, typename Base::Tile;
  using Pending = PartialTile<kType, Shape::kConsumerN>;

  const ReduceArgs& all;
  const Waiter& waiter;
  ReduceMemory& memory;

  __device__ __forceinline__ void load() {
    At at;
    ScatterWalk::Parts parts(all.product.walk, memory.number);
    for (uint32_t count = 0;; ++count) {
      const Part part = parts.next();
      const int col = part.n * Shape::kN;
      const bool some = part.num_steps > 0;
      memory.tiles.write(count, {some ? part.owner : -1, part.m * Shape::kM, col, part.tile});
      if (!some) return;
      const RowsOfA rows{&all.product.a, part.row(Shape::kM)};
      for (int step = 0; step < part.num_steps; ++step)
        this->load_step(rows, col, step * kBlockK, 0, at);
    }
  }

  // The watcher: polls once for a block, and ahead of the consumers.
  __device__ __forceinline__ void communicate() {
    const CommView& comm = waiter.comm;
    const Channel& channel = channel_of(waiter);
    const int lane = threadIdx.x % 32, count = all.product.walk.count(comm.rank, memory.number);
    const uint32_t before = channel.staged_before[memory.number];
    for (int own = 1; own <= count; ++own) {
      if (lane < comm.num_ranks && lane != comm.rank) {
        // Acquire of the peer's tile; pairs with the release in its store().
        wait_signal(waiter, Slot::kStaged, lane, &channel.staged[lane][memory.number],
                    before + own);
      }
      __syncwarp();
      if (lane == 0) timeline::lap(Did::kWaitFlags, own);
      // Passes on what the lanes have acquired; pairs with the acquire in fetch_first().
      if (lane == 0) ptx::st_release_cta(&memory.arrived, own);
    }
  }

  __device__ __forceinline__ void consume(int /*consumer*/) {
    const int consumer = threadIdx.x / 128;  // what is handed over, ptxas would spill
    auto& shared = ptx::kept(this->shared);
    const int num_steps = all.product.walk.tiles.num_steps, peers = waiter.comm.num_ranks - 1;
    Pending pending(shared.c[consumer], memory.outbox[threadIdx.x / 32]);
    At at;
    uint32_t count = 0;
    for (;; ++count) {
      const Partial part = memory.tiles.read(count);
      if (part.owner < 0) break;
      const bool is_own = part.owner == waiter.comm.rank;
      Tile tile;
      this->multiply(shared, tile, consumer * 64, 0, num_steps, at, [&](int step) {
        pending.send_due(step, all.panel_steps, Outbox::storer(count - 1));
        // Beside the last two steps. After another one ptxas would have the loads waited for.
        if (is_own && PartialLayout::leaves_early(num_steps) && step == num_steps - 1)
          fetch_first(pending, consumer, part.tile);
      });
      if (is_first_thread()) timeline::lap(Did::kMultiply, count, part.owner);
      pending.send_rest(Outbox::storer(count - 1));
      if (is_own) {
        if (!PartialLayout::leaves_early(num_steps)) fetch_first(pending, consumer, part.tile);
        pending.add_to(tile);
#pragma unroll 1
        for (int peer = 1; peer < peers; ++peer) {
          pending.fetch(sent(part.tile, peer));
          pending.add_to(tile);
        }
        if (is_first_thread()) timeline::lap(Did::kAdd);
      }
      pending.take(tile, is_own);
    }
    pending.send_rest(Outbox::storer(count - 1));
  }

  // The storers, `which` 0 and 1, of each other tile.
  __device__ __forceinline__ void copy(int which) {
    const ScatterWalk& walk = all.product.walk;
    const int lane = threadIdx.x % 32, rank = waiter.comm.rank;
    Channel& channel = channel_of(waiter);
    if (which == 0) enter_call();
    sync_storers();  // the guests
    uint32_t count = 0;
    for (;; ++count) {
      const Partial tile = memory.tiles.read(count);
      if (tile.owner < 0) break;
      if (Outbox::storer(count) != which) continue;
#pragma unroll 1
      for (int panel = 0; panel < Pending::kPanels; ++panel) store_panel(tile, which, panel);
      ptx::cp_async_bulk_wait_group_read<0>();
      give_back(Pending::kPanels - 1);
      if (tile.owner != rank) {
        ptx::cp_async_bulk_wait_group<0>();
        ptx::fence_proxy_async();
      } else if (lane == 0) {
        timeline::lap(Did::kStore);
      }
      __syncwarp();
      if (lane == 0) {
        // The peers count tiles, which they take to come in order.
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
    if (which != 0) return;
    if (lane == 0) wait_stored(count);
    __syncwarp();
    // The watcher has read it: it was before the last own tile.
    if (lane == 0) channel.staged_before[memory.number] += walk.count(rank, memory.number);
    const uint32_t epoch = this_epoch(channel);
    if (all.all_reduce) {
      leave<OneWarp>(waiter, epoch, memory.guests);
    } else {
      end_block<OneWarp>(channel, epoch);
    }
  }

 private:
  __device__ __forceinline__ void enter_call() {
    const auto expects = [&](int peer) {
      return all.all_reduce || all.product.walk.has_tiles(peer, memory.number);
    };
    const Published mine[] = {all.scratch, all.y};
    enter<OneWarp>(waiter, mine, memory.guests, expects);
    check_grids<OneWarp>(waiter, memory.guests, expects);
    if (threadIdx.x % 32 == 0) timeline::lap(Did::kEnter);
  }

  static __device__ __forceinline__ void sync_storers() {
    ptx::named_barrier_sync(1 + Shape::Crew::kConsumers, 32 * Outbox::kStorers);
    ptx::fence_proxy_async();  // the invitations, before stores of the other proxy
  }

  // Until so many tiles have been stored, and announced.
  __device__ __forceinline__ void wait_stored(uint32_t tiles) const {
    while (ptx::ld_acquire_cta(&memory.stored) != tiles) {
    }
  }

  // A consumer, when all peers have sent an own tile: the first one's part of it.
  __device__ __forceinline__ void fetch_first(Pending& pending, int consumer, int tile) const {
    if (is_first_thread()) timeline::lap(Did::kMultiply);
    const uint32_t own = tile / all.product.walk.tiles.num_blocks + 1;  // tiles, with this one
    // Acquire of the tiles; pairs with the watcher's release. It has the limit, so this has none.
    while (ptx::ld_acquire_cta(&memory.arrived) < own) {
    }
    sync_consumer(consumer);  // lest its warps come apart
    if (is_first_thread()) timeline::lap(Did::kWaitPiece, own);
    pending.fetch(sent(tile, 0));
  }

  // The part of an own tile that the peer of this index has sent.
  __device__ __forceinline__ const char* sent(int tile, int peer) const {
    const int64_t number = peer * int64_t{all.product.walk.tiles.num_tiles()} + tile;
    return all.scratch.address + number * PartialLayout::kTileBytes;
  }

  // A panel of each of the consumers' warps, a lane for each. While it is read, the next one can
  // be: only the one before must have been.
  __device__ __forceinline__ void store_panel(const Partial& tile, int storer, int panel) {
    const CommView& comm = waiter.comm;
    const Result& y = all.product.c;
    const int warp = threadIdx.x % 32, buffer = Outbox::buffer(panel),
              col = tile.col + panel * kPanel;
    const bool own = tile.owner == comm.rank, has_panel = warp < PartialLayout::kWarps;
    const auto panel_of = [&](int warp) -> ResultPanel& {
      return this->shared.c[warp / 4][warp % 4][buffer];
    };
    if (has_panel) {
      const int row = tile.row + warp * ResultPanel::kRows;
      memory.outbox[warp].wait_full(storer, panel);
      if (own) {
        panel_of(warp).store(&y.map, all.first_row + row, col);
      } else if (row < all.product.walk.rows && col < all.cols) {
        send(tile, panel * Pending::kChunksOfPanel, panel_of(warp), warp);
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
    ptx::cp_async_bulk_wait_group_read<1>();
    if (panel > 0) give_back(panel - 1);
  }

  // The buffers of a panel, which have been read.
  __device__ __forceinline__ void give_back(int panel) {
    const int warp = threadIdx.x % 32;
    if (warp < PartialLayout::kWarps) memory.outbox[warp].release(panel);
  }

  // A warp's chunks of a panel, from `first` on: to their place in the scratch of the owner.
  __device__ __forceinline__ void send(const Partial& tile, int first, const ResultPanel& panel,
                                       int warp) const {
    const int64_t tiles = all.product.walk.tiles.num_tiles();
    const int64_t number = peer_index(waiter.comm.rank, tile.owner) * tiles + tile.tile;
    char* to = memory.guests.address[0][tile.owner] + number * PartialLayout::kTileBytes;
    ptx::cp_async_bulk_store(to + PartialLayout::offset(warp, first), panel.data,
                             Pending::kChunksOfPanel * PartialLayout::kChunkBytes);
  }
};

template <typename Shape, ptx::Type kType, Major kMajorB>
__global__ void __launch_bounds__(Shape::Crew::kThreads, Shape::Crew::kMinBlocks)
    matmul_reduce(const __grid_constant__ CommView comm, const __grid_constant__ ReduceArgs args) {
  using Product = ReduceMatmul<Shape, kType, kMajorB>;
  constexpr int kSharedBytes = 227 << 10;  // of a block at most, with the number of its arrival
  static_assert(sizeof(typename Product::Memory) + kSwizzleBytes + sizeof(ReduceMemory) <
                kSharedBytes - 128);
  extern __shared__ char memory[];
  __shared__ ReduceMemory more;
  auto& shared = set_up<Product>(memory, args.product);
  if (threadIdx.x < PartialLayout::kWarps) more.outbox[threadIdx.x].init();
  if (threadIdx.x == 0) {
    more.tiles.init(PartialLayout::kWarps + Outbox::kStorers);
    more.arrived = more.stored = 0;
  }
  const Op op = args.all_reduce ? Op::kMatmulAllReduce : Op::kMatmulReduceScatter;
  const Waiter waiter{comm, op, args.channel};
  const int number = number_by_arrival(channel_of(waiter));
  if (threadIdx.x == 0) more.number = number;
  __syncthreads();
  Product product{{args.product, shared, {}, {}, number}, args, waiter, more};
  Shape::Crew::run(product);
}

}  // namespace pk::matmul

// The kernel of matmul_reduce_scatter and matmul_all_reduce: the main loop of matmul.cuh over the
// partial tiles of all owners, which leave to them, or are added up, under the next one's products.
//
//   mover       loads, tile i | loads, tile i + 1, and pieces of what peers sent for tile i | ...
//   consumers   wgmma, tile i | wgmma, tile i + 1;  tile i: panels to send, or pieces to add  | ...
//   storer      panels of tile i - 1 | panels of tile i, to the owner's scratch, announced; or to y
//
// The mover waits for the peers' tiles, in front of what it loads of them; the storer for its own
// stores to arrive. Consumers wait for neither, unless the link falls behind.
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
  PartialLayout layout;
  int cols;
  int first_row;  // of y that this rank adds up
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
  Bulletin<Partial, 4> tiles;  // read by each of the consumers' warps, and the storer
  Outbox outbox[PartialLayout::kWarps];
  GuestsUpTo<PartialLayout::kMostRanks> guests;
  uint32_t arrived;  // own tiles that all peers have sent
  int number;        // of the block
};

struct NoEpilogue {};

template <typename Shape, ptx::Type kType, Major kMajorB>
struct ReduceMatmul
    : Matmul<Shape, kType, Major::kK, kMajorB, ScatterWalk, WholeSource, NoEpilogue> {
  using Base = Matmul<Shape, kType, Major::kK, kMajorB, ScatterWalk, WholeSource, NoEpilogue>;
  using typename Base::At, typename Base::Part, typename Base::Tile;
  using Pending = PartialTile<kType, Shape::kConsumerN>;
  static_assert(sizeof(typename Base::Memory::B) == PartialLayout::kStageBytes);
  // A consumer that waits for a piece may hold two steps and the piece between them.
  static_assert(Shape::kStages >= 4);
  static_assert(PartialLayout::kMostRanks <= ScatterWalk::kMostRanks);

  const ReduceArgs& all;
  const Waiter& waiter;
  ReduceMemory& memory;

  __device__ __forceinline__ void load() {
    const ScatterWalk& walk = all.product.walk;
    At at;
    ScatterWalk::Parts parts(walk, memory.number);
    uint32_t count = 0;      // tiles
    uint32_t own = 0;        // own ones
    int tile = 0, left = 0;  // the last of them, and pieces of it that are not loaded
    while (true) {
      const Part part = parts.next();
      const int col = part.n * Shape::kN;
      const bool some = part.num_steps > 0;
      memory.tiles.write(count++, {some ? part.owner : -1, part.m * Shape::kM, col, part.tile});
      const RowsOfA rows{&all.product.a, part.row(Shape::kM)};
      for (int step = 0; step < part.num_steps || left > 0; ++step) {
        if (step < part.num_steps) this->load_step(rows, col, step * kBlockK, 0, at);
        if (!all.layout.adds(left, part.num_steps - 1 - step)) continue;
        load_piece(tile, all.layout.num_pieces() - left--, own, at);
      }
      if (!some) return;
      if (!walk.is_own(part)) continue;
      ++own;
      tile = part.tile;
      left = all.layout.num_pieces();
    }
  }

  // The watcher: polls once for a block, and ahead of the mover.
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
      // Passes on what the lanes have acquired; pairs with the acquire in load_piece().
      if (lane == 0) ptx::st_release_cta(&memory.arrived, own);
    }
  }

  __device__ __forceinline__ void consume(int consumer) {
    auto& shared = ptx::kept(this->shared);
    const int num_steps = all.product.walk.tiles.num_steps;
    Pending pending(shared.c[consumer], memory.outbox[threadIdx.x / 32]);
    At at;
    for (uint32_t count = 0;; ++count) {
      const int owner = memory.tiles.read(count).owner;
      Tile tile;
      if (owner >= 0) {
        this->multiply(shared, tile, consumer * 64, 0, num_steps, at, [&](int step) {
          if (all.layout.adds(pending.to_add(), num_steps - 1 - step))
            add_piece(shared, pending, consumer, at);
          if (pending.to_send() > 0 && all.layout.sends(step)) pending.send_panel();
        });
        if (is_first_thread()) timeline::lap(Did::kMultiply, count, owner);
      }
      while (pending.to_add() > 0) add_piece(shared, pending, consumer, at);
      while (pending.to_send() > 0) pending.send_panel();
      if (owner < 0) return;
      pending.take(tile, owner == waiter.comm.rank, all.layout);
    }
  }

  __device__ __forceinline__ void store() {
    const ScatterWalk& walk = all.product.walk;
    const int lane = threadIdx.x % 32, rank = waiter.comm.rank;
    const auto expects = [&](int peer) {
      return all.all_reduce || walk.has_tiles(peer, memory.number);
    };
    const Published mine[] = {all.scratch, all.y};
    enter<OneWarp>(waiter, mine, memory.guests, expects);
    check_grids<OneWarp>(waiter, memory.guests, expects);
    if (lane == 0) timeline::lap(Did::kEnter);
    ptx::fence_proxy_async();  // the invitations, before stores of the other proxy
    Channel& channel = channel_of(waiter);
    for (uint32_t count = 0;; ++count) {
      const Partial tile = memory.tiles.read(count);
      if (tile.owner < 0) break;
#pragma unroll 1
      for (int panel = 0; panel < Pending::kPanels; ++panel) store_panel(tile, panel);
      if (tile.owner == rank && lane == 0) timeline::lap(Did::kStore);
      if (tile.owner == rank) continue;
      ptx::cp_async_bulk_wait_group<0>();
      ptx::fence_proxy_async();
      __syncwarp();
      if (lane == 0) {
        SignalPage& page = signal_page(waiter.comm, tile.owner);
        // Release of the tile, which has arrived; pairs with the acquire in communicate() there.
        ptx::red_add_release_sys(&page.channels[waiter.channel].staged[rank][memory.number], 1);
        timeline::lap(Did::kSend, timeline::kNoId, tile.owner, PartialLayout::kTileBytes);
      }
    }
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
  // A piece of an own tile, of all peers, into the next stage, when so many own tiles have arrived.
  __device__ __forceinline__ void load_piece(int tile, int piece, uint32_t arrived, At& at) {
    const int lane = threadIdx.x % 32, peers = waiter.comm.num_ranks - 1;
    const uint32_t bytes = all.layout.piece_bytes();
    if (piece == 0) {
      if (lane == 0) timeline::lap(Did::kLoad);
      // Without a limit of its own: the watcher has one.
      while (ptx::ld_acquire_cta(&memory.arrived) < arrived) {
      }
      if (lane == 0) timeline::lap(Did::kWaitRows, arrived);
      ptx::fence_proxy_async();  // bulk copies read what generic loads have acquired
    }
    this->shared.pipeline.wait_empty(at);
    if (lane == 0) this->shared.pipeline.expect(at, bytes * peers);
    __syncwarp();
    if (lane < peers) {
      const int64_t from = lane * int64_t{all.product.walk.tiles.num_tiles()} + tile;
      ptx::cp_async_bulk_load(
          reinterpret_cast<char*>(this->shared.b[at.stage].data) + lane * bytes,
          all.scratch.address + from * PartialLayout::kTileBytes + piece * bytes, bytes,
          &this->shared.pipeline.full[at.stage]);
    }
    at.advance();
  }

  __device__ __forceinline__ void add_piece(typename Base::Memory& shared, Pending& pending,
                                            int consumer, At& at) {
    if (is_first_thread()) timeline::lap(Did::kMultiply);
    shared.pipeline.wait_full(at);
    if (is_first_thread()) timeline::lap(Did::kWaitPiece);
    pending.add_piece(waiter.comm, all.layout,
                      reinterpret_cast<const char*>(shared.b[at.stage].data));
    ptx::fence_proxy_async_shared();  // these reads, before the copies that fill the stage next
    sync_consumer(consumer);
    if (is_first_thread()) shared.pipeline.release(at.stage);
    if (is_first_thread()) timeline::lap(Did::kAdd);
    at.advance();
  }

  // A panel of each of the consumers' warps, a lane for each.
  __device__ __forceinline__ void store_panel(const Partial& tile, int panel) {
    const CommView& comm = waiter.comm;
    const Result& y = all.product.c;
    const Cursor<2> at = Outbox::at(panel);
    const int warp = threadIdx.x % 32, col = tile.col + panel * kPanel;
    const bool own = tile.owner == comm.rank, has_panel = warp < PartialLayout::kWarps;
    const auto panel_of = [&](int warp) -> ResultPanel& {
      return this->shared.c[warp / 4][warp % 4][at.stage];
    };
    if (has_panel) {
      const int row = tile.row + warp * ResultPanel::kRows;
      memory.outbox[warp].wait_full(at);
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
    ptx::cp_async_bulk_wait_group_read<0>();
    if (has_panel) memory.outbox[warp].release(at.stage);
  }

  // A warp's chunks of a panel, from `first` on: to their place in the scratch of the owner.
  __device__ __forceinline__ void send(const Partial& tile, int first, const ResultPanel& panel,
                                       int warp) const {
    const int64_t tiles = all.product.walk.tiles.num_tiles();
    const int64_t number = peer_index(waiter.comm.rank, tile.owner) * tiles + tile.tile;
    char* to = memory.guests.address[0][tile.owner] + number * PartialLayout::kTileBytes;
    const char* from = reinterpret_cast<const char*>(panel.data);
#pragma unroll 1
    for (int i = 0; i < Pending::kChunksOfPanel; i += all.layout.chunks()) {
      ptx::cp_async_bulk_store(to + all.layout.offset(warp, first + i),
                               from + i * PartialLayout::kChunkBytes,
                               all.layout.chunks() * PartialLayout::kChunkBytes);
    }
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
  if (threadIdx.x < PartialLayout::kWarps) more.outbox[threadIdx.x].init(1);
  if (threadIdx.x == 0) {
    more.tiles.init(PartialLayout::kWarps + 1);
    more.arrived = 0;
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

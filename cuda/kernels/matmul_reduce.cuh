// The kernel of matmul_reduce_scatter and matmul_all_reduce: the main loop of matmul.cuh over the
// partial tiles of all owners, which leave to them, or are added up, under the next one's products.
//
//   mover       loads, tile i        | loads, tile i + 1 | ...
//   consumers   wgmma, tile i        | wgmma, tile i + 1 | ...   panels of the tile before leave;
//                                                                an own one ends with peers' parts
//   2 storers   panels of tile i - 1 | panels of tile i  | ...   matmul_reduce_store.cuh
//   watcher     what peers have sent
//
// When an own tile's last step has begun, the consumers fetch the first peer's part of it into the
// registers that the tile before has left, and add it to their accumulators after that step; other
// peers' parts follow one by one. The storers wait for their stores to arrive, the consumers for
// nothing but what they add, unless the link falls behind.
//
// Progress: see schedule/scatter_walk.h. Blocks are numbered as they arrive, so those that are
// resident have the same numbers on all ranks, from 0 on. Before the consumers wait for an own
// tile, all panels of the tiles before it are with the storers, who wait for no consumer to send
// them; so an own tile waits for no more than the walk says.
#pragma once

#include "kernels/matmul.cuh"
#include "kernels/matmul_reduce_store.cuh"
#include "schedule/inter_sm.cuh"
#include "schedule/partial_layout.h"
#include "schedule/partial_tile.cuh"
#include "schedule/rendezvous.cuh"
#include "schedule/scatter_walk.h"

namespace pk::matmul {

struct NoEpilogue {};

template <typename Shape, ptx::Type kType, Major kMajorB>
struct ReduceMatmul
    : Matmul<Shape, kType, Major::kK, kMajorB, ScatterWalk, WholeSource, NoEpilogue> {
  using Base = Matmul<Shape, kType, Major::kK, kMajorB, ScatterWalk, WholeSource, NoEpilogue>;
  using typename Base::At, typename Base::Part, typename Base::Tile;
  using Pending = PartialTile<kType, Shape::kConsumerN>;
  static_assert(PartialLayout::kWarps == 4 * Shape::Crew::kConsumers);
  static_assert(ReduceStore::kBarrier > Shape::Crew::kConsumers);  // those of sync_consumer()

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
        // Acquire of the peer's tile; pairs with the release in ReduceStore there.
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

  __device__ __forceinline__ void copy(int which) {
    ReduceStore{all, waiter, memory, this->shared.c}.run(which);
  }

 private:
  // A consumer, when all peers have sent an own tile: the first one's part of it.
  __device__ __forceinline__ void fetch_first(Pending& pending, int consumer, int tile) const {
    if (is_first_thread()) timeline::lap(Did::kMultiply);
    const uint32_t own = tile / all.product.walk.tiles.num_blocks + 1;  // tiles, with this one
    // Acquire of the tiles; pairs with the watcher's release. It has the limit, so this has none.
    while (ptx::ld_acquire_cta(&memory.arrived) < own) {
    }
    sync_consumer(consumer);  // lest its warps come apart
    if (is_first_thread()) timeline::lap(Did::kWaitParts, own);
    pending.fetch(sent(tile, 0));
  }

  // The part of an own tile that the peer of this index has sent.
  __device__ __forceinline__ const char* sent(int tile, int peer) const {
    const int64_t number = peer * int64_t{all.product.walk.tiles.num_tiles()} + tile;
    return all.scratch.address + number * PartialLayout::kTileBytes;
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

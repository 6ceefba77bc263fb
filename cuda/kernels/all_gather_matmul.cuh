// The kernel of all_gather_matmul: the main loop of matmul.cuh, with rows of A from all ranks.
//
//   communicators   pieces of x into the peers' `gathered`, with flags      (gather_push.cuh)
//   the others      watcher     flags of the next rank's rows: chunk 0 of k | chunk 1 | ...
//                   mover       loads from x    | loads from `gathered`: chunk 0 | chunk 1 | ...
//                   consumers      wgmma | wgmma ...
//                   2 pushers   without communicators: pieces and flags; then own rows to
//                               `gathered`, if they are wanted there
//
// A tile begins when the first columns of its rows are there; the others come while it multiplies.
//
// Entry: nothing is pushed to a peer that has not invited it. Exit: whatever peers push to this
// rank is waited for by the blocks that multiply it, and each chunk of each row is in some tile.
// Nobody reads this rank's x but itself.
//
// Progress: whoever pushes waits for peers to begin, whoever computes for what is pushed. Pushing
// goes on with any number of resident blocks (gather_push.cuh), hence computing too.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/matmul.cuh"
#include "kernels/matmul_instances.cuh"
#include "schedule/gather_pieces.h"
#include "schedule/gather_push.cuh"
#include "schedule/gather_walk.h"
#include "schedule/inter_sm.cuh"

namespace pk::matmul {

struct GatherArgs {
  Args<GatherWalk> product;  // A is `gathered`
  CUtensorMap own;           // x
  GatherPush push;           // of x to `gathered`
  int chunk_steps;           // steps of k in a chunk
  int channel;
  int num_communicators;  // 0: every block pushes
  bool own_rows;          // are wanted in `gathered`
};

// The rows of a block's parts, chunk by chunk of k, as its watcher reports them.
struct GatheredRows {
  const GatherArgs& args;
  const uint32_t* arrived;  // chunks of others' rows, in the order of the block's steps
  uint32_t wanted = 0;
  int due = 0;  // the step that begins the next chunk

  // Waits for nothing yet; own rows need no waiting at all.
  __device__ __forceinline__ RowsOfA wait(const CUtensorMap& gathered, const GatherWalk::Part& part,
                                          int row) {
    due = part.own ? INT32_MAX : 0;
    if (part.own) return {&args.own, args.product.walk.row_of_part(row)};
    return {&gathered, row};
  }

  __device__ __forceinline__ void wait_step(int step) {
    if (step != due) return;
    due += args.chunk_steps;
    ++wanted;
    if (threadIdx.x % 32 == 0) timeline::lap(Did::kLoad);
    // Acquire of the chunk; pairs with the watcher's release. It has the limit, so this has none.
    while (ptx::ld_acquire_cta(arrived) < wanted) {
    }
    if (threadIdx.x % 32 == 0) timeline::lap(Did::kWaitRows, wanted);
  }
};

template <typename Shape, ptx::Type kType, Major kMajorB>
struct GatherMatmul : Matmul<Shape, kType, Major::kK, kMajorB, GatherWalk, GatheredRows, Epilogue> {
  TileFlags flags;
  uint32_t* arrived;

  // The watcher: polls once for a block, and ahead of the mover, which never waits for a trip to
  // the L2 between two steps.
  __device__ __forceinline__ void communicate() {
    const GatherArgs& args = this->source.args;
    const GatherWalk& walk = args.product.walk;
    const GatherPieces& pieces = args.push.pieces;
    const int lane = threadIdx.x % 32;
    GatherWalk::Parts parts(walk, this->block);
    uint32_t count = 0;
    for (auto part = parts.next(); part.num_steps > 0; part = parts.next()) {
      if (part.own) continue;
      for (int chunk = 0; chunk < pieces.num_chunks; ++chunk) {
        walk.for_each_source(part, [&](int source, int o, int first, int end) {
          const int end_band = pieces.end_band(o, end);
          for (int band = pieces.first_band(o, first) + lane; band < end_band; band += 32)
            flags.wait(source, pieces.number({band, chunk}));
        });
        __syncwarp();
        ++count;
        if (lane == 0) timeline::lap(Did::kWaitFlags, count);
        // Passes on what the lanes have acquired; pairs with the acquire in GatheredRows.
        if (lane == 0) ptx::st_release_cta(arrived, count);
      }
    }
  }

  // The pushers, `warp` 0 and 1.
  __device__ __forceinline__ void copy(int warp) {
    const GatherArgs& args = this->source.args;
    const uint32_t num_warps = 2 * args.product.walk.tiles.num_blocks;
    if (args.num_communicators == 0) {
      push_by_warp(flags.waiter, args.push, flags.epoch, num_warps);
      // Here the blocks' own indices will do: they take no register meanwhile, and neither may the
      // warp's.
      if (args.own_rows) copy_own(args.push, 2 * blockIdx.x + ((threadIdx.x & 32) != 0), num_warps);
    } else if (args.own_rows) {
      copy_own(args.push, 2 * this->block + warp, num_warps);
    }
  }
};

template <typename Shape, ptx::Type kType, Major kMajorB>
__global__ void __launch_bounds__(Shape::Crew::kThreads, Shape::Crew::kMinBlocks)
    all_gather_matmul(const __grid_constant__ CommView comm,
                      const __grid_constant__ GatherArgs args) {
  using Product = GatherMatmul<Shape, kType, kMajorB>;
  extern __shared__ char memory[];
  __shared__ uint32_t arrived, epoch;  // not in registers, which consumers have none of to spare
  auto& shared = set_up<Product>(memory, args.product);
  const Waiter waiter{comm, Op::kAllGatherMatmul, args.channel};
  Channel& channel = channel_of(waiter);
  if (threadIdx.x == 0) arrived = 0;
  if (threadIdx.x == 64) ptx::prefetch_tensor_map(&args.own);
  if (threadIdx.x == 96) epoch = this_epoch(channel);  // beside the trip of the arrival
  split_by_arrival(
      channel, args.num_communicators,
      [&](int number) {
        push_by_block(waiter, args.push, number, args.num_communicators,
                      reinterpret_cast<PushMemory&>(shared));
      },
      [&](int number) {
        Product product{
            {args.product, shared, {args, &arrived}, {}, number}, {waiter, epoch}, &arrived};
        Shape::Crew::run(product);
      });
  end_block(channel, epoch);
}

// ---- By name

using GatherInstance = InstanceOf<void (*)(CommView, GatherArgs)>;

template <typename Shape, ptx::Type kType, Major kMajorB>
GatherInstance make_gather_instance() {
  using Memory = GatherMatmul<Shape, kType, kMajorB>::Memory;
  // Communicators use it instead, but for the mbarriers, which are initialised by then.
  static_assert(sizeof(PushMemory) <= offsetof(Memory, pipeline));
  return instance_of<Shape, Major::kK, kMajorB>(all_gather_matmul<Shape, kType, kMajorB>);
}

template <ptx::Type kType>
GatherInstance gather_instance_of(MatmulTile tile, bool transpose_w) {
  const auto of = [=](auto shape) {
    using Shape = decltype(shape);
    return transpose_w ? make_gather_instance<Shape, kType, Major::kK>()
                       : make_gather_instance<Shape, kType, Major::kMn>();
  };
  return tile == MatmulTile::k128x256 ? of(Tile128x256{}) : of(Tile128x128{});
}

// Of one operand type, each compiled by itself.
GatherInstance gather_bfloat16_instance(MatmulTile tile, bool transpose_w);
GatherInstance gather_float16_instance(MatmulTile tile, bool transpose_w);

}  // namespace pk::matmul

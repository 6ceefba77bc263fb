// The kernel of all_gather_matmul: the main loop of matmul.cuh, whose rows of A come from all
// ranks.
//
//   communicators   pusher      piece 0 to the first peer | piece 1 | ...       into `gathered`
//   there
//                   announcer                       └ flag    └ flag
//   the others      watcher   own rows | own rows | flags of the next rank's rows | ...
//                   mover     loads from x        | loads from `gathered` | ...
//                   consumers      wgmma ...
//                   copier    own rows from x to `gathered`, if they are wanted there
//
// Entry: a communicator pushes once all peers have invited it (rendezvous.cuh). It has pieces for
// each of them, so that no peer can end the call, and write its next invitation over this one,
// before it has read it. Exit: whatever peers push to this rank is waited for by the blocks that
// multiply it, and each row is in some tile. Nobody reads this rank's x but itself.
//
// Progress: communicators begin first (inter_sm.cuh). They wait for the peers' communicators to
// begin, the others for what communicators push: any number of resident blocks will do.
#pragma once

#include "kernels/matmul.cuh"
#include "kernels/matmul_instances.cuh"
#include "mechanism/register.cuh"
#include "mechanism/tma.cuh"
#include "schedule/gather_walk.h"
#include "schedule/inter_sm.cuh"
#include "schedule/rendezvous.cuh"
#include "schedule/tile_flags.cuh"

namespace pk::matmul {

struct GatherArgs {
  Args<GatherWalk> product;  // A is `gathered`
  CUtensorMap own;           // x
  const char* x;
  Published gathered;
  bool own_rows;  // are wanted in `gathered`
  GatherPieces pieces;
  int64_t row_bytes;
  int channel;
  int num_communicators;
};

// ---- Blocks that communicate

struct PushMemory {
  // Few SMs, so that each has much in flight.
  tma::Ring<12, 1 << GatherPieces::kLeastShift, 6> ring;
  Guests guests;
  uint32_t pushed;  // moves that have arrived
};

// All threads of a block: its share of the pieces.
__device__ __forceinline__ void push(const Waiter& waiter, const GatherArgs& args, int number,
                                     PushMemory& shared) {
  const CommView& comm = waiter.comm;
  const GatherPieces& pieces = args.pieces;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int step = args.num_communicators, count = (pieces.num_sent() - number + step - 1) / step;
  const int moves = pieces.shift - GatherPieces::kLeastShift;  // log2 of those of a piece
  const auto sent = [&](int64_t i) { return pieces.sent(number + static_cast<int>(i) * step); };
  if (warp == 0) shared.ring.init();
  if (threadIdx.x == 0) shared.pushed = 0;
  const Published mine[] = {args.gathered};
  const uint32_t epoch = enter(waiter, mine, shared.guests);
  if (warp == 0) {
    const PartLayout packed = PartLayout::packed(pieces.part_bytes);
    const PeerTensor gathered{shared.guests.address[0], comm.num_ranks,
                              PartLayout::inside(comm.num_ranks, pieces.part_bytes), comm.rank};
    tma::store_tiles(
        shared.ring, gathered,
        [&](int64_t i) -> Move {
          const auto [to, piece] = sent(i >> moves);
          const int64_t in_piece = (i & ((1 << moves) - 1)) << GatherPieces::kLeastShift;
          const int64_t first = (int64_t{piece} << pieces.shift) + in_piece;
          const int64_t left = max(pieces.part_bytes - first, int64_t{0});
          const auto bytes = static_cast<uint32_t>(min(left, int64_t{1 << pieces.kLeastShift}));
          return {{args.x, packed, 0}, {0, first, 1, bytes}, to, 1};
        },
        0, 1, int64_t{count} << moves,
        [] { ptx::fence_proxy_async(); },  // the invitations, before writes of the other proxy
        [&](int64_t i, const Move&) {
          // Release of the moves, which have arrived; pairs with the acquire below.
          if (lane == 0) ptx::st_release_cta(&shared.pushed, static_cast<uint32_t>(i) + 1);
        },
        1u << moves);
  } else if (warp == 1) {
    // A warp of its own, for fence and release wait for all that has been written: 3 us or so.
    const TileFlags flags{waiter, epoch};
    for (int told = 0; told < count;) {
      int due = 0;
      while (lane == 0 && due <= told) due = ptx::ld_acquire_cta(&shared.pushed) >> moves;
      due = __shfl_sync(0xFFFFFFFF, due, 0);
      __syncwarp();  // for memory: the exchange orders nothing
      ptx::fence_proxy_async();
      for (int i = told + lane; i < due; i += 32) {
        const auto [to, piece] = sent(i);
        flags.announce(to, piece);
      }
      told = due;
    }
  }
}

// ---- Blocks that compute

// The rows of a block's parts, as its watcher reports them.
struct GatheredRows {
  const GatherArgs& args;
  const uint32_t* arrived;  // parts, in the block's order
  uint32_t wanted = 0;

  __device__ __forceinline__ RowsOfA wait(const CUtensorMap& gathered, const GatherWalk::Part& part,
                                          int row) {
    ++wanted;
    while (ptx::ld_acquire_cta(arrived) < wanted) {
    }
    const GatherWalk& walk = args.product.walk;
    if (part.own) return {&args.own, row - walk.rank * walk.part_rows};
    return {&gathered, row};
  }
};

template <typename Shape, ptx::Half kType, Major kMajorB>
struct GatherMatmul : Matmul<Shape, kType, Major::kK, kMajorB, GatherWalk, GatheredRows, Epilogue> {
  TileFlags flags;
  uint32_t* arrived;

  // The watcher: polls once for a block, and ahead of the mover, which never waits for a trip to
  // the L2 between two tiles.
  __device__ __forceinline__ void communicate() {
    const GatherArgs& args = this->source.args;
    const GatherWalk& walk = args.product.walk;
    const int lane = threadIdx.x % 32;
    GatherWalk::Parts parts(walk, this->block);
    uint32_t count = 0;
    for (auto part = parts.next(); part.num_steps > 0; part = parts.next()) {
      if (!part.own) {
        walk.for_each_source(part, [&](int source, int first, int end) {
          const int last = args.pieces.at(end * args.row_bytes - 1);
          for (int i = args.pieces.at(first * args.row_bytes) + lane; i <= last; i += 32)
            flags.wait(source, i);
        });
        __syncwarp();
      }
      ++count;
      // Passes on what the lanes have acquired; pairs with the acquire in GatheredRows.
      if (lane == 0) ptx::st_release_cta(arrived, count);
    }
  }

  // The copier. By registers: shared memory is full, and a warp an SM is fast enough.
  __device__ __forceinline__ void store() {
    const GatherArgs& args = this->source.args;
    if (!args.own_rows) return;
    const int64_t bytes = args.pieces.part_bytes;
    reg::copy_share(args.gathered.address + args.pieces.rank * bytes, args.x, bytes, this->block,
                    args.product.walk.tiles.num_blocks);
  }
};

template <typename Shape, ptx::Half kType, Major kMajorB>
__global__ void __launch_bounds__(Shape::Crew::kThreads, Shape::Crew::kMinBlocks)
    all_gather_matmul(const __grid_constant__ CommView comm,
                      const __grid_constant__ GatherArgs args) {
  using Product = GatherMatmul<Shape, kType, kMajorB>;
  extern __shared__ char memory[];
  __shared__ uint32_t arrived;
  auto& shared = set_up<Product>(memory, args.product);
  if (threadIdx.x == 0) arrived = 0;
  const Waiter waiter{comm, Op::kAllGatherMatmul, args.channel};
  Channel& channel = channel_of(waiter);
  const uint32_t epoch = this_epoch(channel);
  split_by_arrival(
      channel, args.num_communicators,
      [&](int number) { push(waiter, args, number, reinterpret_cast<PushMemory&>(shared)); },
      [&](int number) {
        Product product{
            {args.product, shared, {args, &arrived}, {}, number}, {waiter, epoch}, &arrived};
        Shape::Crew::run(product);
      });
  end_block(channel, epoch);
}

// ---- By name

using GatherInstance = InstanceOf<void (*)(CommView, GatherArgs)>;

template <typename Shape, ptx::Half kType, Major kMajorB>
GatherInstance make_gather_instance() {
  using Memory = GatherMatmul<Shape, kType, kMajorB>::Memory;
  static_assert(sizeof(PushMemory) <= sizeof(Memory));
  return instance_of<Shape, Major::kK, kMajorB>(all_gather_matmul<Shape, kType, kMajorB>);
}

template <ptx::Half kType>
GatherInstance gather_instance_of(MatmulTile tile, bool transpose_w) {
  const auto of = [=](auto shape) {
    using Shape = decltype(shape);
    return transpose_w ? make_gather_instance<Shape, kType, Major::kK>()
                       : make_gather_instance<Shape, kType, Major::kMn>();
  };
  return tile == MatmulTile::k128x256 ? of(TileShape<128, 256, 4>{}) : of(TileShape<128, 128, 6>{});
}

// Of one operand type, each compiled by itself.
GatherInstance gather_bfloat16_instance(MatmulTile tile, bool transpose_w);
GatherInstance gather_float16_instance(MatmulTile tile, bool transpose_w);

}  // namespace pk::matmul

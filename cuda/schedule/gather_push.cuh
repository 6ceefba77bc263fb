// A rank's part into the same place of every peer's gathered tensor, piece by piece, each announced
// by a flag (tile_flags.cuh). What is multiplied, or whatever else is done with the pieces, goes on
// beside it. Two schedules:
//
//   inter-SM   blocks that do nothing else (inter_sm.cuh), by bulk copies
//                pusher      piece 0 | piece 1 | piece 2 | ...      the warp never waits for an
//                announcer           └ flag    └ flag               acknowledgement
//   intra-SM   a few warps of every block, by registers, since shared memory is taken
//                piece 3 ─ flag ─ piece 17 ─ flag ─ ...             drawn from a counter
//
// Entry: a piece is pushed once the peer has invited this rank (rendezvous.cuh). While it has not
// come the peer cannot end the call, and so cannot write the next invitation over this one. So a
// communicator, which waits for all peers at once, must have a piece for each.
//
// Exit: none. Whoever uses a piece has waited for its flag; the op sees to it that each is used.
//
// Progress: all that waits here waits for peers' invitations, which the first block to run there
// writes before it waits for anything. Pieces do not wait for whoever is not resident:
// communicators begin first, and the counter hands out pieces to whoever is there.
#pragma once

#include "mechanism/register.cuh"
#include "mechanism/tma.cuh"
#include "schedule/gather_walk.h"
#include "schedule/rendezvous.cuh"
#include "schedule/tile_flags.cuh"
#include "tile/timeline.cuh"

namespace pk {

struct GatherPush {
  const char* source;  // the part: [outer, inner] bytes
  Published target;    // [outer, ranks, inner] bytes
  GatherPieces pieces;
};

struct PushMemory {
  // Few SMs, so that each has much in flight. Loads, which take long beside a product, have half.
  tma::Ring<12, 1 << GatherPieces::kLeastShift, 6> ring;
  Guests guests;
  uint32_t pushed;  // moves that have arrived
};

// All threads of communicator `number`, two warps at least.
__device__ __forceinline__ void push_by_block(const Waiter& waiter, const GatherPush& push,
                                              int number, int num_communicators,
                                              PushMemory& shared) {
  const CommView& comm = waiter.comm;
  const GatherPieces& pieces = push.pieces;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int count = (pieces.num_sent() - number + num_communicators - 1) / num_communicators;
  const int moves = pieces.shift - GatherPieces::kLeastShift;  // log2 of those of a piece
  const auto sent = [&](int64_t i) {
    return pieces.sent(number + static_cast<int>(i) * num_communicators);
  };
  if (warp == 0) shared.ring.init();
  if (threadIdx.x == 0) shared.pushed = 0;
  const Published mine[] = {push.target};
  const uint32_t epoch = enter(waiter, mine, shared.guests);
  if (warp == 0) {
    const PartLayout packed = PartLayout::packed(pieces.inner);
    const PeerTensor target{shared.guests.address[0], comm.num_ranks,
                            PartLayout::inside(comm.num_ranks, pieces.inner), comm.rank};
    tma::store_tiles(
        shared.ring, target,
        [&](int64_t i) -> Move {
          const auto [to, piece] = sent(i >> moves);
          const auto [o, first] = pieces.place(piece);
          const int64_t col = first + ((i & ((1 << moves) - 1)) << GatherPieces::kLeastShift);
          const int64_t left = max(pieces.inner - col, int64_t{0});
          const auto bytes = static_cast<uint32_t>(min(left, int64_t{1 << pieces.kLeastShift}));
          return {{push.source, packed, 0}, {o, col, 1, bytes}, to, 1};
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
    if (lane == 0) timeline::lap(timeline::Did::kEnter);
    for (int told = 0; told < count;) {
      int due = 0;
      while (lane == 0 && due <= told) due = ptx::ld_acquire_cta(&shared.pushed) >> moves;
      due = __shfl_sync(0xFFFFFFFF, due, 0);
      __syncwarp();  // for memory: the exchange orders nothing
      ptx::fence_proxy_async();
      for (int i = told + lane; i < due; i += 32) {
        const auto [to, piece] = sent(i);
        flags.announce(to, piece);
        timeline::lap(timeline::Did::kPush, piece, to, pieces.bytes(piece));
      }
      told = due;
    }
  }
}

// One of `num_warps` warps of all blocks of the kernel.
__device__ __forceinline__ void push_by_warp(const Waiter& waiter, const GatherPush& push,
                                             uint32_t epoch, uint32_t num_warps) {
  const GatherPieces& pieces = push.pieces;
  const int lane = threadIdx.x % 32, count = pieces.num_sent();
  uint32_t* work = &channel_of(waiter).work;
  // Each warp draws one number too many, and the last of these puts the counter back to zero.
  const auto draw = [&] {
    return lane == 0 ? static_cast<int>(ptx::atom_inc_relaxed_gpu(work, count + num_warps - 1)) : 0;
  };
  const Published mine[] = {push.target};
  invite<OneWarp>(waiter, mine, epoch);
  const TileFlags flags{waiter, epoch};
  char* target = nullptr;
  int invited_by = -1;
  int next = draw();
#pragma unroll 1
  for (int i = __shfl_sync(0xFFFFFFFF, next, 0); i < count; i = __shfl_sync(0xFFFFFFFF, next, 0)) {
    next = draw();  // its trip is over when this piece is
    const int to = pieces.sent(i).to;
    if (to != invited_by) {
      target = address_of(waiter, to, wait_invitation(waiter, to, 0, epoch));
      invited_by = to;
      if (lane == 0) timeline::lap(timeline::Did::kEnter, timeline::kNoId, to);
    }
    const auto [o, first] = pieces.place(pieces.sent(i).piece);
    const int64_t left = pieces.inner - first;
    reg::copy_share(reinterpret_cast<uint4*>(
                        target + (o * pieces.num_ranks + pieces.rank) * pieces.inner + first),
                    reinterpret_cast<const uint4*>(push.source + o * pieces.inner + first),
                    static_cast<uint32_t>(min(left, int64_t{1} << pieces.shift) / 16), 0, 1);
    __syncwarp();  // gathers the lanes' stores for the release
    if (lane == 0) flags.announce(invited_by, pieces.sent(i).piece);
    if (lane == 0)
      timeline::lap(timeline::Did::kPush, i, invited_by, pieces.bytes(pieces.sent(i).piece));
  }
}

// One of `num_warps` warps: its share of the rank's own part, within this GPU.
__device__ __forceinline__ void copy_own(const GatherPush& push, uint32_t warp,
                                         uint32_t num_warps) {
  const GatherPieces& pieces = push.pieces;
  for (int o = 0; o < pieces.outer; ++o) {
    const int64_t to = (o * pieces.num_ranks + pieces.rank) * pieces.inner;
    reg::copy_share(reinterpret_cast<uint4*>(push.target.address + to),
                    reinterpret_cast<const uint4*>(push.source + o * pieces.inner),
                    static_cast<uint32_t>(pieces.inner / 16), warp, num_warps);
  }
  if (threadIdx.x % 32 == 0) timeline::lap(timeline::Did::kCopyOwn);
}

}  // namespace pk

// A rank's part into the same place of every peer's gathered tensor, piece by piece, each announced
// by a flag (tile_flags.cuh). What is multiplied, or whatever else is done with the pieces, goes on
// beside it. Two schedules:
//
//   inter-SM   blocks that do nothing else (inter_sm.cuh), by bulk copies
//                pusher 0     piece 0 | piece 2 | piece 4 | ...      the warp never waits for an
//                announcer 0          └ flag    └ flag               acknowledgement
//                pusher 1     piece 1 | piece 3 | piece 5 | ...
//                announcer 1          └ flag    └ flag
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
#include "schedule/gather_pieces.h"
#include "schedule/rendezvous.cuh"
#include "schedule/tile_flags.cuh"
#include "tile/timeline.cuh"

namespace pk {

struct GatherPush {
  const char* source;  // the part: [outer, rows, row_bytes]
  Published target;    // [outer, ranks, rows, row_bytes]
  GatherPieces pieces;
};

struct PushMemory {
  // Warps that push: one alone is kept busy by what it takes to issue copies. Few SMs, so that each
  // has much in flight. Loads, which take long beside a product, have half.
  static constexpr int kPushers = 2;
  tma::Ring<6, GatherPieces::kStage, 3> ring[kPushers];
  Guests guests;
  uint32_t pushed[kPushers];  // moves that have arrived
};

// One thread, for its warp, which has told the peer.
__device__ __forceinline__ void lap_pushed(const GatherPieces& pieces,
                                           const GatherPieces::Sent& sent) {
  timeline::lap(timeline::Did::kPush, pieces.number(sent.piece), sent.to,
                pieces.tile(sent.piece).bytes());
}

// All threads of communicator `number`: two warps at least for each pusher.
__device__ __forceinline__ void push_by_block(const Waiter& waiter, const GatherPush& push,
                                              int number, int num_communicators,
                                              PushMemory& shared) {
  const CommView& comm = waiter.comm;
  const GatherPieces& pieces = push.pieces;
  constexpr int kPushers = PushMemory::kPushers;
  // From lane 0, so that the compiler knows that a warp stays together.
  const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  // Of the block's pieces each pusher has every kPushers-th, and an announcer.
  const int pusher = warp % kPushers, first = number + pusher * num_communicators;
  const int stride = kPushers * num_communicators;
  const int count = max(pieces.num_sent() - first + stride - 1, 0) / stride;
  const int moves = pieces.moves_shift;  // log2 of those of a piece
  const auto sent = [&](int64_t i) { return pieces.sent(first + static_cast<int>(i) * stride); };
  uint32_t& pushed = shared.pushed[pusher];
  if (warp == 0) {
    for (auto& ring : shared.ring) ring.init();
  }
  if (threadIdx.x < kPushers) shared.pushed[threadIdx.x] = 0;
  const Published mine[] = {push.target};
  const uint32_t epoch = enter(waiter, mine, shared.guests);
  if (warp < kPushers) {
    const Part source{push.source, PartLayout::packed(pieces.row_bytes), 0};
    const PeerTensor target{shared.guests.address[0], comm.num_ranks,
                            PartLayout::outside(comm.num_ranks, pieces.rows, pieces.row_bytes),
                            comm.rank};
    tma::store_tiles(
        shared.ring[pusher], target,
        [&](int64_t i) -> Move {
          const auto [to, piece] = sent(i >> moves);
          return {source, pieces.move(piece, static_cast<int>(i) & ((1 << moves) - 1)), to, 1};
        },
        0, 1, int64_t{count} << moves,
        [] { ptx::fence_proxy_async(); },  // the invitations, before writes of the other proxy
        [&](int64_t i, const Move&) {
          __syncwarp();  // each lane has waited for its own copies
          // Release of the moves, which have arrived; pairs with the acquire below.
          if (lane == 0) ptx::st_release_cta(&pushed, static_cast<uint32_t>(i) + 1);
        },
        1u << moves);
  } else if (warp < 2 * kPushers) {
    // A warp of its own, for fence and release wait for all that has been written: 3 us or so.
    const TileFlags flags{waiter, epoch};
    if (lane == 0) timeline::lap(timeline::Did::kEnter);
    for (int told = 0; told < count;) {
      int due = 0;
      while (lane == 0 && due <= told) due = ptx::ld_acquire_cta(&pushed) >> moves;
      due = __shfl_sync(0xFFFFFFFF, due, 0);
      __syncwarp();  // for memory: the exchange orders nothing
      ptx::fence_proxy_async();
      for (int i = told + lane; i < due; i += 32) {
        const auto [to, piece] = sent(i);
        flags.announce(to, pieces.number(piece));
      }
      for (; told < due; ++told) {
        if (lane == 0) lap_pushed(pieces, sent(told));
      }
    }
  }
}

// One warp: a piece into the gathered tensor at `target`.
__device__ __forceinline__ void push_piece(const GatherPush& push, const GatherPieces::Piece& piece,
                                           char* target) {
  const GatherPieces& pieces = push.pieces;
  const RowTile tile = pieces.joined(pieces.tile(piece));
  const char* from = push.source + tile.row * pieces.row_bytes + tile.col;
  char* to = target + pieces.row_of_result(piece, tile.row) * pieces.row_bytes + tile.col;
#pragma unroll 1
  for (uint32_t left = tile.num_rows; left > 0; --left) {
    reg::copy_share(reinterpret_cast<uint4*>(to), reinterpret_cast<const uint4*>(from),
                    tile.num_cols / 16, 0, 1);
    from += pieces.row_bytes;
    to += pieces.row_bytes;
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
    push_piece(push, pieces.sent(i).piece, target);
    __syncwarp();  // gathers the lanes' stores for the release
    if (lane == 0) flags.announce(invited_by, pieces.number(pieces.sent(i).piece));
    if (lane == 0) lap_pushed(pieces, pieces.sent(i));
  }
}

// One of `num_warps` warps: its share of the rank's own part, within this GPU.
__device__ __forceinline__ void copy_own(const GatherPush& push, uint32_t warp,
                                         uint32_t num_warps) {
  const GatherPieces& pieces = push.pieces;
  const int64_t inner = int64_t{pieces.row_bytes} * pieces.rows;
  for (int o = 0; o < pieces.outer; ++o) {
    const int64_t to = (o * pieces.num_ranks + pieces.rank) * inner;
    reg::copy_share(reinterpret_cast<uint4*>(push.target.address + to),
                    reinterpret_cast<const uint4*>(push.source + o * inner),
                    static_cast<uint32_t>(inner / 16), warp, num_warps);
  }
  if (threadIdx.x % 32 == 0) timeline::lap(timeline::Did::kCopyOwn);
}

}  // namespace pk

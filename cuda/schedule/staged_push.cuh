// The schedule of the ops that combine what the ranks send. Parts are pushed into the owners'
// scratch, tile by tile; block b of a rank pushes to, and combines what comes from, block b of each
// peer. The warps of a block have three roles, so that the link never waits for arithmetic:
//
//   pusher (1)      tile 0 | tile 1 | tile 2 | tile 3 | ...      bulk copies to the peers,
//                                 └ announce └ announce ...      told of a few at a time
//   watcher (1)     tiles 0..2 of all peers are here | 0..4 | ...
//   combiners (14)    tile 0, of all ranks in rank order | tile 2 | ...
//                     tile 1                             | tile 3 | ...
//
// One watcher, because every warp that polls for itself hammers the same few lines of the L2. Tiles
// are announced together, because a release waits for all that its SM has written: 3 us or so, by
// what announcing every tile costs.
//
// Rows that bulk copies cannot take are stored by all threads, and combined when all are there.
//
// By push and not by pull: stores keep the link's speed in both directions, loads lose a tenth.
//
// Entry: as every push. Exit: a block has waited for every tile that a peer's block pushes to it,
// so with the last block all writes to this rank's scratch are complete. Two shots also write into
// the peers' results, and leave as every push does.
//
// Progress: the pusher waits for nobody; the watcher waits for the peers' blocks of its own index,
// the combiners for the watcher. Blocks start in order on every GPU, so the first resident ones
// always meet. For the same reason all ranks must run the same grid; it is checked at entry.
#pragma once

#include "mechanism/register.cuh"
#include "mechanism/tma.cuh"
#include "schedule/reduce_args.h"
#include "schedule/rendezvous.cuh"

namespace pk::reduce {

inline constexpr int kThreads = 512;
enum Warp : uint32_t { kPusher, kWatcher, kFirstCombiner };
inline constexpr uint32_t kGroups = 2;  // of combiners, each at a tile of its own
inline constexpr uint32_t kGroupThreads = (kThreads - 32 * kFirstCombiner) / kGroups;
// Long enough for the pusher, who takes 1.5 us a tile whatever its size; short, for what comes last
// is combined after the link has gone quiet. A group combines one in two passes of two vectors.
inline constexpr int kVectors = 2;
inline constexpr uint32_t kMostTileBytes = 2 * kVectors * 16 * kGroupThreads;
inline constexpr uint32_t kLeastTileBytes = 4 << 10;
inline constexpr uint32_t kTilesAnnounced = 8;
using Ring = tma::Ring<8, kMostTileBytes>;

// The tile as far as rank's part goes: by two shots the last parts may be cut short.
__device__ __forceinline__ RowTile clipped(const ReduceArgs& args, RowTile tile, int rank) {
  if (args.algorithm != Algorithm::kTwoShot) return tile;
  const int64_t left = args.bytes - (rank * args.inner + tile.col);
  tile.num_cols = left <= 0 ? 0 : static_cast<uint32_t>(min(left, int64_t{tile.num_cols}));
  return tile;
}

// This block's share of a part.
struct Share {
  RowTiles tiles;
  uint32_t count;

  __device__ __forceinline__ RowTile tile(uint32_t i) const {
    return tiles.tile(blockIdx.x + static_cast<int64_t>(i) * gridDim.x);
  }
};

// The move of a tile: to one peer, or to all if they get the same. Bulk copies take whole 16 bytes:
// what a part lacks to that lies in the line of its last element, for it starts on one.
__device__ __forceinline__ Move move_of(const CommView& comm, const ReduceArgs& args,
                                        const RowTile& tile, int step) {
  const int peer = (comm.rank + 1 + step) % comm.num_ranks;
  if (args.algorithm == Algorithm::kOneShot) {
    RowTile whole = tile;
    whole.num_cols = (tile.num_cols + 15) / 16 * 16;
    return {{args.source, args.from, 0}, whole, peer, comm.num_ranks - 1};
  }
  RowTile part = clipped(args, tile, peer);
  part.num_cols = (part.num_cols + 15) / 16 * 16;
  return {{args.source, args.from, peer}, part, peer, 1};
}

// Tells peers that `count` more tiles of this block are in their scratch. One warp.
__device__ __forceinline__ void announce(const CommView& comm, const ReduceArgs& args,
                                         int first_rank, int num_peers, uint32_t count) {
  for (int k = threadIdx.x % 32; k < num_peers; k += 32) {
    const int peer = (first_rank + k) % comm.num_ranks;
    // Release of the tiles, which have arrived; pairs with the acquire in the peer's watch().
    ptx::red_add_release_sys(
        &signal_page(comm, peer).channels[args.channel].staged[comm.rank][blockIdx.x], count);
  }
}

// How many tiles to announce when tile `i` of `count` has arrived: all since the last time, every
// kTilesAnnounced tiles and at the end. Blocks take turns: announcing stops the pushes of an SM for
// some microseconds, and if all stopped together the link would.
__device__ __forceinline__ uint32_t due(uint32_t i, uint32_t count) {
  const uint32_t place = (i + blockIdx.x) % kTilesAnnounced;
  return place == kTilesAnnounced - 1 || i == count - 1 ? min(place, i) + 1 : 0;
}

__device__ __forceinline__ void push(const CommView& comm, const ReduceArgs& args,
                                     const Guests& guests, const Share& share, Ring& ring) {
  const PeerTensor scratch{guests.address[0], comm.num_ranks, PartLayout::packed(args.inner), 0};
  const uint32_t steps = args.algorithm == Algorithm::kOneShot ? 1 : comm.num_ranks - 1;
  tma::store_tiles(
      ring, scratch,
      [&](int64_t i) {
        const uint32_t tile = static_cast<uint32_t>(i) / steps;
        return move_of(comm, args, share.tile(tile), static_cast<uint32_t>(i) - tile * steps);
      },
      0, 1, static_cast<int64_t>(share.count) * steps, [] { ptx::fence_proxy_async(); },
      [&](int64_t i, const Move& move) {
        ptx::fence_proxy_async();
        __syncwarp();
        const uint32_t tiles = due(static_cast<uint32_t>(i) / steps, share.count);
        if (tiles > 0) announce(comm, args, move.first_rank, move.count, tiles);
      });
}

// Keeps `ready` at the number of tiles that all peers have announced.
__device__ __forceinline__ void watch(const Waiter& waiter, const Share& share, uint32_t* ready) {
  const CommView& comm = waiter.comm;
  const Channel& channel = channel_of(waiter);
  const uint32_t before = channel.staged_before[blockIdx.x];
  for (uint32_t done = 0; done < share.count;) {
    uint32_t least = share.count;
    for (int peer = threadIdx.x % 32; peer < comm.num_ranks; peer += 32) {
      if (peer == comm.rank) continue;
      const uint32_t* counter = &channel.staged[peer][blockIdx.x];
      uint32_t tiles = 0;
      wait_until(waiter, Slot::kStaged, peer, before + done + 1, [&](uint32_t& seen) {
        seen = ptx::ld_acquire_sys(counter);
        tiles = seen - before;
        return static_cast<int32_t>(tiles - done) > 0;
      });
      least = min(least, tiles);
    }
    done = __reduce_min_sync(~0u, least);
    __syncwarp();  // for memory: the reduction orders nothing
    // Passes on what the lanes have acquired; pairs with the acquire in combine().
    if (threadIdx.x % 32 == 0) ptx::st_release_cta(ready, done);
  }
}

// All threads: every tile, by elements.
template <typename T>
__device__ __forceinline__ void push_elements(const CommView& comm, const ReduceArgs& args,
                                              const Guests& guests, const Share& share) {
  const PeerTensor scratch{guests.address[0], comm.num_ranks, PartLayout::packed(args.inner), 0};
  for (uint32_t i = 0; i < share.count; ++i) {
    for (int k = 1; k < comm.num_ranks; ++k) {
      const int peer = (comm.rank + k) % comm.num_ranks;
      reg::store_tile<T>(scratch, {{args.source, args.from, peer}, share.tile(i), peer, 1});
    }
  }
  __syncthreads();
  if (threadIdx.x / 32 == kPusher)
    announce(comm, args, (comm.rank + 1) % comm.num_ranks, comm.num_ranks - 1, share.count);
}

}  // namespace pk::reduce

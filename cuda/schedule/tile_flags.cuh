// Flags between ranks, one for each piece of the data that a call puts into a peer's memory: the
// peer need not wait for all of it to use some of it.
//
//   rank 0   bulk stores of piece f ── announce(1, f) ──┐
//   rank 1                                              └── wait(0, f) ── TMA loads of piece f
//
// A flag is a word in the owner's signal page that holds the last epoch in which it was raised. So
// nobody clears it, a captured graph may replay the call, and calls that cut their data differently
// share the words. A wait is for this epoch and no other: a flag that has not been raised for 2^31
// calls would be ahead by distance, and none is raised in the next call before all waits in this
// one are over, for the peer must be invited first. Which piece has which flag is the op's
// business, the same on both sides.
#pragma once

#include "tile/comm_view.h"
#include "tile/signal.cuh"

namespace pk {

struct TileFlags {
  const Waiter& waiter;
  uint32_t epoch;  // of the call under way

  // One thread: `flag` < tile_flags(num_ranks) of this rank, at `peer`. The piece has arrived: its
  // bulk stores are waited for in full, not `.read`, and a fence.proxy.async has followed; or other
  // lanes' stores are gathered by a __syncwarp.
  __device__ __forceinline__ void announce(int peer, int flag) const {
    // Release of the piece; pairs with the acquire in the peer's wait() or wait_now().
    ptx::st_release_sys(word(peer, waiter.comm.rank, flag), epoch);
  }

  // One thread: until `peer` has raised its `flag` here. Then this thread may read the piece, with
  // TMA or without, and so may one that acquires what this one releases.
  __device__ __forceinline__ void wait(int peer, int flag) const {
    poll<kPatient>(peer, flag);
    // Between the acquire, of the generic proxy, and what TMA reads through the other one.
    ptx::fence_proxy_async();
  }

  // The same without a pause, for whoever has nothing else to do, and reads without TMA.
  __device__ __forceinline__ void wait_now(int peer, int flag) const { poll(peer, flag); }

 private:
  template <uint32_t kPauseNs = 0>
  __device__ __forceinline__ void poll(int peer, int flag) const {
    const uint32_t* mine = word(waiter.comm.rank, peer, flag);
    wait_until<kPauseNs>(waiter, Slot::kTileFlag, peer, epoch, [&](uint32_t& seen) {
      seen = ptx::ld_acquire_sys(mine);
      return seen == epoch;
    });
  }

  __device__ __forceinline__ uint32_t* word(int owner, int source, int flag) const {
    const CommView& comm = waiter.comm;
    return &signal_page(comm, owner)
                .channels[waiter.channel]
                .tile_flag[source * tile_flags(comm.num_ranks) + flag];
  }
};

}  // namespace pk

// Entry and exit of an op that writes into peers' buffers directly.
//
//   rank 0   invite ──┐  ┌── wait ── move ── each block: announce ──┐  ┌── last block: wait
//                     ╳                                             ╳
//   rank 1   invite ──┘  └── wait ── move ── each block: announce ──┘  └── last block: wait
//
// Entry: nothing is written into a peer's buffer before the peer has invited it in this epoch: the
// peer's stream has then reached the op, and all its earlier work on that buffer is done. Exit: the
// op ends only when every block of every peer has announced that its writes to this rank are
// complete; XLA may reuse the buffer the moment the stream passes. Blocks other than the last leave
// early and free their SMs.
//
// Progress: every block invites (the same words, so order does not matter) before it waits, and
// none waits for another block of its own rank. One resident block a rank is enough.
#pragma once

#include "tile/published.h"
#include "tile/signal.cuh"

namespace pk {

// What a rank tells its peers about a buffer: where it is, as an offset in its published space (its
// exported heap, or plain memory with heap base 0), and with how many blocks it will write to
// theirs.
struct Invitation {
  uint64_t word;

  __device__ __forceinline__ Invitation(uint64_t offset, uint32_t num_blocks)
      : word(static_cast<uint64_t>(num_blocks) << kOffsetBits | offset) {}
  __device__ __forceinline__ explicit Invitation(uint64_t word_) : word(word_) {}
  __device__ __forceinline__ uint64_t offset() const { return word & ((1ull << kOffsetBits) - 1); }
  __device__ __forceinline__ uint32_t num_blocks() const {
    return static_cast<uint32_t>(word >> kOffsetBits);
  }
};

// Who goes through entry and exit for a block: all its threads, or one warp that has all of its
// writes to peers, and that others need not wait for.
struct WholeBlock {
  static __device__ __forceinline__ int index() { return threadIdx.x; }
  static __device__ __forceinline__ int size() { return blockDim.x; }
  static __device__ __forceinline__ void sync() { __syncthreads(); }
  static __device__ __forceinline__ bool any(bool mine) { return __syncthreads_or(mine); }
};
struct OneWarp {
  static __device__ __forceinline__ int index() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int size() { return 32; }
  static __device__ __forceinline__ void sync() { __syncwarp(); }
  static __device__ __forceinline__ bool any(bool mine) {
    const bool found = __any_sync(0xFFFFFFFF, mine);
    __syncwarp();  // for memory: the vote orders nothing
    return found;
  }
};

__device__ __forceinline__ Channel& channel_of(const Waiter& waiter) {
  return signal_page(waiter.comm, waiter.comm.rank).channels[waiter.channel];
}

// The epoch of the call under way, for any thread of a block that has not yet called end_block.
__device__ __forceinline__ uint32_t this_epoch(const Channel& channel) {
  return ptx::ld_relaxed_gpu(&channel.epoch[blockIdx.x]) + 1;
}

// The team of every block, as the last thing on the channel: the next call may begin when this
// one's kernel has ended.
template <typename Team = WholeBlock>
__device__ __forceinline__ void end_block(Channel& channel, uint32_t epoch) {
  Team::sync();  // every thread has read its epoch
  if (Team::index() == 0) channel.epoch[blockIdx.x] = epoch;
  if (blockIdx.x == 0) {
    for (int block = gridDim.x + Team::index(); block < kMaxBlocks; block += Team::size())
      channel.epoch[block] = epoch;
  }
}

// A call's view of its group, of no more than kRanks, after entry; in shared memory.
template <int kRanks>
struct GuestsUpTo {
  char* address[kPublished][kRanks];  // [buffer]: each rank's, seen from here
  uint32_t num_blocks[kRanks];
};
using Guests = GuestsUpTo<kMaxRanks>;

struct EveryPeer {
  __device__ __forceinline__ bool operator()(int /*peer*/) const { return true; }
};

// The team: tells the peers where `mine` are.
template <typename Team = WholeBlock, int kCount>
__device__ __forceinline__ void invite(const Waiter& waiter, const Published (&mine)[kCount],
                                       uint32_t epoch) {
  static_assert(kCount <= kPublished);
  const CommView& comm = waiter.comm;
  const uint64_t tag = static_cast<uint64_t>(epoch) << 32;
#pragma unroll 1
  for (int peer = Team::index(); peer < comm.num_ranks; peer += Team::size()) {
    if (peer == comm.rank) continue;
    ulonglong2* box = signal_page(comm, peer).channels[waiter.channel].invitation[comm.rank];
#pragma unroll
    for (int b = 0; b < kCount; ++b) {
      // Each half carries its epoch, so the words need no release between them; they pair with the
      // poll in wait_invitation() on the peer. What they say ("my earlier kernels are done with
      // this buffer") was made true by stream order before this kernel began.
      const Invitation invitation(mine[b].offset, gridDim.x);
      ptx::st_relaxed_sys(&box[b], ulonglong2{tag | (invitation.word & 0xffffffffu),
                                              tag | (invitation.word >> 32)});
    }
  }
}

// One thread: the peer's invitation to its buffer `b` in this epoch.
__device__ __forceinline__ Invitation wait_invitation(const Waiter& waiter, int peer, int b,
                                                      uint32_t epoch) {
  const ulonglong2* box = &channel_of(waiter).invitation[peer][b];
  ulonglong2 halves;
  wait_until(waiter, Slot::kInvitation, peer, epoch, [&](uint32_t& seen) {
    halves = ptx::ld_acquire_sys(box);
    seen = static_cast<uint32_t>(halves.x >> 32);
    return seen == epoch && static_cast<uint32_t>(halves.y >> 32) == epoch;
  });
  return Invitation((halves.y << 32) | (halves.x & 0xffffffffu));
}

// Where the buffer of an invitation is, seen from here.
__device__ __forceinline__ char* address_of(const Waiter& waiter, int peer,
                                            const Invitation& invitation) {
  const SignalPage& page = signal_page(waiter.comm, waiter.comm.rank);
  return reinterpret_cast<char*>(page.heap_base[peer] + invitation.offset());
}

// The team of every block. Invites the peers to `mine`, waits for theirs; returns the epoch of this
// call. All ranks publish the same number of buffers. Of a peer that may end the call without
// having heard from this block, the block must not wait for the invitation: the next one might
// stand in its place. Where there are such peers `expects` names the others.
template <typename Team = WholeBlock, int kCount, int kRanks, typename Expects = EveryPeer>
__device__ __forceinline__ uint32_t enter(const Waiter& waiter, const Published (&mine)[kCount],
                                          GuestsUpTo<kRanks>& guests, Expects expects = {}) {
  const CommView& comm = waiter.comm;
  const uint32_t epoch = this_epoch(channel_of(waiter));
  invite<Team>(waiter, mine, epoch);
#pragma unroll 1
  for (int peer = Team::index(); peer < comm.num_ranks; peer += Team::size()) {
    if (peer == comm.rank) {
#pragma unroll
      for (int b = 0; b < kCount; ++b) guests.address[b][peer] = mine[b].address;
      continue;
    }
    if (!expects(peer)) continue;
#pragma unroll 1
    for (int b = 0; b < kCount; ++b) {
      const Invitation theirs = wait_invitation(waiter, peer, b, epoch);
      guests.address[b][peer] = address_of(waiter, peer, theirs);
      guests.num_blocks[peer] = theirs.num_blocks();
    }
  }
  Team::sync();
  return epoch;
}

// The team: stops the op if a peer runs another grid, for ops whose blocks wait for those of the
// same number. `expects` as for enter().
template <typename Team = WholeBlock, int kRanks, typename Expects = EveryPeer>
__device__ __forceinline__ void check_grids(const Waiter& waiter, const GuestsUpTo<kRanks>& guests,
                                            Expects expects = {}) {
  const CommView& comm = waiter.comm;
#pragma unroll 1
  for (int peer = Team::index(); peer < comm.num_ranks; peer += Team::size()) {
    if (peer == comm.rank || !expects(peer) || guests.num_blocks[peer] == gridDim.x) continue;
    fail(comm.error, {1, 0, waiter.op, Slot::kGrid, comm.rank, comm.num_ranks, peer, waiter.channel,
                      gridDim.x, guests.num_blocks[peer], 0});
  }
}

// The team of every block, when the block's writes to peers are complete (bulk stores waited for in
// full): the exit described above.
template <typename Team = WholeBlock, int kRanks>
__device__ __forceinline__ void leave(const Waiter& waiter, uint32_t epoch,
                                      const GuestsUpTo<kRanks>& guests) {
  const CommView& comm = waiter.comm;
  Channel& channel = channel_of(waiter);
  Team::sync();
#pragma unroll 1
  for (int peer = Team::index(); peer < comm.num_ranks; peer += Team::size()) {
    if (peer == comm.rank) continue;
    // Release of this block's writes to the peer (gathered by the barrier above); pairs with the
    // peer's acquire in the wait below.
    ptx::red_add_release_sys(&signal_page(comm, peer).channels[waiter.channel].left[comm.rank], 1);
  }
  // The count elects the block that waits; it orders nothing.
  if (Team::any(Team::index() == 0 &&
                ptx::atom_add_relaxed_gpu(&channel.ended, 1) == gridDim.x - 1)) {
#pragma unroll 1
    for (int peer = Team::index(); peer < comm.num_ranks; peer += Team::size()) {
      if (peer == comm.rank) continue;
      const uint32_t expected = channel.left_before[peer] + guests.num_blocks[peer];
      wait_signal(waiter, Slot::kLeave, peer, &channel.left[peer], expected);
      channel.left_before[peer] = expected;
    }
    if (Team::index() == 0) channel.ended = 0;
  }
  end_block<Team>(channel, epoch);
}

}  // namespace pk

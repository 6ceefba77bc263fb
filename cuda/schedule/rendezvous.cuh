// Entry and exit of an op that touches peers' buffers directly.
//
//   rank 0   begin: publish address ──┐   ┌── wait for addresses ── move ── last block: announce ──┐  ┌── wait ── end
//                                     ╳                                                              ╳
//   rank 1   begin: publish address ──┘   └── wait for addresses ── move ── last block: announce ──┘  └── wait ── end
//
// Entry: nothing is written into a peer's buffer before the peer has published it in this epoch: the stream of the peer has then
// reached the op, and all its earlier work on that buffer is done.
// Exit: the op ends only when every peer has announced that it is done with this rank's buffers; XLA may reuse them the moment the
// stream passes. Blocks other than the last leave early and free their SMs.
//
// Progress: the block with ticket 0 is by definition resident; it publishes before anything waits, and no block waits for another block
// of its own rank. One resident block a rank is enough.
#pragma once

#include "tile/signal.cuh"

namespace pk {

// An address as an offset in the owner's published space: its exported heap, or plain memory (heap_base 0) in one process.
struct Published {
  uint64_t offset;
};

// All threads of every block. Fills `address` (shared memory, [num_ranks]) with where each rank's buffer is seen from here.
// Returns the epoch of this call.
__device__ __forceinline__ uint32_t enter(const Waiter& waiter, Published mine, char* own, char** address) {
  const CommView& comm = waiter.comm;
  SignalPage& page = signal_page(comm, comm.rank);
  Channel& channel = page.channels[waiter.channel];
  __shared__ uint32_t ticket;
  if (threadIdx.x == 0) ticket = ptx::atom_add_relaxed_gpu(&channel.begun, 1);
  const uint32_t epoch = ptx::ld_relaxed_gpu(&channel.epoch) + 1;
  const uint64_t tag = static_cast<uint64_t>(epoch) << 32;
  __syncthreads();
  for (int peer = threadIdx.x; peer < comm.num_ranks; peer += blockDim.x) {
    if (peer == comm.rank) {
      address[peer] = own;
      continue;
    }
    if (ticket == 0) {
      // Each half carries its epoch, so the pair needs no release between them: it pairs with the poll below on the peer. What it says
      // ("my earlier kernels are done with this buffer") was made true by stream order before this kernel began.
      uint64_t* box = signal_page(comm, peer).channels[waiter.channel].address[comm.rank];
      ptx::st_relaxed_sys(&box[0], tag | (mine.offset & 0xffffffffu));
      ptx::st_relaxed_sys(&box[1], tag | (mine.offset >> 32));
    }
    const uint64_t* box = channel.address[peer];
    uint64_t low, high;
    wait_until(waiter, Slot::kAddress, peer, epoch, [&](uint32_t& seen) {
      low = ptx::ld_relaxed_sys(&box[0]);
      high = ptx::ld_relaxed_sys(&box[1]);
      seen = static_cast<uint32_t>(low >> 32);
      return seen == epoch && static_cast<uint32_t>(high >> 32) == epoch;
    });
    address[peer] = reinterpret_cast<char*>(page.heap_base[peer] + ((high << 32) | (low & 0xffffffffu)));
  }
  // The poll was relaxed: order it before the accesses to the peers' buffers that follow it in this block.
  if (threadIdx.x < comm.num_ranks) ptx::fence_acq_rel_sys();
  __syncthreads();
  return epoch;
}

// All threads of a block, when the block has done its last access to a peer's buffer and that access is complete (bulk stores waited for in
// full). True in the last block of this rank.
__device__ __forceinline__ bool last_block(Channel& channel) {
  __shared__ uint32_t ended;
  __syncthreads();
  // Release of this block's writes (gathered by the barrier above); acquired by the last block's own add, which releases them on.
  if (threadIdx.x == 0) ended = ptx::atom_add_acq_rel_sys(&channel.ended, 1);
  __syncthreads();
  return ended == gridDim.x - 1;
}

// The same for a block whose writes nobody waits for by a flag: no fence.
__device__ __forceinline__ bool last_block_local(Channel& channel) {
  __shared__ uint32_t ended;
  __syncthreads();
  if (threadIdx.x == 0) ended = ptx::atom_add_relaxed_gpu(&channel.ended, 1);
  __syncthreads();
  return ended == gridDim.x - 1;
}

// The last block, when nothing of this call is left to do on this rank: the next call on the channel may begin.
__device__ __forceinline__ void end_call(Channel& channel, uint32_t epoch) {
  if (threadIdx.x == 0) {
    channel.begun = 0;
    channel.ended = 0;
    channel.epoch = epoch;
  }
}

// All threads of every block: the exit described above.
__device__ __forceinline__ void leave(const Waiter& waiter, uint32_t epoch) {
  const CommView& comm = waiter.comm;
  Channel& channel = signal_page(comm, comm.rank).channels[waiter.channel];
  if (!last_block(channel)) return;
  for (int peer = threadIdx.x; peer < comm.num_ranks; peer += blockDim.x) {
    if (peer == comm.rank) continue;
    // Release: everything this rank wrote to the peer; pairs with the peer's acquire in the wait below.
    ptx::st_release_sys(&signal_page(comm, peer).channels[waiter.channel].left[comm.rank], epoch);
  }
  for (int peer = threadIdx.x; peer < comm.num_ranks; peer += blockDim.x) {
    if (peer != comm.rank) wait_signal(waiter, Slot::kLeave, peer, &channel.left[peer], epoch);
  }
  __syncthreads();
  end_call(channel, epoch);
}

}  // namespace pk

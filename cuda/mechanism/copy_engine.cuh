// The receiving side of the copy-engine mechanism: a kernel of exactly kDrainBlocks blocks empties
// the landing buffer.
#pragma once

#include "mechanism/copy_engine.h"
#include "tile/signal.cuh"

namespace pk {

// All threads of a block: chunk `chunk` of this call from `peer` has landed in this rank's landing
// buffer.
__device__ __forceinline__ void wait_landed(const Waiter& waiter, int peer, uint32_t first_chunk,
                                            int64_t chunk) {
  const CommView& comm = waiter.comm;
  const Channel& channel = signal_page(comm, comm.rank).channels[waiter.channel];
  if (threadIdx.x == 0) {
    wait_signal(waiter, Slot::kLanded, peer, &channel.landed[peer][chunk % kLandingSlots],
                first_chunk + static_cast<uint32_t>(chunk) + 1);
  }
  __syncthreads();
}

// All threads of a block: this block has read its share of the chunk and will not look again.
__device__ __forceinline__ void report_taken(const Waiter& waiter, int peer, int64_t chunk) {
  const CommView& comm = waiter.comm;
  __syncthreads();
  if (threadIdx.x == 0) {
    // Release of the block's reads; pairs with the acquire in await_credit on the peer
    // (copy_engine.cu).
    auto& taken = signal_page(comm, peer).channels[waiter.channel].taken[comm.rank];
    ptx::red_add_release_sys(&taken[chunk % kLandingSlots], 1);
  }
}

}  // namespace pk

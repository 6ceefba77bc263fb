// The receiving side of the copy-engine mechanism: what a kernel that empties the landing buffer
// needs.
#pragma once

#include "mechanism/copy_engine.h"
#include "tile/signal.cuh"

namespace pk {

// All threads of a block: chunk `chunk` of this call from `peer` has landed in this rank's landing
// buffer. `before`: rounds of the ring before this call.
__device__ __forceinline__ void wait_landed(const Waiter& waiter, int peer, uint32_t before,
                                            int64_t chunk) {
  const CommView& comm = waiter.comm;
  const Channel& channel = signal_page(comm, comm.rank).channels[waiter.channel];
  if (threadIdx.x == 0) {
    wait_signal(waiter, Slot::kLanded, peer, &channel.landed[peer][chunk % kLandingSlots],
                before + static_cast<uint32_t>(chunk / kLandingSlots) + 1);
  }
  __syncthreads();
}

// All threads of a block: this block has moved one of the `num_stripes` parts of the chunk out. The
// block that moves the last one gives the slot back.
__device__ __forceinline__ void report_stripe(const Waiter& waiter, int peer, int64_t chunk,
                                              uint32_t num_stripes) {
  const CommView& comm = waiter.comm;
  const int slot = chunk % kLandingSlots;
  __syncthreads();
  if (threadIdx.x != 0) return;
  // Release of this block's reads; acquired by the last block's own add, which releases them on.
  uint32_t& emptied = signal_page(comm, comm.rank).channels[waiter.channel].emptied[peer][slot];
  if (ptx::atom_add_acq_rel_gpu(&emptied, 1) + 1 != num_stripes) return;
  emptied = 0;  // nobody looks again before the slot's next chunk has landed
  // Release of all reads of the slot; pairs with the acquire in await_credit (copy_engine.cu).
  ptx::red_add_release_sys(&signal_page(comm, peer).channels[waiter.channel].taken[comm.rank][slot],
                           1);
}

}  // namespace pk

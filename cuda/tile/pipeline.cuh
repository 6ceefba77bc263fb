// A ring of stages between one producing thread and the warps, or warpgroups, that consume.
//
//   full[s]   the bytes of stage s are there: completed by bulk copies, waited for by consumers
//   empty[s]  all consumers are done with stage s: arrived at by each, waited for by the producer
//
// The waits have no limit: what they wait for is this SM's own copies and warps, and never a peer.
// Whoever waits for a peer does so before the copies are issued. (In attention_backward.cuh they
// wait for copiers that wait for other blocks of this GPU, too; it says why that ends.)
//
// Both sides walk the stages in order with a cursor of their own, across tiles, so neither side
// ever resets anything.
#pragma once

#include <cstdint>

#include "tile/ptx_tensor.cuh"

namespace pk {

// Until the phase of an mbarrier that has this parity is over.
__device__ __forceinline__ void wait_phase(uint64_t* barrier, uint32_t parity) {
  while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {
  }
}

template <int kStages>
struct Cursor {
  uint32_t stage = 0;
  uint32_t round = 0;  // its lowest bit is the parity to wait for

  // After `count` stages: one register instead of two, for few stages.
  static __device__ __forceinline__ Cursor after(uint32_t count) {
    return {count % kStages, count / kStages};
  }

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      ++round;
    }
  }
};

template <int kStages>
struct Pipeline {
  uint64_t full[kStages];
  uint64_t empty[kStages];

  // One thread, before the block meets.
  __device__ void init(uint32_t num_consumers) {
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(&full[s], 1);
      ptx::mbarrier_init(&empty[s], num_consumers);
    }
    ptx::fence_mbarrier_init();
  }

  // Producer: until the stage may be filled.
  __device__ __forceinline__ void wait_empty(const Cursor<kStages>& at) {
    // In the first round nobody has used the stages: a wait for the phase before the first returns.
    wait_phase(&empty[at.stage], (at.round & 1) ^ 1);
  }

  // Producer, one thread: the barrier of copies into the stage, `bytes` in all. Release: pairs with
  // wait_full().
  __device__ __forceinline__ uint64_t* expect(const Cursor<kStages>& at, uint32_t bytes) {
    ptx::mbarrier_arrive_expect_tx(&full[at.stage], bytes);
    return &full[at.stage];
  }

  // The same for a stage that is filled by stores to shared memory, all of them done.
  __device__ __forceinline__ void fill(uint32_t stage) { ptx::mbarrier_arrive(&full[stage]); }

  __device__ __forceinline__ void wait_full(const Cursor<kStages>& at) {
    wait_phase(&full[at.stage], at.round & 1);
  }

  // One thread of each consumer, when its reads of the stage are complete (wgmma_wait_group), which
  // is all that wait_empty() waits for.
  __device__ __forceinline__ void release(uint32_t stage) { ptx::mbarrier_arrive(&empty[stage]); }
};

}  // namespace pk

// What one warp of a block finds out for all: what comes next. The walk is followed once, where
// there are registers for it, and the other warps read in shared memory what they have to know.
#pragma once

#include <cstdint>

#include "tile/pipeline.cuh"

namespace pk {

template <typename Entry, int kSlots>
struct Bulletin {
  Pipeline<kSlots> pipeline;
  Entry entries[kSlots];

  // One thread, before the block meets.
  __device__ void init(uint32_t num_readers) { pipeline.init(num_readers); }

  // The warp that writes: entry `number`, from 0 on.
  __device__ __forceinline__ void write(uint32_t number, const Entry& entry) {
    const auto at = Cursor<kSlots>::after(number);
    pipeline.wait_empty(at);
    if (threadIdx.x % 32 == 0) {
      entries[at.stage] = entry;
      pipeline.fill(at.stage);  // release of the entry; pairs with the wait in read()
    }
    __syncwarp();
  }

  // Each of the warps that read, in the order of the entries.
  __device__ __forceinline__ Entry read(uint32_t number) {
    const auto at = Cursor<kSlots>::after(number);
    pipeline.wait_full(at);
    const Entry entry = entries[at.stage];
    __syncwarp();
    if (threadIdx.x % 32 == 0) pipeline.release(at.stage);
    return entry;
  }
};

}  // namespace pk

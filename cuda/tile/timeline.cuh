// Marks in kernels for a timeline of them: what each warp did, and when. benchmarks/timeline.py
// draws it; docs/benchmarks.md says how to build a library that records.
//
//   warp       start()            lap(kWaitOperands)  lap(kMultiply, tile)   lap(kEpilogue)
//   records       |  wait for operands  |       multiply      |   epilogue   |
//
// A lap is what was done since the last one of the same warp, so that nothing is kept in registers
// between the two, no time up to a warp's last lap is left out, and none counts twice. Work that
// the tensor cores or the TMA do beside is seen by when it is waited for.
//
// Unless PK_JAX_TIMELINE is defined both words are empty, and the kernels have the same
// instructions as without them. With it a lap takes a shared atomic, a read of the clock and a
// 16-byte store that nothing waits for.
#pragma once

#include <cstdint>

#include "tile/ptx.cuh"
#include "tile/timeline.h"

namespace pk::timeline {

#ifdef PK_JAX_TIMELINE
static __device__ Buffer* buffer = nullptr;  // null: nothing is recorded

namespace {
const struct Known {
  Known() { pointers().push_back(&buffer); }
} known;
}  // namespace

// Of a block, in shared memory.
struct State {
  Block* block;
  uint64_t began;
  uint32_t used;
};
__device__ __forceinline__ State& state() {
  __shared__ State mine;
  return mine;
}
#endif

// The id of a tile: column `n` of row `m` of tiles.
__device__ __forceinline__ uint32_t tile(int m, int n) {
  return static_cast<uint32_t>(m) << 16 | static_cast<uint32_t>(n);
}

// One thread of a block, before the block meets for the first time.
__device__ __forceinline__ void start() {
#ifdef PK_JAX_TIMELINE
  State& mine = state();
  mine = {nullptr, ptx::globaltimer_ns(), 0};
  if (buffer == nullptr) return;
  const uint32_t number = ptx::atom_add_relaxed_gpu(&buffer->begun, 1);
  if (number >= kMostBlocks) return;
  mine.block = &buffer->blocks[number];
  mine.block->sm = ptx::sm_id();
  mine.block->block = blockIdx.x;
  mine.block->grid = gridDim.x;
  mine.block->began = mine.began;
#endif
}

// One thread, for its warp: what the warp has done since its last lap, or since start().
__device__ __forceinline__ void lap(Did did, uint32_t id = kNoId, int peer = kNobody,
                                    uint32_t bytes = 0) {
#ifdef PK_JAX_TIMELINE
  State& mine = state();
  if (mine.block == nullptr) return;
  const auto ns = static_cast<uint32_t>(ptx::globaltimer_ns() - mine.began);
  const uint32_t at = atomicAdd(&mine.used, 1u);
  if (at < kMostEvents) {
    mine.block->events[at] = {
        ns, id, bytes, did, static_cast<uint8_t>(threadIdx.x / 32), static_cast<uint8_t>(peer), 0};
  } else {
    ptx::atom_add_relaxed_gpu(&mine.block->dropped, 1);
  }
#endif
}

}  // namespace pk::timeline

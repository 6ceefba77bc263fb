// Who does what inside a thread block: warpgroups that compute, and one whose warps move data.
//
//   warpgroups 0 .. kConsumers - 1   op.consume(warpgroup)   tensor cores, and the epilogue
//   last warpgroup, warp 0           op.load()               global or peer memory -> shared
//                   warp 1           op.communicate()        what goes between GPUs, or plans for
//                   the loader warps 2 and 3    op.copy(0), op.copy(1)  shared -> global or peer,
//                   if not the
//                                                            consumers do that; or what else there
//                                                            is to be copied
//
// Registers go from the movers, who need few, to the consumers, whose accumulators fill them.
#pragma once

#include <cstdint>

#include "tile/ptx_tensor.cuh"

namespace pk {

// Of the threads of a consumer, for what one of them does for all.
__device__ __forceinline__ bool is_first_thread() { return threadIdx.x % 128 == 0; }

// The threads of one consumer alone.
__device__ __forceinline__ void sync_consumer(int consumer) {
  ptx::named_barrier_sync(1 + consumer, 128);
}

// One warp: the next number, counted by all blocks from zero on.
__device__ __forceinline__ int take_ticket(uint32_t* tickets) {
  int number = 0;
  if (threadIdx.x % 32 == 0) number = static_cast<int>(ptx::atom_add_relaxed_gpu(tickets, 1));
  return __shfl_sync(0xFFFFFFFF, number, 0);
}

// kMoverRegisters: what each mover keeps.
template <int kNumConsumers, int kMoverRegisters = 40>
struct Roles {
  static constexpr int kConsumers = kNumConsumers;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static constexpr int kRegisterFile = 65536;
  // For __launch_bounds__: from it follow the registers at launch. One consumer needs no more than
  // half of the file.
  static constexpr int kMinBlocks = kConsumers == 1 ? 2 : 1;
  static constexpr int kAtLaunch = kRegisterFile / kMinBlocks / kThreads / 8 * 8;
  static constexpr int kMover = kMoverRegisters;
  // All that is left: one step more would wait for ever for registers that do not exist. One
  // consumer takes what it has a use for.
  static constexpr int kLeft = ((kConsumers + 1) * kAtLaunch - kMover) / kConsumers / 8 * 8;
  static constexpr int kConsumer = kConsumers == 1 ? 160 : kLeft;
  static_assert(kMover + kConsumers * kConsumer <= (kConsumers + 1) * kAtLaunch);
  static_assert(kMover <= kAtLaunch && kAtLaunch <= kConsumer);

  // Consumers that issue their products in turns, 0 first: each takes its turn as often as the
  // others. Barriers 1 .. kConsumers are those of sync_consumer().
  static __device__ __forceinline__ void take_turn(int consumer) {
    ptx::named_barrier_sync(1 + kConsumers + consumer, 256);
  }
  static __device__ __forceinline__ void pass_turn(int consumer) {
    const int next = consumer + 1 == kConsumers ? 0 : consumer + 1;
    ptx::named_barrier_arrive(1 + kConsumers + next, 256);
  }
  static __device__ __forceinline__ void begin_turns(int consumer) {
    if (consumer == kConsumers - 1) pass_turn(consumer);
  }
  // Takes the turn that the last one passed to nobody.
  static __device__ __forceinline__ void end_turns(int consumer) {
    if (consumer == 0) take_turn(consumer);
  }

  template <typename Op>
  static __device__ __forceinline__ void run(Op& op) {
    // From lane 0, so that the compiler knows that a warp stays together, and may compute once for
    // all its lanes: without it there are loops around the copies.
    const int warp_of_block = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32, 0);
    const int warpgroup = warp_of_block / 4;
    if (warpgroup < kConsumers) {
      ptx::setmaxnreg_inc<kConsumer>();
      op.consume(warpgroup);
      return;
    }
    ptx::setmaxnreg_dec<kMover>();
    const int warp = warp_of_block % 4;
    // With few registers each returns, so that the number of the warp is not kept meanwhile.
    constexpr bool kReturns = kMover < 40;
    if (warp == 0) {
      op.load();
      if constexpr (kReturns) return;
    }
    if constexpr (requires { op.communicate(); }) {
      if (warp == 1) {
        op.communicate();
        if constexpr (kReturns) return;
      }
    }
    if constexpr (requires { op.copy(0); }) {
      if (warp >= 2) op.copy(warp - 2);
    }
  }
};

}  // namespace pk

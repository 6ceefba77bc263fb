// Signals between GPUs: words in a signal page that a peer sets and the owner waits for.
//
// Invariants. A counter only grows, and a wait is "at least", so that a late reader never misses a
// value. A wait polls its own GPU's memory, never a peer's. No wait is without limit: when time is
// up it leaves an ErrorRecord and traps.
#pragma once

#include "tile/comm_view.h"
#include "tile/error_record.h"
#include "tile/ptx.cuh"

namespace pk {

// Who waits, for the error record.
struct Waiter {
  const CommView& comm;
  Op op;
  int channel;
};

__device__ __forceinline__ SignalPage& signal_page(const CommView& comm, int rank) {
  return *reinterpret_cast<SignalPage*>(comm.region[rank]);
}

// Inline: a call would make the compiler save registers around every wait.
__device__ __forceinline__ void fail(ErrorRecord* record, ErrorRecord text) {
  if (atomicCAS_system(&record->claimed, 0u, 1u) == 0u) {
    text.claimed = 1;
    text.ready = 0;
    *record = text;
    // Release: pairs with the host's acquire load of `ready` in error_text().
    ptx::st_release_sys(&record->ready, 1u);
  } else {
    // Another thread is writing; give it time before this trap stops the whole device.
    const uint64_t start = ptx::globaltimer_ns();
    while (ptx::ld_acquire_sys(&record->ready) == 0u &&
           ptx::globaltimer_ns() - start < 1'000'000'000ull) {
    }
  }
  ptx::trap();
}

// For whoever waits ahead of need: hundreds of threads that poll a few words as fast as they can
// are in the way of the data for which they wait.
inline constexpr uint32_t kPatient = 200;  // nanoseconds

// Calls `poll(seen)` until it returns true, with a pause between one call and the next if one is
// given. `seen` is what the error record will show, and `peer`, which a poll of several may change.
template <uint32_t kPauseNs = 0, typename Poll>
__device__ __forceinline__ void wait_until(const Waiter& waiter, Slot slot, const int& peer,
                                           uint32_t expected, Poll poll) {
  // The first look is free of clock reads: on the fast path the word is there already or comes
  // within a microsecond.
  constexpr int kPollsPerClockRead = 64;
  uint32_t seen = 0;
  uint64_t start = 0;
  while (true) {
    for (int i = 0; i < kPollsPerClockRead; ++i) {
      if (poll(seen)) return;
      if constexpr (kPauseNs > 0) ptx::nanosleep(kPauseNs);
    }
    const uint64_t now = ptx::globaltimer_ns();
    if (start == 0) start = now;
    if (now - start > waiter.comm.timeout_ns) {
      const CommView& comm = waiter.comm;
      fail(comm.error, {1, 0, waiter.op, slot, comm.rank, comm.num_ranks, peer, waiter.channel,
                        expected, seen, now - start});
    }
  }
}

// Waits until a counter on this GPU has reached `expected`; acquires what its writer released
// before.
__device__ __forceinline__ void wait_signal(const Waiter& waiter, Slot slot, int peer,
                                            const uint32_t* counter, uint32_t expected) {
  wait_until(waiter, slot, peer, expected, [&](uint32_t& seen) {
    seen = ptx::ld_acquire_sys(counter);
    // Counters wrap after 2^32 calls: compare by distance.
    return static_cast<int32_t>(seen - expected) >= 0;
  });
}

}  // namespace pk

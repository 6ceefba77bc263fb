// The low-latency protocol ("ll"): data and its epoch in one word, so that one trip over the link
// is the whole message. A packet of 16 bytes holds two such words, 8 bytes of data.
//
// A mailbox has two halves, by parity of the epoch. When a rank writes half e & 1 it has finished
// call e - 1, and so has heard from every peer in e - 1; the peer had then finished call e - 2, the
// last that read this half. Every op on a channel must hear from every peer for that to hold.
#pragma once

#include <cstdint>

#include "tile/signal.cuh"

namespace pk::low_latency {

__device__ __forceinline__ ulonglong2* mailbox(const Waiter& waiter, uint32_t epoch, int owner,
                                               int source) {
  const CommView& comm = waiter.comm;
  return reinterpret_cast<ulonglong2*>(
      comm.region[owner] + low_latency_offset(waiter.channel, epoch & 1, source, comm.num_ranks));
}

// Puts 8 bytes into place `i` of this rank's mailbox on `peer`.
__device__ __forceinline__ void send(const Waiter& waiter, uint32_t epoch, int peer, uint32_t i,
                                     uint64_t data) {
  const uint64_t tag = static_cast<uint64_t>(epoch) << 32;
  ptx::st_relaxed_sys(mailbox(waiter, epoch, peer, waiter.comm.rank) + i,
                      ulonglong2{tag | (data & 0xffffffffu), tag | (data >> 32)});
}

// Waits for the 8 bytes that `peer` sends to place `i`. Each word proves itself by its epoch; no
// acquire is needed, for nothing else is read on its strength.
__device__ __forceinline__ uint64_t receive(const Waiter& waiter, uint32_t epoch, int peer,
                                            uint32_t i) {
  const ulonglong2* place = mailbox(waiter, epoch, waiter.comm.rank, peer) + i;
  ulonglong2 packet;
  wait_until(waiter, Slot::kData, peer, epoch, [&](uint32_t& seen) {
    packet = ptx::ld_relaxed_sys(place);
    seen = static_cast<uint32_t>(packet.x >> 32);
    return seen == epoch && static_cast<uint32_t>(packet.y >> 32) == epoch;
  });
  return (packet.y << 32) | (packet.x & 0xffffffffu);
}

}  // namespace pk::low_latency

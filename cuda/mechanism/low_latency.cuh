// The low-latency protocol ("ll"): data and its epoch in one word, so that one trip over the link
// is the whole message. A packet of 16 bytes holds two such words, 8 bytes of data.
//
// A mailbox has two halves, by parity of the epoch. When a rank writes half e & 1 it has finished
// call e - 1, and so has heard from every peer in e - 1; the peer had then finished call e - 2, the
// last that read this half. Every op on a channel must hear from every peer for that to hold.
#pragma once

#include <cstdint>

#include "tile/part_layout.h"
#include "tile/signal.cuh"

namespace pk::low_latency {

__device__ __forceinline__ ulonglong2* mailbox(const Waiter& waiter, uint32_t epoch, int owner,
                                               int source) {
  const CommView& comm = waiter.comm;
  return reinterpret_cast<ulonglong2*>(
      comm.region[owner] + low_latency_offset(waiter.channel, epoch & 1, source, comm.num_ranks));
}

// A packet of 8 bytes into a place of a mailbox.
__device__ __forceinline__ void put(ulonglong2* place, uint32_t epoch, uint64_t data) {
  const uint64_t tag = static_cast<uint64_t>(epoch) << 32;
  ptx::st_relaxed_sys(place, ulonglong2{tag | (data & 0xffffffffu), tag | (data >> 32)});
}

// Whether the packet of this epoch is there; then `data` is its 8 bytes. Each word proves itself by
// its epoch; no acquire is needed, for nothing else is read on its strength.
__device__ __forceinline__ bool look(const ulonglong2* place, uint32_t epoch, uint64_t& data,
                                     uint32_t& seen) {
  const ulonglong2 packet = ptx::ld_relaxed_sys(place);
  data = (packet.y << 32) | (packet.x & 0xffffffffu);
  seen = static_cast<uint32_t>(packet.x >> 32);
  return seen == epoch && static_cast<uint32_t>(packet.y >> 32) == epoch;
}

// Puts 8 bytes into place `i` of this rank's mailbox on `peer`.
__device__ __forceinline__ void send(const Waiter& waiter, uint32_t epoch, int peer, uint32_t i,
                                     uint64_t data) {
  put(mailbox(waiter, epoch, peer, waiter.comm.rank) + i, epoch, data);
}

// Waits for the 8 bytes that `peer` sends to place `i`.
__device__ __forceinline__ uint64_t receive(const Waiter& waiter, uint32_t epoch, int peer,
                                            uint32_t i) {
  const ulonglong2* place = mailbox(waiter, epoch, waiter.comm.rank, peer) + i;
  uint64_t data;
  wait_until(waiter, Slot::kData, peer, epoch,
             [&](uint32_t& seen) { return look(place, epoch, data, seen); });
  return data;
}

// A part as a row of 8-byte words, the last one filled up with zeros. Words are read and written in
// pieces of `granule` bytes: the largest power of two up to 8 that divides the row length and the
// address. (A few messages of 8 bytes a thread: the switch costs nothing that could be seen.)
struct Words {
  PartLayout layout;
  int rank;
  uint32_t inner;
  uint32_t bytes;
  int granule;

  // Byte offset of what lies at flat offset `at` of the part.
  __device__ __forceinline__ int64_t offset(uint32_t at) const {
    if (inner == bytes) return layout.at(rank, 0) + at;
    const uint32_t row = at / inner;
    return layout.at(rank, row) + (at - row * inner);
  }

  __device__ __forceinline__ uint64_t load(const char* base, uint32_t i) const {
    switch (granule) {
      case 8:
        return *reinterpret_cast<const uint64_t*>(base + offset(8 * i));
      case 4:
        return load_pieces<uint32_t>(base, i);
      case 2:
        return load_pieces<uint16_t>(base, i);
      default:
        return load_pieces<uint8_t>(base, i);
    }
  }

  __device__ __forceinline__ void store(char* base, uint32_t i, uint64_t word) const {
    switch (granule) {
      case 8:
        *reinterpret_cast<uint64_t*>(base + offset(8 * i)) = word;
        break;
      case 4:
        store_pieces<uint32_t>(base, i, word);
        break;
      case 2:
        store_pieces<uint16_t>(base, i, word);
        break;
      default:
        store_pieces<uint8_t>(base, i, word);
    }
  }

 private:
  template <typename Piece>
  __device__ __forceinline__ uint64_t load_pieces(const char* base, uint32_t i) const {
    uint64_t word = 0;
#pragma unroll
    for (uint32_t piece = 0; piece < 8; piece += sizeof(Piece)) {
      if (8 * i + piece >= bytes) break;
      const uint64_t value = *reinterpret_cast<const Piece*>(base + offset(8 * i + piece));
      word |= value << (8 * piece);
    }
    return word;
  }

  template <typename Piece>
  __device__ __forceinline__ void store_pieces(char* base, uint32_t i, uint64_t word) const {
#pragma unroll
    for (uint32_t piece = 0; piece < 8; piece += sizeof(Piece)) {
      if (8 * i + piece >= bytes) break;
      *reinterpret_cast<Piece*>(base + offset(8 * i + piece)) =
          static_cast<Piece>(word >> (8 * piece));
    }
  }
};

}  // namespace pk::low_latency

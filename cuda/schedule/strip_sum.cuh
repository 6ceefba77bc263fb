// Sums over ranks, right out of registers, of partials that are few: every rank sends all of its
// partial, or each peer's rows of it, and adds up what comes.
//
//   rank 0   strip: round ── send ──┐  ┌── wait ── add, in rank order ── round, to the result
//                                   ╳
//   rank 1   strip: round ── send ──┘  └── wait ── add, in rank order ── round, to the result
//
// A strip is 8 rows by kPanel columns, in the registers of one warp (register_tile.cuh). Nobody but
// the lanes with the same elements on the peers read what a lane sends, so it travels as it lies in
// registers, by whole lines. There are two ways:
//
//   low latency  words with their epoch, into the mailbox (low_latency.cuh): one trip, no flag and
//                no invitation, but twice the bytes, and room for no more than the mailbox has
//   simple       into the peer's scratch, and a flag for what a warp sends at a time: the bytes
//                alone, but the release waits until they have arrived
//
// Entry of the simple way: no strip leaves before the peer has invited it. Exit of both: a rank has
// waited for every strip that comes to it, so nothing is on its way when its kernel ends.
#pragma once

#include <iterator>

#include "mechanism/low_latency.cuh"
#include "schedule/strip_layout.h"
#include "schedule/tile_flags.cuh"
#include "tile/register_tile.cuh"

namespace pk {

// A strip rounded to 16 bits: word j of lane l has, of row l / 4, columns 16 j + 2 (l % 4) and the
// next, and the same 8 columns on.
template <ptx::Type kType>
struct RoundedStrip {
  static constexpr int kWords = kPanel / 16;
  static_assert(kPanel == StripLayout::kCols && kWords * 8 * 32 == StripLayout::kBytes);

  uint64_t word[kWords];

  // From pairs of neighbours: those of the next word are kStride on, the second of a word kSecond.
  template <int kStride, int kSecond>
  __device__ __forceinline__ void round(const float* from) {
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      const float *a = from + kStride * j, *b = a + kSecond;
      word[j] = uint64_t{pack<kType>(b[0], b[1])} << 32 | pack<kType>(a[0], a[1]);
    }
  }

  // Into a sum in fp32, or as its first.
  __device__ __forceinline__ void add_to(Strip& sum, bool first) const {
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      const float2 a = unpack<kType>(static_cast<uint32_t>(word[j]));
      const float2 b = unpack<kType>(static_cast<uint32_t>(word[j] >> 32));
      const float value[4] = {a.x, a.y, b.x, b.y};
#pragma unroll
      for (int i = 0; i < 4; ++i) sum.value[j][i] = first ? value[i] : sum.value[j][i] + value[i];
    }
  }
};

// Strips below each other, which one warp has and sends at a time.
template <ptx::Type kType, int kNumStrips>
struct Strips {
  static constexpr int kCount = kNumStrips;
  // Of how many ranks what has come is looked at at a time: so many loads are under way, and 64
  // registers wait for packets.
  static constexpr int kRanksAtOnce = 4 / kCount;

  RoundedStrip<kType> own[kCount];
  int row;  // of the partial, the first one's
  int n;    // of the partial's columns, the n-th kPanel
};

// What all strips of a call have in common.
struct StripSum {
  const Waiter& waiter;
  uint32_t epoch;
  const StripLayout& layout;
  int num_strips;        // that each rank sends each peer
  char* const* scratch;  // of each rank; of the own one what its peers have put there
  bool low_latency;

  // One warp: its strips, to whom their rows go.
  template <typename Strips>
  __device__ __forceinline__ void send(const Strips& strips) const {
    const CommView& comm = waiter.comm;
#pragma unroll 1
    for (int k = 1; k < comm.num_ranks; ++k) {
      const int peer = (comm.rank + k) % comm.num_ranks;
      ulonglong2* to = place(peer, comm.rank, strips);
#pragma unroll
      for (int s = 0; s < Strips::kCount; ++s) {
        if (!layout.goes_to(peer, row_of_lane(strips, s))) continue;
        const auto& word = strips.own[s].word;
        if (low_latency) {
#pragma unroll
          for (int j = 0; j < std::size(word); ++j)
            low_latency::put(to + s * StripLayout::kPackets + 32 * j, epoch, word[j]);
        } else {
#pragma unroll
          for (int j = 0; j < std::size(word); j += 2)
            to[s * StripLayout::kVectors + 16 * j] = ulonglong2{word[j], word[j + 1]};
        }
      }
    }
    __syncwarp();  // lanes part by their rows
    if (low_latency) return;
    // Release of all lanes' stores, gathered by the barrier; pairs with wait_now() in sum().
    for (int peer = lane(); peer < comm.num_ranks; peer += 32) {
      if (peer != comm.rank && goes_to(peer, strips))
        TileFlags{waiter, epoch}.announce(peer, flag(peer, strips));
    }
  }

  // The same warp: the sums of its strips over all ranks. False if this rank has none of the rows.
  template <typename Strips>
  __device__ __forceinline__ bool sum(const Strips& strips, Strip (&sums)[Strips::kCount]) const {
    const int num_ranks = waiter.comm.num_ranks, own = waiter.comm.rank;
    if (!goes_to(own, strips)) return false;
    if (!low_latency) {
      for (int peer = lane(); peer < num_ranks; peer += 32) {
        // Acquire of the peer's strips; pairs with the release in send(). Passed on by the barrier.
        if (peer != own) TileFlags{waiter, epoch}.wait_now(peer, flag(own, strips));
      }
      __syncwarp();
    }
#pragma unroll 1
    for (int first = 0; first < num_ranks; first += Strips::kRanksAtOnce) {
      decltype(strips.own) theirs[Strips::kRanksAtOnce];
      if (low_latency) {
        receive(strips, first, theirs);
      } else {
        load(strips, first, theirs);
      }
#pragma unroll
      for (int r = 0; r < Strips::kRanksAtOnce; ++r) {
        const int rank = first + r;
        if (rank >= num_ranks) break;
#pragma unroll
        for (int s = 0; s < Strips::kCount; ++s) {
          auto part = theirs[r][s];
          if (rank == own) part = strips.own[s];
          part.add_to(sums[s], rank == 0);
        }
      }
    }
    __syncwarp();  // lanes have waited each for itself
    return true;
  }

 private:
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }

  template <typename Strips>
  static __device__ __forceinline__ int row_of_lane(const Strips& strips, int strip) {
    return strips.row + strip * StripLayout::kRows + lane() / 4;
  }

  template <typename Strips>
  __device__ __forceinline__ bool goes_to(int rank, const Strips& strips) const {
    return layout.goes_to(rank, strips.row, Strips::kCount * StripLayout::kRows);
  }

  // That of the first strip that goes to the owner.
  template <typename Strips>
  __device__ __forceinline__ int flag(int owner, const Strips& strips) const {
    return layout.first_number(owner, strips.row, strips.n);
  }

  // Where `source` puts the calling lane's words of the first strip for `owner`, if that goes
  // there: the first packet in the mailbox, or vector in the scratch.
  template <typename Strips>
  __device__ __forceinline__ ulonglong2* place(int owner, int source, const Strips& strips) const {
    const int strip = layout.number(owner, strips.row, strips.n);
    if (low_latency) {
      return low_latency::mailbox(waiter, epoch, owner, source) +
             StripLayout::packet(strip, lane());
    }
    const int64_t slot = int64_t{peer_index(source, owner)} * num_strips * StripLayout::kBytes;
    return reinterpret_cast<ulonglong2*>(scratch[owner] + slot) +
           StripLayout::vector(strip, lane());
  }

  // f(r, where it lies) for each of the ranks first + r that has sent these strips.
  template <typename Strips, typename F>
  __device__ __forceinline__ void for_each_peer(const Strips& strips, int first, F f) const {
#pragma unroll
    for (int r = 0; r < Strips::kRanksAtOnce; ++r) {
      const int rank = first + r, own = waiter.comm.rank;
      if (rank >= waiter.comm.num_ranks) break;
      if (rank != own) f(r, place(own, rank, strips));
    }
  }

  // Out of the scratch, where they have arrived.
  template <typename Strips, typename Theirs>
  __device__ __forceinline__ void load(const Strips& strips, int first, Theirs& theirs) const {
    for_each_peer(strips, first, [&](int r, const ulonglong2* from) {
#pragma unroll
      for (int s = 0; s < Strips::kCount; ++s) {
        if (!layout.goes_to(waiter.comm.rank, row_of_lane(strips, s))) continue;
        auto& word = theirs[r][s].word;
#pragma unroll
        for (int j = 0; j < std::size(word); j += 2) {
          const ulonglong2 pair = from[s * StripLayout::kVectors + 16 * j];
          word[j] = pair.x, word[j + 1] = pair.y;
        }
      }
    });
  }

  // Out of the mailbox, all again until all have come.
  template <typename Strips, typename Theirs>
  __device__ __forceinline__ void receive(const Strips& strips, int first, Theirs& theirs) const {
    int missing = first;
    wait_until(waiter, Slot::kData, missing, epoch, [&](uint32_t& seen) {
      bool all = true;
      for_each_peer(strips, first, [&](int r, const ulonglong2* from) {
#pragma unroll
        for (int s = 0; s < Strips::kCount; ++s) {
          if (!layout.goes_to(waiter.comm.rank, row_of_lane(strips, s))) continue;
          auto& word = theirs[r][s].word;
#pragma unroll
          for (int j = 0; j < std::size(word); ++j) {
            uint32_t tag;
            const auto* packet = from + s * StripLayout::kPackets + 32 * j;
            if (low_latency::look(packet, epoch, word[j], tag)) continue;
            all = false;
            missing = first + r;
            seen = tag;
          }
        }
      });
      return all;
    });
  }
};

}  // namespace pk

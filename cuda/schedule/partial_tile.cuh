// A consumer's finished tile of partial results, rounded, on its way out of the registers: to the
// owner of its rows, or, where this rank owns them, added up with what the peers have sent.
//
// It leaves under the products of the next tile, as a PendingTile does, but by way of another warp:
// who stores to a peer must wait for the stores to arrive, and consumers have no time for that.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "schedule/partial_layout.h"
#include "schedule/store_tile.cuh"
#include "tile/comm_view.h"
#include "tile/pipeline.cuh"
#include "tile/register_tile.cuh"
#include "tile/timeline.cuh"

namespace pk {

// What one warp of a consumer hands to the warp that stores, and gets from the one that fetches: a
// panel at a time, and a few chunks. The rest of the block's shared memory holds operands.
struct Ports {
  static constexpr int kParts = sizeof(ResultPanel) / PartialLayout::kChunkBytes;
  using Taken = Cursor<kParts>;

  Pipeline<1> outbox;
  Pipeline<kParts> inbox;

  // One thread, before the block meets.
  __device__ void init() {
    outbox.init(1);
    inbox.init(1);
  }

  // The round of a panel. Each tile has an even number of them, so those of all tiles begin with
  // the same parity.
  static __device__ __forceinline__ Cursor<1> at(int panel) {
    return Cursor<1>::after(static_cast<uint32_t>(panel));
  }

  // The buffers of both, of this warp.
  static __device__ __forceinline__ ResultPanel& out(ResultPanel (&buffers)[2]) {
    return buffers[0];
  }
  static __device__ __forceinline__ char* in(ResultPanel (&buffers)[2], const Taken& at) {
    return reinterpret_cast<char*>(buffers[1].data) + at.stage * PartialLayout::kChunkBytes;
  }
};

// That of this warp, with its buffers.
struct Outlet {
  ResultPanel (&buffers)[2];
  Ports& ports;

  // The buffer of a panel, when the last one has left it.
  __device__ __forceinline__ ResultPanel& wait(int panel) const {
    ports.outbox.wait_empty(Ports::at(panel));
    return Ports::out(buffers);
  }

  // The panel is written: to the warp that stores it.
  __device__ __forceinline__ void hand_over() const {
    ptx::fence_proxy_async_shared();
    __syncwarp();
    // Release of the panel; pairs with the wait in the storing warp.
    if (ptx::elect_one()) ports.outbox.fill(0);
  }

  // This lane's part of what a peer has sent, the `count`th chunk of all that come here.
  __device__ __forceinline__ float4 take(uint32_t count) const {
    const auto at = Ports::Taken::after(count);
    ports.inbox.wait_full(at);
    if (is_first_thread()) timeline::lap(timeline::Did::kWaitPiece);
    const float4 part =
        ptx::ld_shared(reinterpret_cast<const float4*>(Ports::in(buffers, at)) + threadIdx.x % 32);
    __syncwarp();
    if (ptx::elect_one()) ports.inbox.release(at.stage);
    return part;
  }
};

template <ptx::Type kType, int kCols>
class PartialTile {
 public:
  static_assert(kCols == PartialLayout::kCols);
  static constexpr int kPanels = kCols / kPanel;
  static_assert(kPanels % 4 == 0);
  static constexpr int kChunks = PartialLayout::kChunks;
  static constexpr int kChunksOfPanel = kPanel / PartialLayout::kChunkCols;

  // Panels to be sent, if it is a peer's tile, or chunks to be added up, if it is an own one.
  __device__ __forceinline__ int to_send() const { return left_; }
  __device__ __forceinline__ int to_add() const { return -left_; }

  // This rank's own partial is rounded too: every rank's enters the sum alike.
  __device__ __forceinline__ void take(const Accumulator<kCols>& tile, bool own) {
    tile_.round(tile);
    left_ = own ? -kChunks : kPanels;
  }

  // A panel of a peer's tile, as its owner's threads will read it.
  __device__ __forceinline__ void send_panel(const Outlet& outlet) {
    for_index<kPanels>(kPanels - left_--, [&](auto panel) {
      auto* to = reinterpret_cast<float4*>(outlet.wait(panel).data) + threadIdx.x % 32;
#pragma unroll
      for (int j = 0; j < kChunksOfPanel; ++j)
        ptx::st_shared(to + 32 * j, chunk(panel * kChunksOfPanel + j));
      outlet.hand_over();
    });
  }

  // Adds the next chunk of an own tile up.
  __device__ __forceinline__ void add_chunk(const CommView& comm, const Outlet& outlet) {
    for_index<kChunks>(kChunks + left_++, [&](auto i) {
      add_chunk<i>(comm, outlet);
      if constexpr (i % kChunksOfPanel == kChunksOfPanel - 1) {
        constexpr int panel = i / kChunksOfPanel;
        tile_.template write_panel<panel>(outlet.wait(panel));
        outlet.hand_over();
      }
    });
  }

 private:
  // Registers have no index at run time: f(its index as a constant) in one of kCount branches.
  template <int kCount, typename F>
  static __device__ __forceinline__ void for_index(int index, F f) {
    [&]<int... kIndices>(std::integer_sequence<int, kIndices...>) {
      ((index == kIndices ? f(std::integral_constant<int, kIndices>{}) : void()), ...);
    }(std::make_integer_sequence<int, kCount>{});
  }

  __device__ __forceinline__ float4 chunk(int i) const {
    const uint32_t (&value)[kCols / 4] = tile_.value;
    return make_float4(__uint_as_float(value[4 * i]), __uint_as_float(value[4 * i + 1]),
                       __uint_as_float(value[4 * i + 2]), __uint_as_float(value[4 * i + 3]));
  }

  // Adds chunk kIndex of all ranks up, in rank order.
  template <int kIndex>
  __device__ __forceinline__ void add_chunk(const CommView& comm, const Outlet& outlet) {
    float total[8];
#pragma unroll
    for (float& value : total) value = -0.f;  // which adds nothing to a zero of either sign
#pragma unroll 1
    for (int rank = 0; rank < comm.num_ranks; ++rank) {
      const float4 part = rank == comm.rank ? chunk(kIndex) : outlet.take(taken_++);
      const float pairs[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const float2 pair = unpack<kType>(__float_as_uint(pairs[q]));
        total[2 * q] += pair.x;
        total[2 * q + 1] += pair.y;
      }
    }
#pragma unroll
    for (int q = 0; q < 4; ++q)
      tile_.value[4 * kIndex + q] = pack<kType>(total[2 * q], total[2 * q + 1]);
  }

  RoundedTile<kType, kCols> tile_;
  int left_ = 0;        // below zero: chunks of an own tile
  uint32_t taken_ = 0;  // chunks from peers, of all tiles
};

}  // namespace pk

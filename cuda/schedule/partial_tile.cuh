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

namespace pk {

// The panels of one warp on their way to the warp that stores them.
struct Outbox : Pipeline<2> {
  // The buffer of a panel, and its round: each tile takes both buffers an even number of times, so
  // the rounds of all tiles begin with the same parity.
  static __device__ __forceinline__ Cursor<2> at(int panel) {
    return Cursor<2>::after(static_cast<uint32_t>(panel));
  }
};

template <ptx::Type kType, int kCols>
class PartialTile {
 public:
  static_assert(kCols == PartialLayout::kCols);
  static constexpr int kPanels = kCols / kPanel;
  static_assert(kPanels % 4 == 0);
  static constexpr int kChunksOfPanel = kPanel / PartialLayout::kChunkCols;

  __device__ __forceinline__ PartialTile(PanelBuffers& buffers, Outbox& outbox)
      : buffers_(buffers[threadIdx.x % 128 / 32]), outbox_(outbox) {}

  // Panels to be sent, if it is a peer's tile, or pieces to be added, if it is an own one.
  __device__ __forceinline__ int to_send() const { return left_; }
  __device__ __forceinline__ int to_add() const { return -left_; }

  // This rank's own partial is rounded too: every rank's enters the sum alike.
  __device__ __forceinline__ void take(const Accumulator<kCols>& tile, bool own,
                                       const PartialLayout& layout) {
    tile_.round(tile);
    left_ = own ? -layout.num_pieces() : kPanels;
  }

  // A panel of a peer's tile, as its owner's threads will read it.
  __device__ __forceinline__ void send_panel() {
    for_panel(kPanels - left_--, [&](auto panel) {
      auto* to = reinterpret_cast<float4*>(buffer(panel).data) + threadIdx.x % 32;
#pragma unroll
      for (int j = 0; j < kChunksOfPanel; ++j)
        ptx::st_shared(to + 32 * j, chunk(panel * kChunksOfPanel + j));
      hand_over(panel);
    });
  }

  // Adds the next piece of an own tile, whose peers' parts lie at `staged`, in rank order.
  __device__ __forceinline__ void add_piece(const CommView& comm, const PartialLayout& layout,
                                            const char* staged) {
    const int first = (layout.num_pieces() + left_++) << layout.chunks_log2;
    const int in_panel = first % kChunksOfPanel;
    staged += layout.offset(threadIdx.x / 32, 0) + threadIdx.x % 32 * 16;
    for_panel(first / kChunksOfPanel, [&](auto panel) {
#pragma unroll
      for (int j = 0; j < kChunksOfPanel; ++j) {
        if (j < in_panel || j >= in_panel + layout.chunks()) continue;
        add_chunk(panel * kChunksOfPanel + j, comm, layout.piece_bytes(),
                  staged + (j - in_panel) * PartialLayout::kChunkBytes);
      }
      if (in_panel + layout.chunks() < kChunksOfPanel) return;
      tile_.template write_panel<panel>(buffer(panel));
      hand_over(panel);
    });
  }

 private:
  // Registers have no index at run time: f(its index as a constant) in one of kPanels branches.
  template <typename F>
  static __device__ __forceinline__ void for_panel(int index, F f) {
    [&]<int... kIndices>(std::integer_sequence<int, kIndices...>) {
      ((index == kIndices ? f(std::integral_constant<int, kIndices>{}) : void()), ...);
    }(std::make_integer_sequence<int, kPanels>{});
  }

  __device__ __forceinline__ float4 chunk(int i) const {
    const uint32_t (&value)[kCols / 4] = tile_.value;
    return make_float4(__uint_as_float(value[4 * i]), __uint_as_float(value[4 * i + 1]),
                       __uint_as_float(value[4 * i + 2]), __uint_as_float(value[4 * i + 3]));
  }

  // The chunk of each peer's tile is at `staged`, one `pitch` after the other.
  __device__ __forceinline__ void add_chunk(int i, const CommView& comm, int pitch,
                                            const char* staged) {
    float total[8];
#pragma unroll
    for (float& value : total) value = -0.f;  // which adds nothing to a zero of either sign
#pragma unroll 1
    for (int rank = 0; rank < comm.num_ranks; ++rank) {
      float4 part = chunk(i);
      if (rank != comm.rank) {
        part = ptx::ld_shared(reinterpret_cast<const float4*>(staged));
        staged += pitch;
      }
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
      tile_.value[4 * i + q] = pack<kType>(total[2 * q], total[2 * q + 1]);
  }

  // Of a panel, when the last one has left it.
  __device__ __forceinline__ ResultPanel& buffer(int panel) const {
    outbox_.wait_empty(Outbox::at(panel));
    return buffers_[Outbox::at(panel).stage];
  }

  // The panel is written: to the warp that stores it.
  __device__ __forceinline__ void hand_over(int panel) const {
    ptx::fence_proxy_async_shared();
    __syncwarp();
    // Release of the panel; pairs with the wait in the storing warp.
    if (ptx::elect_one()) outbox_.fill(Outbox::at(panel).stage);
  }

  ResultPanel (&buffers_)[2];
  Outbox& outbox_;
  RoundedTile<kType, kCols> tile_;
  int left_ = 0;  // below zero: pieces to be added
};

}  // namespace pk

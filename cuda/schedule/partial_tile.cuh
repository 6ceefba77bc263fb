// A consumer's finished tile, rounded, on its way out of the registers: a partial one to the owner
// of its rows, or the sum, where this rank owns them, to the result.
//
// It leaves under the products of the next tile, as a PendingTile does, but by way of another warp:
// who stores to a peer must wait for the stores to arrive, and consumers have no time for that.
// When it has left, its registers take what a peer has sent for the next tile, if that is an own
// one, so that the sum finds it there.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "schedule/partial_layout.h"
#include "schedule/store_tile.cuh"
#include "tile/pipeline.cuh"
#include "tile/register_tile.cuh"

namespace pk {

// The panels of one warp on their way to the two warps that store them, tile by tile in turn: while
// one of these waits for its stores to arrive the other takes the panels of the next tile.
struct Outbox {
  static constexpr int kStorers = 2, kBuffers = 2;

  // Whose a tile is, by its number.
  static __device__ __forceinline__ int storer(uint32_t tile) { return tile % kStorers; }

  // Each tile takes both buffers an even number of times, so that the rounds of all tiles begin
  // with the same parity.
  static __device__ __forceinline__ int buffer(int panel) { return panel % kBuffers; }
  static __device__ __forceinline__ uint32_t parity(int panel) { return panel / kBuffers & 1; }

  // One thread, before the block meets.
  __device__ void init() {
    for (int b = 0; b < kBuffers; ++b) {
      for (auto& each : full) ptx::mbarrier_init(&each[b], 1);
      ptx::mbarrier_init(&empty[b], 1);
    }
    ptx::fence_mbarrier_init();
  }

  // The warp that fills: until the last panel has left the buffer, whoever has stored it.
  __device__ __forceinline__ void wait_empty(int panel) {
    wait_phase(&empty[buffer(panel)], parity(panel) ^ 1);
  }
  // One of its threads. Release of the panel; pairs with the wait below.
  __device__ __forceinline__ void fill(int storer, int panel) {
    ptx::mbarrier_arrive(&full[storer][buffer(panel)]);
  }

  __device__ __forceinline__ void wait_full(int storer, int panel) {
    wait_phase(&full[storer][buffer(panel)], parity(panel));
  }
  __device__ __forceinline__ void release(int panel) {
    ptx::mbarrier_arrive(&empty[buffer(panel)]);
  }

  uint64_t full[kStorers][kBuffers], empty[kBuffers];
};

template <ptx::Type kType, int kCols>
class PartialTile {
 public:
  static_assert(kCols == PartialLayout::kCols);
  static constexpr int kPanels = kCols / kPanel;
  static_assert(kPanels == PartialLayout::kPanels && kPanels % (2 * Outbox::kBuffers) == 0);
  static constexpr int kChunksOfPanel = PartialLayout::kChunks / kPanels;

  __device__ __forceinline__ PartialTile(PanelBuffers& buffers, Outbox& outbox)
      : buffers_(buffers[threadIdx.x % 128 / 32]), outbox_(outbox) {}

  // The tile before must have left.
  __device__ __forceinline__ void take(const Accumulator<kCols>& tile, bool own) {
    tile_.round(tile);
    own_ = own;
    left_ = kPanels;
  }

  // After a step of the next tile: hands over the next panel to a storer, if it is due.
  __device__ __forceinline__ void send_due(int step, int panel_steps, int storer) {
    if (left_ == 0) return;
    const int consumer = threadIdx.x / 128;
    if (step >= PartialLayout::send_step(kPanels - left_, panel_steps, consumer))
      send_panel(storer);
  }

  __device__ __forceinline__ void send_rest(int storer) {
    while (left_ > 0) send_panel(storer);
  }

  // A peer's part of a tile, which lies at `from`. The tile before must have left.
  __device__ __forceinline__ void fetch(const char* from) {
    from += PartialLayout::offset(threadIdx.x / 32, 0) + threadIdx.x % 32 * 16;
#pragma unroll
    for (int i = 0; i < PartialLayout::kChunks; ++i) {
      const ulonglong2 chunk = ptx::ld_relaxed_sys(
          reinterpret_cast<const ulonglong2*>(from + i * PartialLayout::kChunkBytes));
      tile_.value[4 * i] = static_cast<uint32_t>(chunk.x);
      tile_.value[4 * i + 1] = static_cast<uint32_t>(chunk.x >> 32);
      tile_.value[4 * i + 2] = static_cast<uint32_t>(chunk.y);
      tile_.value[4 * i + 3] = static_cast<uint32_t>(chunk.y >> 32);
    }
  }

  // What was fetched, on top of the calling consumer's tile.
  __device__ __forceinline__ void add_to(Accumulator<kCols>& tile) const {
#pragma unroll
    for (int i = 0; i < kCols / 4; ++i) {
      const float2 pair = unpack<kType>(tile_.value[i]);
      tile.value[2 * i] += pair.x;
      tile.value[2 * i + 1] += pair.y;
    }
  }

 private:
  // A peer's panel goes as its owner's threads will read it, an own one as rows.
  __device__ __forceinline__ void send_panel(int storer) {
    for_panel(kPanels - left_--, [&](auto panel) {
      outbox_.wait_empty(panel);
      ResultPanel& buffer = buffers_[Outbox::buffer(panel)];
      if (own_) {
        tile_.template write_panel<panel>(buffer);
      } else {
        auto* to = reinterpret_cast<float4*>(buffer.data) + threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < kChunksOfPanel; ++j)
          ptx::st_shared(to + 32 * j, chunk(panel * kChunksOfPanel + j));
      }
      ptx::fence_proxy_async_shared();
      __syncwarp();
      if (ptx::elect_one()) outbox_.fill(storer, panel);
    });
  }

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

  ResultPanel (&buffers_)[2];
  Outbox& outbox_;
  RoundedTile<kType, kCols> tile_;
  bool own_ = false;
  int left_ = 0;  // panels
};

}  // namespace pk

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
  // So many steps before the end a peer's part begins to be fetched, a panel's share at a step: of
  // one, as ptxas waits for loads at the head of the next. That many come within it.
  static constexpr int kAhead = kPanels + 1;

  __device__ __forceinline__ PartialTile(PanelBuffers& buffers, Outbox& outbox)
      : buffers_(buffers[threadIdx.x % 128 / 32]), outbox_(outbox) {}

  // The tile before must have left.
  __device__ __forceinline__ void take(const Accumulator<kCols>& tile, bool own) {
    tile_.round(tile);
    own_ = own;
    left_ = kPanels;
  }

  // The panels are to leave over the next `num_steps` steps, evenly, so that the link is loaded so,
  // and before a peer's part is fetched. Of many steps the first ones do.
  __device__ __forceinline__ void spread(int num_steps) {
    interval_ = min(max((num_steps - kAhead - 1) / (kPanels - 1), 1), 4);
    due_ = 0;
  }

  // Whether all panels have left by then.
  static __device__ __forceinline__ bool leaves_early(int num_steps) {
    return num_steps >= kPanels + kAhead;
  }

  // After a step: hands over the next panel if it is due.
  __device__ __forceinline__ void send_due(int step) {
    if (left_ == 0 || step < due_) return;
    send_panel();
    due_ += interval_;
  }

  __device__ __forceinline__ void send_rest() {
    while (left_ > 0) send_panel();
  }

  // What a peer has sent of a panel of its part, which lies at `from`. The registers must be free.
  __device__ __forceinline__ void fetch_panel(const char* from, int index) {
    from += PartialLayout::offset(threadIdx.x / 32, 0) + threadIdx.x % 32 * 16;
    for_panel(index, [&](auto panel) {
#pragma unroll
      for (int i = panel * kChunksOfPanel; i < (panel + 1) * kChunksOfPanel; ++i) {
        const ulonglong2 chunk = ptx::ld_relaxed_sys(
            reinterpret_cast<const ulonglong2*>(from + i * PartialLayout::kChunkBytes));
        tile_.value[4 * i] = static_cast<uint32_t>(chunk.x);
        tile_.value[4 * i + 1] = static_cast<uint32_t>(chunk.x >> 32);
        tile_.value[4 * i + 2] = static_cast<uint32_t>(chunk.y);
        tile_.value[4 * i + 3] = static_cast<uint32_t>(chunk.y >> 32);
      }
    });
  }

  __device__ __forceinline__ void fetch(const char* from) {
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) fetch_panel(from, panel);
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
  __device__ __forceinline__ void send_panel() {
    for_panel(kPanels - left_--, [&](auto panel) {
      // Until the last one has left the buffer.
      outbox_.wait_empty(Outbox::at(panel));
      ResultPanel& buffer = buffers_[Outbox::at(panel).stage];
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
      // Release of the panel; pairs with the wait in the storing warp.
      if (ptx::elect_one()) outbox_.fill(Outbox::at(panel).stage);
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
  int left_ = 0;                // panels
  int due_ = 0, interval_ = 1;  // steps
};

}  // namespace pk

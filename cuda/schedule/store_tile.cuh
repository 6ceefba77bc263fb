// From a consumer's accumulator to the result in global memory.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <utility>

#include "schedule/roles.cuh"
#include "tile/ptx_tensor.cuh"
#include "tile/register_tile.cuh"
#include "tile/shared_tile.cuh"

namespace pk {

// What a consumer rounds into, panel by panel: one is written while the other is read.
using PanelBuffers = ResultTile<kPanel>[2];

namespace detail {

template <ptx::Half kType, int kIndex, int kCols>
__device__ __forceinline__ void store_panel(const Accumulator<kCols>& tile, PanelBuffers& buffers,
                                            int consumer, const CUtensorMap* map, int row,
                                            int col) {
  ResultTile<kPanel>& buffer = buffers[kIndex % 2];
  // The store before the last one, from this buffer, has read it.
  if (is_first_thread()) ptx::cp_async_bulk_wait_group_read<1>();
  sync_consumer(consumer);
  store_rounded<kType, kIndex * kPanel>(buffer, tile);
  ptx::fence_proxy_async_shared();
  sync_consumer(consumer);
  if (!is_first_thread()) return;
  buffer.store(map, row, col + kIndex * kPanel);
  ptx::cp_async_bulk_commit_group();
}

template <ptx::Half kType, int kCols, int... kIndices>
__device__ __forceinline__ void store_panels(const Accumulator<kCols>& tile, PanelBuffers& buffers,
                                             int consumer, const CUtensorMap* map, int row, int col,
                                             std::integer_sequence<int, kIndices...>) {
  (store_panel<kType, kIndices>(tile, buffers, consumer, map, row, col), ...);
}

}  // namespace detail

// Rounded to 16 bits, to (row, col) of the matrix of a tensor map with boxes of 64 x 64. All of one
// consumer; its first thread waits for its bulk groups before it ends.
template <ptx::Half kType, int kCols>
__device__ __forceinline__ void store_rounded(const Accumulator<kCols>& tile, PanelBuffers& buffers,
                                              int consumer, const CUtensorMap* map, int row,
                                              int col) {
  constexpr int kPanels = kCols / kPanel;
  static_assert(kPanels % 2 == 0);  // the buffers' turns go on from tile to tile
  detail::store_panels<kType>(tile, buffers, consumer, map, row, col,
                              std::make_integer_sequence<int, kPanels>{});
}

// In fp32, straight from the registers: four lanes write a sector. Rows are padded to whole
// vectors: `pitch` elements from one to the next, all of them written.
template <int kCols>
__device__ __forceinline__ void store_float32(const Accumulator<kCols>& tile, float* result,
                                              int num_rows, int64_t pitch, int row, int col) {
  row += Accumulator<kCols>::row();
  col += Accumulator<kCols>::col();
#pragma unroll
  for (int half = 0; half < 2; ++half, row += 8) {
    if (row >= num_rows) return;
    float* to = result + row * pitch + col;
    const int left = static_cast<int>(pitch) - col;
#pragma unroll
    for (int j = 0; j < kCols / 8; ++j) {
      const float2 pair{tile.value[4 * j + 2 * half], tile.value[4 * j + 2 * half + 1]};
      if (8 * j < left) *reinterpret_cast<float2*>(to + 8 * j) = pair;
    }
  }
}

}  // namespace pk

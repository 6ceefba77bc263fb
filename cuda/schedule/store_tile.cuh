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

// Two panels of each warp: one is written while the other is read.
using PanelBuffers = ResultPanel[4][2];

// A row-major matrix in global memory that tiles are stored into. Rows are padded to whole vectors;
// what is left in the padding is unspecified.
struct Result {
  CUtensorMap map;  // of a 16-bit one, with boxes of a ResultPanel
  void* address;
  int rows;
  int64_t pitch;  // elements from row to row
  bool float32;

  // One warp: the first rows of a panel, up to `end_row` of the matrix.
  __device__ __forceinline__ void store_rows(ResultPanel& panel, int num_rows, int row, int col,
                                             int end_row) const {
    store_rows(address, panel, num_rows, row, col, end_row);
  }

  // The same into another matrix of this shape: that of a peer. kVectors are in registers at a
  // time.
  template <int kVectors = 4>
  __device__ __forceinline__ void store_rows(void* to, ResultPanel& panel, int num_rows, int row,
                                             int col, int end_row) const {
#pragma unroll kVectors
    for (int i = threadIdx.x % 32; i < num_rows * 8; i += 32) {
      const int r = row + i / 8, c = col + i % 8 * 8;
      const float4 chunk = ptx::ld_shared(reinterpret_cast<float4*>(panel.chunk(i / 8, i % 8 * 8)));
      if (r >= 0 && r < end_row && c < pitch)
        *reinterpret_cast<float4*>(static_cast<uint16_t*>(to) + r * pitch + c) = chunk;
    }
  }

  // One warp: a strip rounded to 16 bits, by way of a panel of its own. Only whole sectors are
  // written: parts of one are slow, at a kernel's end even to wait for.
  template <ptx::Type kType>
  __device__ __forceinline__ void store_rounded(const Strip& strip, ResultPanel& panel, int row,
                                                int col) const {
    const int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kPanel / 16; j += 2) {
      const float (&a)[4] = strip.value[j], (&b)[4] = strip.value[j + 1];
      ptx::stmatrix_x4(panel.chunk(lane % 8, j * 16 + lane / 8 * 8), pack<kType>(a[0], a[1]),
                       pack<kType>(a[2], a[3]), pack<kType>(b[0], b[1]), pack<kType>(b[2], b[3]));
    }
    __syncwarp();
    store_rows(panel, 8, row, col, rows);
  }

  // One warp: a strip in fp32.
  __device__ __forceinline__ void store(Strip& strip, int row, int col) const {
    strip.for_each_pair([&](int r, int c, float x, float y) {
      if (row + r < rows && col + c < pitch)
        *reinterpret_cast<float2*>(static_cast<float*>(address) + (row + r) * pitch + col + c) =
            make_float2(x, y);
    });
  }

  // A consumer's tile in fp32, up to `end_row` of the matrix: four lanes write a sector.
  template <int kCols>
  __device__ __forceinline__ void store(const Accumulator<kCols>& tile, int row, int col,
                                        int end_row) const {
    row += Accumulator<kCols>::row();
    col += Accumulator<kCols>::col();
#pragma unroll
    for (int half = 0; half < 2; ++half, row += 8) {
      if (row >= min(end_row, rows)) return;
      float* to = static_cast<float*>(address) + row * pitch + col;
      const int left = static_cast<int>(pitch) - col;
#pragma unroll
      for (int j = 0; j < kCols / 8; ++j) {
        const float2 pair{tile.value[4 * j + 2 * half], tile.value[4 * j + 2 * half + 1]};
        if (8 * j < left) *reinterpret_cast<float2*>(to + 8 * j) = pair;
      }
    }
  }

  // Rows first_row and on are zero; thread `index` of `num_threads` does its share.
  __device__ __forceinline__ void clear(int first_row, int64_t index, int64_t num_threads) const {
    const int64_t chunks = pitch * (float32 ? 4 : 2) / 16;
    auto* to = static_cast<float4*>(address) + first_row * chunks;
    for (int64_t i = index; i < (rows - first_row) * chunks; i += num_threads) to[i] = float4{};
  }
};

// One warp: its 16 rows of a consumer's tile, which begins at (row, col) of a matrix of the batch,
// by way of so many panels of its own in turn. What is left to wait for are the last panels' reads.
template <int kNumPanels, ptx::Type kType, int kCols>
__device__ __forceinline__ void store_panels(ResultPanel (&panels)[kNumPanels],
                                             const RoundedTile<kType, kCols>& tile,
                                             const CUtensorMap* map, int batch, int row, int col) {
  row += threadIdx.x % 128 / 32 * ResultPanel::kRows;
  const auto store = [&]<int kIndex>(std::integral_constant<int, kIndex>) {
    ResultPanel& panel = panels[kIndex % kNumPanels];
    // The store before from this panel has read it.
    if (ptx::elect_one()) ptx::cp_async_bulk_wait_group_read<kNumPanels - 1>();
    __syncwarp();
    tile.template write_panel<kIndex>(panel);
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (ptx::elect_one()) {
      panel.store(map, row, col + kIndex * kPanel, batch);
      ptx::cp_async_bulk_commit_group();
    }
  };
  [&]<int... kIndices>(std::integer_sequence<int, kIndices...>) {
    (store(std::integral_constant<int, kIndices>{}), ...);
  }(std::make_integer_sequence<int, kCols / kPanel>{});
}

// A consumer's finished tile on its way to global memory. Rounded, it waits in registers while the
// tensor cores are at the next tile, and leaves a panel at a time between that one's steps: so the
// store of a tile takes no time of its own, but for a block's last one. Each warp stores its own 16
// rows, and waits for no other.
template <ptx::Type kType, int kCols>
class PendingTile {
 public:
  // The tile's place in the matrix. The tile before must have left.
  __device__ __forceinline__ void take(const Accumulator<kCols>& tile, int row, int col) {
    tile_.round(tile);
    row_ = row + threadIdx.x % 128 / 32 * ResultPanel::kRows;
    col_ = col;
    left_ = kPanels;
  }

  // The panels are to leave evenly over the next `num_steps` steps, and not those of both consumers
  // at the same time: all blocks finish their tiles together, and if they store at once the loads
  // wait for the L2.
  __device__ __forceinline__ void spread(int num_steps, int consumer, int num_consumers) {
    interval_ = max(1, num_steps / kPanels);
    due_ = 1 + consumer * interval_ / num_consumers;  // in the first step one is in flight
  }

  // After a step: stores the next panel if it is due, up to the row where the matrix ends, or the
  // tile's group of rows.
  __device__ __forceinline__ void store_due(int step, PanelBuffers& buffers, const Result& result,
                                            int end_row) {
    if (left_ == 0 || step < due_) return;
    store_panel(buffers, result, end_row);
    due_ += interval_;
  }

  __device__ __forceinline__ void store_rest(PanelBuffers& buffers, const Result& result,
                                             int end_row) {
    while (left_ > 0) store_panel(buffers, result, end_row);
  }

 private:
  static constexpr int kPanels = kCols / kPanel;

  __device__ __forceinline__ void store_panel(PanelBuffers& buffers, const Result& result,
                                              int end_row) {
    store_panel(buffers[threadIdx.x % 128 / 32][turn_], result, end_row,
                std::make_integer_sequence<int, kPanels>{});
    --left_;
    turn_ ^= 1;
  }

  // Registers have no index at run time: one of kPanels branches is taken.
  template <int... kIndices>
  __device__ __forceinline__ void store_panel(ResultPanel& buffer, const Result& result,
                                              int end_row,
                                              std::integer_sequence<int, kIndices...>) {
    // The store before the last one, from this buffer, has read it.
    if (ptx::elect_one()) ptx::cp_async_bulk_wait_group_read<1>();
    __syncwarp();
    const int index = kPanels - left_;
    ((index == kIndices ? tile_.template write_panel<kIndices>(buffer) : void()), ...);
    const int col = col_ + index * kPanel;
    // A tensor map ends where its matrix does.
    const bool whole = end_row == INT32_MAX || row_ + ResultPanel::kRows <= end_row;
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (!whole) result.store_rows(buffer, ResultPanel::kRows, row_, col, end_row);
    if (ptx::elect_one()) {
      if (whole) buffer.store(&result.map, row_, col);
      ptx::cp_async_bulk_commit_group();  // an empty one too: the wait counts them
    }
  }

  RoundedTile<kType, kCols> tile_;
  int row_, col_;
  int left_ = 0;                // panels
  int due_ = 0, interval_ = 1;  // steps
  int turn_ = 0;                // of the buffers, on from tile to tile
};

}  // namespace pk

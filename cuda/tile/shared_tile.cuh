// Tiles of a matrix operand in shared memory, as a tensor map writes them and wgmma reads them.
//
// A panel is 128 bytes wide, 64 elements of the dimension that is contiguous in global memory, and
// as long as the tile in the other one; panels follow each other. Inside each 1024 bytes (8 rows)
// of a panel the 16-byte chunks are permuted, chunk c of row r at place c ^ (r % 8): the 128-byte
// swizzle, by which neither the copies nor wgmma meet bank conflicts.
//
//      k contiguous: one panel          m or n contiguous: a panel every 64
//        +-- 64 k --+                     +-- 64 m --+-- 64 m --+
//      m |          |                   k |          |          |
//        |          |                     +----------+----------+
//        +----------+
#pragma once

#include <cstdint>

#include "tile/ptx_tensor.cuh"
#include "tile/ptx_wgmma.cuh"

namespace pk {

inline constexpr int kPanel = 64;           // elements of 16 bits in a panel's row
inline constexpr int kSwizzleBytes = 1024;  // the swizzle's period; tiles are aligned to it
inline constexpr int kBlockK = 64;          // of every operand tile
inline constexpr int kWgmmaK = 16;          // one instruction's share of it

// Which dimension of an operand is contiguous: k, or the other one (m of A, n of B).
enum class Major : int { kK, kMn };

// The descriptor of step `step` of kWgmmaK in panels of kRows rows that follow each other, the
// first of them at `data`.
template <Major kMajor, int kRows>
__device__ __forceinline__ uint64_t panel_descriptor(const uint16_t* data, int step) {
  // Between groups of 8 rows of a panel; between panels (with one panel, nobody reads it).
  constexpr uint32_t kStride = kSwizzleBytes, kLeading = kPanel * kRows * 2;
  constexpr uint32_t kSwizzle128 = 1;
  // Addresses and distances count 16 bytes, in 14 bits; above those of an address is the block's
  // rank in a cluster. A step's distance never carries into the next field.
  constexpr uint32_t kStep = (kMajor == Major::kK ? kWgmmaK : kWgmmaK * kPanel) * 2 >> 4;
  const uint32_t start = (ptx::shared_address(data) & 0x3FFFF) >> 4;
  const uint32_t low = (start | (kLeading >> 4) << 16) + step * kStep;
  return uint64_t{kStride >> 4 | kSwizzle128 << 30} << 32 | low;
}

// An operand tile: kExtent of m or n by kBlockK of k.
template <int kExtent, Major kMajor>
struct alignas(kSwizzleBytes) OperandTile {
  static_assert(kExtent % kPanel == 0);
  static constexpr int kBytes = kExtent * kBlockK * 2;
  // The instruction's word for "not contiguous in k".
  static constexpr int kTransposed = kMajor == Major::kMn;
  // What one tensor-map copy brings.
  static constexpr int kBoxInner = kPanel;
  static constexpr int kBoxOuter = kMajor == Major::kK ? kExtent : kBlockK;

  uint16_t data[kExtent * kBlockK];

  // One thread. The tile at (mn, k) of a matrix of the batch; completes on the barrier, kBytes.
  __device__ __forceinline__ void load(const CUtensorMap* map, int mn, int k, int batch,
                                       uint64_t* barrier, ptx::CachePolicy policy) {
    if constexpr (kMajor == Major::kK) {
      ptx::cp_async_bulk_tensor_load(data, map, k, mn, batch, barrier, policy);
    } else {
#pragma unroll
      for (int i = 0; i < kExtent; i += kPanel) {
        ptx::cp_async_bulk_tensor_load(data + i * kBlockK, map, mn + i, k, batch, barrier, policy);
      }
    }
  }

  // The descriptor of step `step` of kWgmmaK, from row or column `mn` on, a multiple of 64.
  __device__ __forceinline__ uint64_t descriptor(int mn, int step) const {
    return panel_descriptor<kMajor, kBlockK>(data + mn * kBlockK, step);
  }

  // Of tiles with k contiguous, seen the other way round: step `step` of an operand whose k are the
  // rows, and whose n are the columns of this tile and of those that follow it.
  __device__ __forceinline__ uint64_t descriptor_by_rows(int step) const {
    static_assert(kMajor == Major::kK);
    return panel_descriptor<Major::kMn, kExtent>(data, step);
  }
};

// One thread. Tiles with k contiguous that make up a matrix's rows from `row` on: the columns from
// `col` on, kPanel in each tile.
template <int kExtent, int kNumPanels>
__device__ __forceinline__ void load_panels(OperandTile<kExtent, Major::kK> (&to)[kNumPanels],
                                            const CUtensorMap* map, int row, int col, int batch,
                                            uint64_t* barrier, ptx::CachePolicy policy) {
#pragma unroll
  for (int i = 0; i < kNumPanels; ++i)
    to[i].load(map, row, col + i * kPanel, batch, barrier, policy);
}

// A warp's share of a panel of a 16-bit result: 16 rows by kPanel columns.
struct alignas(kSwizzleBytes) ResultPanel {
  static constexpr int kRows = 16, kCols = kPanel;

  uint16_t data[kRows * kCols];

  // The 16-byte chunk with columns col..col+7 of a row.
  __device__ __forceinline__ uint16_t* chunk(int row, int col) {
    return data + row * kCols + ((col / 8) ^ (row % 8)) * 8;
  }

  // One thread. To (row, col) of a matrix of the batch; joins the current bulk group.
  __device__ __forceinline__ void store(const CUtensorMap* map, int row, int col,
                                        int batch = 0) const {
    ptx::cp_async_bulk_tensor_store(map, col, row, batch, data);
  }
};

}  // namespace pk

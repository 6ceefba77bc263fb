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

namespace pk {

inline constexpr int kPanel = 64;           // elements of 16 bits in a panel's row
inline constexpr int kSwizzleBytes = 1024;  // the swizzle's period; tiles are aligned to it
inline constexpr int kBlockK = 64;          // of every operand tile
inline constexpr int kWgmmaK = 16;          // one instruction's share of it

// Which dimension of an operand is contiguous: k, or the other one (m of A, n of B).
enum class Major : int { kK, kMn };

// An operand tile: kExtent of m or n by kBlockK of k. In a cluster of kBlocks blocks that all need
// the tile, each loads a share of it into the shared memory of all.
template <int kExtent, Major kMajor, int kBlocks = 1>
struct alignas(kSwizzleBytes) OperandTile {
  static constexpr int kShare = kExtent / kBlocks;
  static_assert(kShare % kPanel == 0);
  static constexpr int kBytes = kExtent * kBlockK * 2;
  // The instruction's word for "not contiguous in k".
  static constexpr int kTransposed = kMajor == Major::kMn;
  // What one tensor-map copy brings.
  static constexpr int kBoxInner = kPanel;
  static constexpr int kBoxOuter = kMajor == Major::kK ? kShare : kBlockK;

  uint16_t data[kExtent * kBlockK];

  // One thread of each block. The tile at (mn, k) of the matrix, or this block's share of it;
  // completes on the barrier's bytes, kBytes with all shares.
  __device__ __forceinline__ void load(const CUtensorMap* map, int mn, int k, uint64_t* barrier) {
    const int first = kBlocks == 1 ? 0 : static_cast<int>(ptx::cluster_rank()) * kShare;
    if constexpr (kMajor == Major::kK) {
      copy(first, map, k, mn + first, barrier);
    } else {
#pragma unroll
      for (int i = first; i < first + kShare; i += kPanel) copy(i, map, mn + i, k, barrier);
    }
  }

  // The descriptor of step `step` of kWgmmaK, from row or column `mn` on, a multiple of 64.
  __device__ __forceinline__ uint64_t descriptor(int mn, int step) const {
    // Between groups of 8 rows of a panel; between panels (with one panel, nobody reads it).
    constexpr uint64_t kStride = kSwizzleBytes, kLeading = kPanel * kBlockK * 2;
    constexpr uint64_t kSwizzle128 = 1;
    const uint16_t* first = kMajor == Major::kK ? data + mn * kBlockK + step * kWgmmaK
                                                : data + mn * kBlockK + step * kWgmmaK * kPanel;
    // Addresses and distances count 16 bytes, in 14 bits.
    return (ptx::shared_address(first) & 0x3FFFF) >> 4 | (kLeading >> 4) << 16 |
           (kStride >> 4) << 32 | kSwizzle128 << 62;
  }

 private:
  // One box, to where row or column `at` of the tile begins.
  __device__ __forceinline__ void copy(int at, const CUtensorMap* map, int inner, int outer,
                                       uint64_t* barrier) {
    uint16_t* to = data + at * kBlockK;
    if constexpr (kBlocks == 1) {
      ptx::cp_async_bulk_tensor_load(to, map, inner, outer, barrier);
    } else {
      constexpr uint16_t kAll = (1u << kBlocks) - 1;
      ptx::cp_async_bulk_tensor_load_to_cluster(to, map, inner, outer, barrier, kAll);
    }
  }
};

// A tile of a 16-bit result, 64 rows by kCols, in panels like an operand's.
template <int kNumCols>
struct alignas(kSwizzleBytes) ResultTile {
  static_assert(kNumCols % kPanel == 0);
  static constexpr int kRows = 64, kCols = kNumCols;
  static constexpr int kPanels = kCols / kPanel;

  uint16_t data[kRows * kCols];

  // The 16-byte chunk with columns col..col+7 of a row.
  __device__ __forceinline__ uint16_t* chunk(int row, int col) {
    const int place = (col % kPanel / 8) ^ (row % 8);
    return data + col / kPanel * kPanel * kRows + row * kPanel + place * 8;
  }

  // One thread. To (row, col) of the matrix; joins the current bulk group.
  __device__ __forceinline__ void store(const CUtensorMap* map, int row, int col) const {
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      ptx::cp_async_bulk_tensor_store(map, col + panel * kPanel, row,
                                      data + panel * kPanel * kRows);
    }
  }
};

}  // namespace pk

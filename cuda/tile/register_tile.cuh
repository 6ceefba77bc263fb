// A warpgroup's accumulator: 64 rows by kCols in fp32, as wgmma keeps it.
//
//   thread t: warp w = t / 32, lane l = t % 32
//   value[4 j + 0..1]  row 16 w + l / 4,      columns 8 j + 2 (l % 4) and the next
//   value[4 j + 2..3]  row 16 w + l / 4 + 8,  the same columns
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "tile/shared_tile.cuh"

namespace pk {

template <int kCols>
struct Accumulator {
  static constexpr int kRows = 64;
  static constexpr int kCount = kCols / 2;

  float value[kCount];

  static __device__ __forceinline__ int row() {
    return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  }
  static __device__ __forceinline__ int col() { return threadIdx.x % 4 * 2; }
};

template <ptx::Half kType>
__device__ __forceinline__ uint32_t pack(float first, float second) {
  if constexpr (kType == ptx::Half::kBfloat16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __half2 pair = __floats2half2_rn(first, second);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

// Rounds columns kFrom .. kFrom + kCols - 1 of an accumulator into a result tile. One warpgroup.
template <ptx::Half kType, int kFrom, int kCols, int kAll>
__device__ __forceinline__ void store_rounded(ResultTile<kCols>& to,
                                              const Accumulator<kAll>& from) {
  static_assert(kFrom % 16 == 0 && kFrom + kCols <= kAll);
  const int lane = threadIdx.x % 32;
  // Matrices of an stmatrix: rows 0-7 and 8-15 of 8 columns, then of the next 8.
  const int row = threadIdx.x % 128 / 32 * 16 + lane % 16, col = lane / 16 * 8;
#pragma unroll
  for (int j = 0; j < kCols / 16; ++j) {
    uint32_t matrices[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int i = kFrom / 2 + j * 8 + q * 2;
      matrices[q] = pack<kType>(from.value[i], from.value[i + 1]);
    }
    ptx::stmatrix_x4(to.chunk(row, j * 16 + col), matrices);
  }
}

}  // namespace pk

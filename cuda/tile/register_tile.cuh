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

  // Of the calling thread's first value.
  static __device__ __forceinline__ int row() {
    return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  }
  static __device__ __forceinline__ int col() { return threadIdx.x % 4 * 2; }

  __device__ __forceinline__ void add(const Accumulator& other) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) value[i] += other.value[i];
  }

  // f(row, col, value, its neighbour's in the next column) for all that this thread holds.
  template <typename F>
  __device__ __forceinline__ void for_each_pair(F f) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2)
      f(row() + i / 2 % 2 * 8, col() + i / 4 * 8, value[i], value[i + 1]);
  }
};

// 8 rows by kPanel columns of an accumulator, in the registers of one warp: lane l has, of row l /
// 4, columns 16 j + 2 (l % 4) and the next, and the same 8 columns on.
struct Strip {
  float value[kPanel / 16][4];

  __device__ __forceinline__ void add(int j, float4 part) {
    value[j][0] += part.x, value[j][1] += part.y, value[j][2] += part.z, value[j][3] += part.w;
  }

  // As that of an accumulator.
  template <typename F>
  __device__ __forceinline__ void for_each_pair(F f) {
    const int row = threadIdx.x % 32 / 4, col = threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < kPanel / 16; ++j) {
      f(row, 16 * j + col, value[j][0], value[j][1]);
      f(row, 16 * j + col + 8, value[j][2], value[j][3]);
    }
  }
};

template <ptx::Type kType>
__device__ __forceinline__ uint32_t pack(float first, float second) {
  if constexpr (kType == ptx::Type::kBfloat16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __half2 pair = __floats2half2_rn(first, second);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

template <ptx::Type kType>
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  if constexpr (kType == ptx::Type::kBfloat16) {
    return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
  } else {
    return __half22float2(reinterpret_cast<const __half2&>(pair));
  }
}

// The same tile rounded to 16 bits, two neighbours of a row in a register.
template <ptx::Type kType, int kCols>
struct RoundedTile {
  uint32_t value[kCols / 4];

  __device__ __forceinline__ void round(const Accumulator<kCols>& from) {
#pragma unroll
    for (int i = 0; i < kCols / 4; ++i)
      value[i] = pack<kType>(from.value[2 * i], from.value[2 * i + 1]);
  }

  // One warp: its 16 rows of columns kIndex * kPanel and on, into a panel of its own.
  template <int kIndex>
  __device__ __forceinline__ void write_panel(ResultPanel& to) const {
#pragma unroll
    for (int j = 0; j < kPanel / 16; ++j) write_columns(to, j, value + kIndex * kPanel / 4 + j * 4);
  }

  // Columns 16 j and on of a panel, from their four registers.
  static __device__ __forceinline__ void write_columns(ResultPanel& to, int j,
                                                       const uint32_t* four) {
    const int lane = threadIdx.x % 32;
    // Matrices of an stmatrix: rows 0-7 and 8-15 of 8 columns, then of the next 8.
    ptx::stmatrix_x4(to.chunk(lane % 16, j * 16 + lane / 16 * 8), four[0], four[1], four[2],
                     four[3]);
  }
};

}  // namespace pk

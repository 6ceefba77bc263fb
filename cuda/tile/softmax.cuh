// The softmax over rows that come a block of columns at a time, in the registers of a warpgroup
// (Milakov and Gimelshein, arXiv:1805.02867), in powers of two.
#pragma once

#include <cmath>
#include <cstdint>

#include "tile/ptx_tensor.cuh"
#include "tile/register_tile.cuh"

namespace pk {

inline constexpr float kLog2E = 1.4426950408889634f;

// tanh(x), within some 1e-6: tanh.approx's 5e-4, times a cap of 50, would be seen in a logit.
__device__ __forceinline__ float tanh_of(float x) {
  const float e = ptx::exp2_approx(x * (2 * kLog2E));
  return 1 - 2 * ptx::reciprocal_approx(1 + e);
}

// The two rows of an accumulator that a thread has a part in, which it shares with the other three
// of its quad. The logit of a score s in log2 units is s * unit, unit > 0.
struct RunningSoftmax {
  float most[2] = {-INFINITY, -INFINITY};  // the greatest score yet
  float sum[2] = {0, 0};                   // of this thread's weights, against `most`

  // Makes weights of a block's scores, -inf for those that are masked. Returns what sums of
  // weighted values before it are to be multiplied by, in each row.
  // Both rows go side by side, each in two chains, since few warps are there to hide latencies.
  template <int kCols>
  __device__ __forceinline__ float2 take(Accumulator<kCols>& scores, float unit) {
    float (&s)[kCols / 2] = scores.value;
    float greatest[4] = {most[0], s[1], most[1], s[3]};
#pragma unroll
    for (int i = 0; i < kCols / 2; ++i) {
      if (i == 1 || i == 3) continue;
      greatest[i % 4] = fmaxf(greatest[i % 4], s[i]);
    }
    float top[2] = {fmaxf(greatest[0], greatest[1]), fmaxf(greatest[2], greatest[3])};
#pragma unroll
    for (int lane = 1; lane <= 2; lane *= 2) {
      const float others[2] = {__shfl_xor_sync(0xFFFFFFFF, top[0], lane),
                               __shfl_xor_sync(0xFFFFFFFF, top[1], lane)};
      top[0] = fmaxf(top[0], others[0]), top[1] = fmaxf(top[1], others[1]);
    }
    // A row that has seen nothing yet: its weights are to be 2^(-inf - 0).
    const float base[2] = {top[0] == -INFINITY ? 0 : top[0] * unit,
                           top[1] == -INFINITY ? 0 : top[1] * unit};
    const float2 scale = {ptx::exp2_approx(fmaf(most[0], unit, -base[0])),
                          ptx::exp2_approx(fmaf(most[1], unit, -base[1]))};
    most[0] = top[0], most[1] = top[1];
    float added[4] = {sum[0] * scale.x, 0, sum[1] * scale.y, 0};
#pragma unroll
    for (int i = 0; i < kCols / 2; ++i) {
      s[i] = ptx::exp2_approx(fmaf(s[i], unit, -base[i / 2 % 2]));
      added[i % 4] += s[i];
    }
    sum[0] = added[0] + added[1], sum[1] = added[2] + added[3];
    return scale;
  }

  // After the last block: what the sums are to be multiplied by, and the log-sum-exp of each row.
  __device__ __forceinline__ float2 finish(float unit, float (&log_sum_exp)[2]) const {
    float scale[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = sum[half];
      total += __shfl_xor_sync(0xFFFFFFFF, total, 1);
      total += __shfl_xor_sync(0xFFFFFFFF, total, 2);
      const bool sees = total != 0;  // a NaN stays one
      scale[half] = sees ? 1 / total : 0;
      log_sum_exp[half] = sees ? most[half] * (unit / kLog2E) + logf(total) : -INFINITY;
    }
    return {scale[0], scale[1]};
  }
};

template <int kCols>
__device__ __forceinline__ void scale_rows(Accumulator<kCols>& tile, float2 by) {
#pragma unroll
  for (int i = 0; i < kCols / 2; i += 4) {
    tile.value[i] *= by.x, tile.value[i + 1] *= by.x;
    tile.value[i + 2] *= by.y, tile.value[i + 3] *= by.y;
  }
}

}  // namespace pk

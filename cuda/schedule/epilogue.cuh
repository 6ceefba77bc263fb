// What becomes of a product before it is rounded: in fp32, where it lies in registers.
#pragma once

#include <cstdint>

#include "tile/ptx_tensor.cuh"
#include "tile/register_tile.cuh"

namespace pk {

// kSigmoid: x / (1 + exp(-x (linear + cubic x^2))). That is silu, and gelu by its tanh form, since
// (1 + tanh u) / 2 = 1 / (1 + exp(-2 u)).
enum class Activation : int { kNone, kRelu, kSigmoid };

// activation(x row_scale[row] col_scale[col] + bias[col]), scales of e4m3 alone. It is described at
// run time, so that no product has kernels of its own for it: a plain one takes a branch a tile,
// and its loop is as it was.
struct Epilogue {
  const float* row_scale = nullptr;  // null for none, of which col_scale is none then either
  const float* col_scale = nullptr;
  int last_row_scale = 0, last_col_scale = 0;  // 0 where there is one for all
  const void* bias = nullptr;                  // null for none
  bool float32_bias = false;                   // or of the type of a 16-bit result
  int last_col = 0;  // that the bias has a pair for: it goes on to whole 16 bytes
  Activation activation = Activation::kNone;
  float linear = 0, cubic = 0;

  __device__ __forceinline__ bool is_plain() const {
    return bias == nullptr && activation == Activation::kNone && row_scale == nullptr;
  }

  // On values that lie at (row, col) of the result: an accumulator's, or a strip's.
  template <ptx::Type kType, typename Values>
  __device__ __forceinline__ void apply(Values& values, int row, int col) const {
    if (is_plain()) return;
    if constexpr (kType == ptx::Type::kE4m3) {
      if (row_scale != nullptr) scale(values, row, col);
    }
    if (bias != nullptr) {
      if (float32_bias) {
        add(values, col, static_cast<const float2*>(bias), [](float2 pair) { return pair; });
      } else {
        add(values, col, static_cast<const uint32_t*>(bias), unpack<ptx::half_of(kType)>);
      }
    }
    if (activation == Activation::kRelu) {
      values.for_each_pair([](int, int, float& x, float& y) { x = relu(x), y = relu(y); });
    } else if (activation == Activation::kSigmoid) {
      values.for_each_pair([&](int, int, float& x, float& y) { x = gated(x), y = gated(y); });
    }
  }

 private:
  template <typename Values>
  __device__ __forceinline__ void scale(Values& values, int row, int col) const {
    values.for_each_pair([&](int r, int c, float& x, float& y) {
      const float of_row = __ldg(row_scale + min(row + r, last_row_scale));
      x = x * of_row * __ldg(col_scale + min(col + c, last_col_scale));
      y = y * of_row * __ldg(col_scale + min(col + c + 1, last_col_scale));
    });
  }

  template <typename Values, typename Pair, typename Unpack>
  __device__ __forceinline__ void add(Values& values, int col, const Pair* pairs,
                                      Unpack unpack) const {
    values.for_each_pair([&](int, int c, float& x, float& y) {
      const float2 pair = unpack(__ldg(pairs + min(col + c, last_col) / 2));
      x += pair.x, y += pair.y;
    });
  }

  // Not fmaxf(), which makes a NaN zero.
  static __device__ __forceinline__ float relu(float x) { return x < 0 ? 0 : x; }

  __device__ __forceinline__ float gated(float x) const {
    // A square past fp32 would be a NaN with a `cubic` of zero.
    const float square = fminf(x * x, 1e30f);
    return __fdividef(x, 1 + __expf(-x * fmaf(cubic, square, linear)));
  }
};

}  // namespace pk

// Combining the ranks' elements: what is added, in which type, and how ties and NaNs go.
//
// Always in rank order, so that every rank and every run gives the same bits. Types of 16 bits are
// combined in fp32 and rounded once at the end.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace pk {

template <typename T>
struct Accumulator {
  using type = T;
};
template <>
struct Accumulator<__nv_bfloat16> {
  using type = float;
};
template <>
struct Accumulator<__half> {
  using type = float;
};
template <typename T>
using accumulator_t = typename Accumulator<T>::type;

__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
template <typename T>
__device__ __forceinline__ T widen(T x) {
  return x;
}

template <typename T>
__device__ __forceinline__ T narrow(accumulator_t<T> x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else {
    return x;
  }
}

struct Sum {
  template <typename A>
  static __device__ __forceinline__ A combine(A a, A b) {
    if constexpr (std::is_integral_v<A>) {
      using Wrapping = std::make_unsigned_t<A>;
      return static_cast<A>(static_cast<Wrapping>(a) + static_cast<Wrapping>(b));
    } else {
      return a + b;
    }
  }
};

// A NaN on any rank is a NaN everywhere, as in XLA.
struct Max {
  template <typename A>
  static __device__ __forceinline__ A combine(A a, A b) {
    return (b > a || b != b) ? b : a;
  }
};

struct Min {
  template <typename A>
  static __device__ __forceinline__ A combine(A a, A b) {
    return (b < a || b != b) ? b : a;
  }
};

// A vector of bytes as elements of T, combined element by element.
template <typename T, typename Op, typename Vector>
struct Combined {
  static constexpr int kElements = sizeof(Vector) / sizeof(T);
  accumulator_t<T> value[kElements];

  static __device__ __forceinline__ T element(const Vector& vector, int i) {
    return reinterpret_cast<const T*>(&vector)[i];
  }
  __device__ __forceinline__ void start(const Vector& vector) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) value[i] = widen(element(vector, i));
  }
  __device__ __forceinline__ void add(const Vector& vector) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) value[i] = Op::combine(value[i], widen(element(vector, i)));
  }
  __device__ __forceinline__ Vector result() const {
    Vector vector;
#pragma unroll
    for (int i = 0; i < kElements; ++i) reinterpret_cast<T*>(&vector)[i] = narrow<T>(value[i]);
    return vector;
  }
};

}  // namespace pk

// wgmma, one function each: products by a warpgroup of operands in shared memory, or of A in
// registers, and what orders them with other code.
#pragma once

#include <cstdint>

#include "tile/ptx_tensor.cuh"

namespace pk::ptx {

// ---- wgmma: one warpgroup, D[64, n] += A[64, k] B[k, n], k of 32 bytes. B lies in shared memory;
// A too, or in registers

// Registers of D written by generic code, before wgmma reads them.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// All but the newest kPending groups have read their operands and written D.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// No instruction: the same object at an address that the compiler keeps in a register. That of
// dynamic shared memory it would otherwise make again at each use, from special registers.
template <typename T>
__device__ __forceinline__ T& kept(T& object) {
  T* pointer = &object;
  asm volatile("" : "+l"(pointer));
  return *pointer;
}

// No instruction: to the compiler memory has changed. What it needs again it loads again, instead
// of keeping it in registers.
__device__ __forceinline__ void forget() { asm volatile("" ::: "memory"); }

// No instruction: to the compiler D is written here, so that nothing which reads it moves above the
// wait for it.
template <int kCount>
__device__ __forceinline__ void written(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// A trap for one value that x never has: the bits of floats that are not below zero, or of a NaN,
// one or several of them together. It needs x, so x is made before it, and ptxas moves no wait over
// it: left to itself it puts arithmetic that should go on beside wgmma after the wait for that.
__device__ __forceinline__ void made_before_wait(uint32_t x) {
  asm volatile(
      "{\n"
      "  .reg .pred p;\n"
      "  setp.eq.u32 p, %0, 0x80000001;\n"
      "  @p trap;\n"
      "}" ::"r"(x)
      : "memory");
}

// The same of a number that is not below zero, or a NaN, where ptxas cannot prove it so. It orders
// what makes x otherwise than for a comparison of bits, and which of the two is faster is for a
// kernel to find out.
__device__ __forceinline__ void made_before_wait(float x) {
  asm volatile(
      "{\n"
      "  .reg .pred p;\n"
      "  setp.lt.f32 p, %0, 0f00000000;\n"
      "  @p trap;\n"
      "}" ::"f"(x)
      : "memory");
}

// clang-format off
#define PK_D16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define PK_D0 PK_D16 ", " \
              "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PK_D32 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
              "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PK_D64 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
               "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
               "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
               "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define PK_R4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define PK_R16(d, i) PK_R4(d, i), PK_R4(d, i + 4), PK_R4(d, i + 8), PK_R4(d, i + 12)
#define PK_R32(d, i) PK_R16(d, i), PK_R16(d, i + 16)
#define PK_R64(d, i) PK_R32(d, i), PK_R32(d, i + 32)
// `keep` 0 starts from zero: D = A B. Descriptors: shared_tile.cuh. The trailing immediates say
// which operands lie with m or n contiguous.
#define PK_WGMMA_OF(KIND, LIST, A, B, KEEP, TRANSPOSED, ...)                                  \
  asm volatile("{\n"                                                                          \
               "  .reg .pred p;\n"                                                            \
               "  setp.ne.b32 p, %" #KEEP ", 0;\n"                                            \
               "  wgmma.mma_async.sync.aligned." KIND                                         \
               " {" LIST "}, %" #A ", %" #B ", p, 1, 1" TRANSPOSED ";\n"                      \
               "}"                                                                            \
               : __VA_ARGS__                                                                  \
               : "l"(a), "l"(b), "r"(keep), "n"(kTransposedA), "n"(kTransposedB))
// A in registers, where it lies as an accumulator rounded to 16 bits does.
#define PK_WGMMA_RS(N, TYPE, LIST, A0, A1, A2, A3, B, KEEP, TB, ...)                          \
  asm volatile("{\n"                                                                          \
               "  .reg .pred p;\n"                                                            \
               "  setp.ne.b32 p, %" #KEEP ", 0;\n"                                            \
               "  wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE              \
               " {" LIST "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B                  \
               ", p, 1, 1, %" #TB ";\n"                                                       \
               "}"                                                                            \
               : __VA_ARGS__                                                                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep), "n"(kTransposedB))
#define PK_WGMMA(N, TYPE, LIST, A, B, KEEP, TA, TB, ...)                                      \
  PK_WGMMA_OF("m64n" #N "k16.f32." TYPE "." TYPE, LIST, A, B, KEEP, ", %" #TA ", %" #TB,      \
              __VA_ARGS__)
// Both operands lie with k contiguous: there is no other way.
#define PK_WGMMA_E4M3(N, LIST, A, B, KEEP, ...)                                               \
  static_assert(!kTransposedA && !kTransposedB);                                              \
  PK_WGMMA_OF("m64n" #N "k32.f32.e4m3.e4m3", LIST, A, B, KEEP, "", __VA_ARGS__)
// clang-format on

enum class Type : int { kBfloat16, kFloat16, kE4m3 };  // the operands' type

// The type of a result of 16 bits.
constexpr Type half_of(Type type) { return type == Type::kE4m3 ? Type::kBfloat16 : type; }

template <Type kType, int kTransposedA, int kTransposedB>
__device__ __forceinline__ void wgmma(float (&d)[16], uint64_t a, uint64_t b, int keep) {
  static_assert(kType != Type::kE4m3);
  if constexpr (kType == Type::kBfloat16) {
    PK_WGMMA(32, "bf16", PK_D16, 16, 17, 18, 19, 20, PK_R16(d, 0));
  } else {
    PK_WGMMA(32, "f16", PK_D16, 16, 17, 18, 19, 20, PK_R16(d, 0));
  }
}

template <Type kType, int kTransposedA, int kTransposedB>
__device__ __forceinline__ void wgmma(float (&d)[32], uint64_t a, uint64_t b, int keep) {
  if constexpr (kType == Type::kBfloat16) {
    PK_WGMMA(64, "bf16", PK_D0, 32, 33, 34, 35, 36, PK_R32(d, 0));
  } else if constexpr (kType == Type::kE4m3) {
    PK_WGMMA_E4M3(64, PK_D0, 32, 33, 34, PK_R32(d, 0));
  } else {
    PK_WGMMA(64, "f16", PK_D0, 32, 33, 34, 35, 36, PK_R32(d, 0));
  }
}

template <Type kType, int kTransposedA, int kTransposedB>
__device__ __forceinline__ void wgmma(float (&d)[64], uint64_t a, uint64_t b, int keep) {
  if constexpr (kType == Type::kBfloat16) {
    PK_WGMMA(128, "bf16", PK_D0 ", " PK_D32, 64, 65, 66, 67, 68, PK_R64(d, 0));
  } else if constexpr (kType == Type::kE4m3) {
    PK_WGMMA_E4M3(128, PK_D0 ", " PK_D32, 64, 65, 66, PK_R64(d, 0));
  } else {
    PK_WGMMA(128, "f16", PK_D0 ", " PK_D32, 64, 65, 66, 67, 68, PK_R64(d, 0));
  }
}

template <Type kType, int kTransposedA, int kTransposedB>
__device__ __forceinline__ void wgmma(float (&d)[128], uint64_t a, uint64_t b, int keep) {
  static_assert(kType != Type::kE4m3);  // a second accumulator of this size has no registers
  if constexpr (kType == Type::kBfloat16) {
    PK_WGMMA(256, "bf16", PK_D0 ", " PK_D32 ", " PK_D64, 128, 129, 130, 131, 132, PK_R64(d, 0),
             PK_R64(d, 64));
  } else {
    PK_WGMMA(256, "f16", PK_D0 ", " PK_D32 ", " PK_D64, 128, 129, 130, 131, 132, PK_R64(d, 0),
             PK_R64(d, 64));
  }
}

template <Type kType, int kTransposedB>
__device__ __forceinline__ void wgmma(float (&d)[32], const uint32_t* a, uint64_t b, int keep) {
  static_assert(kType != Type::kE4m3);
  if constexpr (kType == Type::kBfloat16) {
    PK_WGMMA_RS(64, "bf16", PK_D0, 32, 33, 34, 35, 36, 37, 38, PK_R32(d, 0));
  } else {
    PK_WGMMA_RS(64, "f16", PK_D0, 32, 33, 34, 35, 36, 37, 38, PK_R32(d, 0));
  }
}

template <Type kType, int kTransposedB>
__device__ __forceinline__ void wgmma(float (&d)[64], const uint32_t* a, uint64_t b, int keep) {
  static_assert(kType != Type::kE4m3);
  if constexpr (kType == Type::kBfloat16) {
    PK_WGMMA_RS(128, "bf16", PK_D0 ", " PK_D32, 64, 65, 66, 67, 68, 69, 70, PK_R64(d, 0));
  } else {
    PK_WGMMA_RS(128, "f16", PK_D0 ", " PK_D32, 64, 65, 66, 67, 68, 69, 70, PK_R64(d, 0));
  }
}

template <Type kType, int kTransposedB>
__device__ __forceinline__ void wgmma(float (&d)[128], const uint32_t* a, uint64_t b, int keep) {
  static_assert(kType != Type::kE4m3);
  if constexpr (kType == Type::kBfloat16) {
    PK_WGMMA_RS(256, "bf16", PK_D0 ", " PK_D32 ", " PK_D64, 128, 129, 130, 131, 132, 133, 134,
                PK_R64(d, 0), PK_R64(d, 64));
  } else {
    PK_WGMMA_RS(256, "f16", PK_D0 ", " PK_D32 ", " PK_D64, 128, 129, 130, 131, 132, 133, 134,
                PK_R64(d, 0), PK_R64(d, 64));
  }
}

#undef PK_WGMMA_RS
#undef PK_WGMMA_E4M3
#undef PK_WGMMA
#undef PK_WGMMA_OF
#undef PK_R64
#undef PK_R32
#undef PK_R16
#undef PK_R4
#undef PK_D64
#undef PK_D32
#undef PK_D0
#undef PK_D16

}  // namespace pk::ptx

// The instructions of tensor kernels, one function each: tensor maps, wgmma, stmatrix, the budget
// of registers. With ptx.cuh the only files with inline assembly.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "tile/ptx.cuh"

namespace pk::ptx {

// ---- Bulk copies through a tensor map of [batch, outer, inner]. Boxes may reach over the edge:
// what is outside reads as zero, counts in the barrier's bytes, and is not stored.

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// What the L2 is told of the lines that a copy reads: words that createpolicy.fractional makes.
enum CachePolicy : uint64_t {
  kEvictNormal = 0x1000000000000000,
  kEvictFirst = 0x12F0000000000000,  // nobody will read them again
};

// global -> shared: the box of one matrix of the batch whose first element is (outer, inner).
__device__ __forceinline__ void cp_async_bulk_tensor_load(void* shared, const CUtensorMap* map,
                                                          int32_t inner, int32_t outer,
                                                          int32_t batch, uint64_t* barrier,
                                                          CachePolicy policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared_address(shared)),
      "l"(map), "r"(shared_address(barrier)), "r"(inner), "r"(outer), "r"(batch), "l"(policy)
      : "memory");
}

// shared -> global, the first matrix of the batch. Joins the calling thread's current bulk group.
__device__ __forceinline__ void cp_async_bulk_tensor_store(const CUtensorMap* map, int32_t inner,
                                                           int32_t outer, const void* shared) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(shared_address(shared)), "r"(inner), "r"(outer), "r"(0)
      : "memory");
}

// This block's generic-proxy writes to shared memory, before what bulk copies read there.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- threads of a block

// One lane of a warp that is together, always the same one.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n"
      "  .reg .pred p;\n"
      "  elect.sync _|p, 0xFFFFFFFF;\n"
      "  selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Barrier 0 is __syncthreads().
__device__ __forceinline__ void named_barrier_sync(uint32_t barrier, uint32_t num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}

// Registers a thread, for all warps of a warpgroup. ptxas ignores these in a kernel without
// __launch_bounds__; a budget that does not fit the SM waits for ever.
template <uint32_t kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <uint32_t kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Four 8x8 matrices of 16-bit elements. Lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void stmatrix_x4(void* row, uint32_t m0, uint32_t m1, uint32_t m2,
                                            uint32_t m3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
      "r"(m0), "r"(m1), "r"(m2), "r"(m3)
      : "memory");
}

// ---- the blocks of a cluster

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

// All threads of the cluster that have not exited. Each thread's writes before it, to shared memory
// of any of the blocks, are seen after it by all.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ float4 ld_shared(const float4* shared) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(shared_address(shared))
               : "memory");
  return value;
}

__device__ __forceinline__ void st_shared(float4* shared, float4 value) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(shared)),
               "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
}

// Into the shared memory of a block of the cluster, where this block has `shared`.
__device__ __forceinline__ void st_shared_cluster(const float4* shared, uint32_t block,
                                                  float4 value) {
  asm volatile(
      "{\n"
      "  .reg .b32 remote;\n"
      "  mapa.shared::cluster.u32 remote, %0, %1;\n"
      "  st.shared::cluster.v4.f32 [remote], {%2, %3, %4, %5};\n"
      "}" ::"r"(shared_address(shared)),
      "r"(block), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w)
      : "memory");
}

// ---- wgmma: one warpgroup, D[64, n] += A[64, k] B[k, n], operands in shared memory, k of 32 bytes

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

// No instruction: to the compiler D is written here, so that nothing which reads it moves above the
// wait for it.
template <int kCount>
__device__ __forceinline__ void written(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// clang-format off
#define PK_D0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
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

}  // namespace pk::ptx

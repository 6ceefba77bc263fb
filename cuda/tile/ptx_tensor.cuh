// The instructions of tensor kernels, one function each: tensor maps, stmatrix, the budget of
// registers. With ptx.cuh and ptx_wgmma.cuh the only files with inline assembly.
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

// shared -> global. Joins the calling thread's current bulk group.
__device__ __forceinline__ void cp_async_bulk_tensor_store(const CUtensorMap* map, int32_t inner,
                                                           int32_t outer, int32_t batch,
                                                           const void* shared) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(shared_address(shared)), "r"(inner), "r"(outer), "r"(batch)
      : "memory");
}

// shared -> global: adds a box of fp32. Joins the calling thread's current bulk group.
__device__ __forceinline__ void cp_reduce_async_bulk_tensor_add(const CUtensorMap* map,
                                                                int32_t inner, int32_t outer,
                                                                int32_t batch, const void* shared) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group"
      " [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(shared_address(shared)), "r"(inner), "r"(outer), "r"(batch)
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

// Asked for again at each use, for those who have no register to keep it.
__device__ __forceinline__ uint32_t lane_id() {
  uint32_t lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Barrier 0 is __syncthreads().
__device__ __forceinline__ void named_barrier_sync(uint32_t barrier, uint32_t num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}

// Counts these threads without waiting: for others who wait in named_barrier_sync().
__device__ __forceinline__ void named_barrier_arrive(uint32_t barrier, uint32_t num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
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

__device__ __forceinline__ float2 ld_shared(const float2* shared) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(value.x), "=f"(value.y)
               : "r"(shared_address(shared))
               : "memory");
  return value;
}

__device__ __forceinline__ void st_shared(float2* shared, float2 value) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(shared_address(shared)), "f"(value.x),
               "f"(value.y)
               : "memory");
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

// ---- arithmetic of the special-function unit, subnormal results as zero

// 2^x, within 2 units in the last place; 2^-inf is 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace pk::ptx

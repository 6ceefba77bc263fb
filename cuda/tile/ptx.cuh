// One function per instruction. This file and, with the instructions of tensor kernels,
// ptx_tensor.cuh and ptx_wgmma.cuh are the only ones with inline assembly.
//
// Names follow the PTX mnemonic. Scopes and semantics are part of the name, so that a reader of a
// kernel sees the memory order at the call site. `sys` reaches the GPUs at the other end of NVLink,
// `gpu` stops at this one.
#pragma once

#include <cstdint>

namespace pk::ptx {

// ---- generic-proxy loads, stores and fences ----

__device__ __forceinline__ uint32_t ld_acquire_sys(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void st_release_sys(uint32_t* address, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Between the warps of a block; the word may lie in shared memory.
__device__ __forceinline__ uint32_t ld_acquire_cta(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.cta.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void st_release_cta(uint32_t* address, uint32_t value) {
  asm volatile("st.release.cta.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ uint64_t ld_relaxed_sys(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void st_relaxed_sys(uint64_t* address, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

// Two 8-byte words in one transaction. Each word is indivisible; the pair is not.
__device__ __forceinline__ ulonglong2 ld_relaxed_sys(const ulonglong2* address) {
  ulonglong2 value;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(value.x), "=l"(value.y)
               : "l"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ ulonglong2 ld_acquire_sys(const ulonglong2* address) {
  ulonglong2 value;
  asm volatile("ld.acquire.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(value.x), "=l"(value.y)
               : "l"(address)
               : "memory");
  return value;
}

__device__ __forceinline__ void st_relaxed_sys(ulonglong2* address, ulonglong2 value) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(value.x),
               "l"(value.y)
               : "memory");
}

__device__ __forceinline__ uint32_t ld_relaxed_gpu(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t ld_acquire_gpu(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ __forceinline__ void st_release_gpu(uint32_t* address, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t atom_add_relaxed_gpu(uint32_t* address, uint32_t value) {
  uint32_t old;
  asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(address), "r"(value)
               : "memory");
  return old;
}

// One more, or from `last` on zero.
__device__ __forceinline__ uint32_t atom_inc_relaxed_gpu(uint32_t* address, uint32_t last) {
  uint32_t old;
  asm volatile("atom.inc.relaxed.gpu.global.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(address), "r"(last)
               : "memory");
  return old;
}

__device__ __forceinline__ uint32_t atom_add_acq_rel_gpu(uint32_t* address, uint32_t value) {
  uint32_t old;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(address), "r"(value)
               : "memory");
  return old;
}

__device__ __forceinline__ void red_add_release_sys(uint32_t* address, uint32_t value) {
  asm volatile("red.add.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Orders this thread's generic-proxy accesses against async-proxy (bulk copy) accesses, in both
// directions.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

// ---- mbarriers

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

// Makes initialised mbarriers visible to the copy engine of this SM.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait_parity(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      "  .reg .pred p;\n"
      "  mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "  selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}

// ---- 1-D bulk copies (TMA without a tensor map): any global address, a peer's included

// global -> shared. 16-byte aligned, a multiple of 16 bytes; completes on the mbarrier's
// transaction count.
__device__ __forceinline__ void cp_async_bulk_load(void* shared, const void* global, uint32_t bytes,
                                                   uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// shared -> global. Joins the calling thread's current bulk group.
__device__ __forceinline__ void cp_async_bulk_store(void* global, const void* shared,
                                                    uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Sources of all but the newest kPending groups have been read: their shared memory may be reused.
template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// All but the newest kPending groups have been written to their destination.
template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- time and failure

__device__ __forceinline__ uint64_t globaltimer_ns() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// Of the multiprocessor on which the thread runs.
__device__ __forceinline__ uint32_t sm_id() {
  uint32_t id;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
  return id;
}

__device__ __forceinline__ void nanosleep(uint32_t ns) {
  asm volatile("nanosleep.u32 %0;" ::"r"(ns));
}

__device__ __forceinline__ void trap() { asm volatile("trap;"); }

}  // namespace pk::ptx

// Attention, backward: dQ, dK and dV from dO, with the weights made again from the log-sum-exp of
// the forward pass (FlashAttention-2, arXiv:2307.08691). Scores are transposed: a block has a tile
// of 128 keys, 64 a consumer, for which it collects dK and dV in registers, and walks over all
// blocks of 64 queries that see something of them.
//
//   S^T = K Q^T    dP^T = V dO^T    dV += P^T dO    dK += dS^T Q    dQ = dS K
//
// P^T, rounded, is an operand in registers. dS^T goes through shared memory, where both consumers
// read it: each makes half of the columns of dQ from all 128 keys. A step, the products in the
// order in which a consumer gives them to the tensor cores, and what it does meanwhile:
//
//   tensor cores  dP i    | dV i            | S i+1 | dQ i        | dK i               | dP i+1
//   consumer      round P | dS i, to shared | meet  | P i+1 = exp | dQ i to the outbox | round P
//
// It waits for no product without another one in the queue behind it, but for the first and the
// last step of a tile. Stages of Q are given back a step later than those of dO, so of width 128
// there is one more of them.
//
// dQ is a sum over key tiles, in ascending order, so that its bits are always the same: warps of
// the mover add it to global memory, each block of queries when its turn has come. Queries are
// walked from the last to the first: under a causal mask or with a window, tiles that were started
// together then follow each other by a step. Tiles are numbered by tickets, in the order in which
// blocks start with them, and a tile waits for tiles of lower numbers only. Of all tiles that are
// not finished the one with the lowest number waits for none, so every wait ends, with any number
// of blocks that run at the same time.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/attention_backward_consumer.cuh"
#include "kernels/attention_backward_movers.cuh"
#include "kernels/attention_backward_shared.cuh"

namespace pk::attention {

template <typename Shape, ptx::Type kType, bool kCapped>
struct Backward {
  using Memory = BackwardShared<Shape>;
  using Movers = BackwardMovers<Shape>;

  const BackwardArgs& args;
  Memory& shared;

  __device__ __forceinline__ void load() { Movers{args, shared}.load(); }
  __device__ __forceinline__ void communicate() { Movers{args, shared}.plan(); }
  __device__ __forceinline__ void copy(int which) { Movers{args, shared}.copy(which); }
  __device__ __forceinline__ void consume(int consumer) {
    BackwardConsumer<Shape, kType, kCapped>{args, ptx::kept(shared), consumer}.run();
  }
};

template <typename Shape, ptx::Type kType, bool kCapped>
__global__ void __launch_bounds__(Shape::Crew::kThreads, 1)
    attention_backward(const __grid_constant__ BackwardArgs args) {
  using Op = Backward<Shape, kType, kCapped>;
  using Crew = Shape::Crew;
  extern __shared__ char memory[];
  // The launch adds what this rounding takes.
  const auto address = reinterpret_cast<uintptr_t>(memory) + kSwizzleBytes - 1;
  auto& shared = *reinterpret_cast<typename Op::Memory*>(address & ~uintptr_t{kSwizzleBytes - 1});
  if (threadIdx.x == 0) shared.init();
  if (threadIdx.x == 32) {
    for (const CUtensorMap* map : {&args.q, &args.k, &args.v, &args.d_out, &args.dq})
      ptx::prefetch_tensor_map(map);
  }
  __syncthreads();
  Op op{args, shared};
  Crew::run(op);
}

}  // namespace pk::attention

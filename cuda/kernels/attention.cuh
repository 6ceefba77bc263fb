// Attention, forward: out = softmax(scale Q K^T) V for each head, block by block of the keys with a
// running softmax (FlashAttention-2, arXiv:2307.08691). The scores never leave registers.
//
//   mover        K 0 | K 1 | V 0 | K 2 | V 1 | ...      what no row of the tile sees is left out
//   consumer 0   QK 0 | softmax 0 | QK 1, PV 0 | softmax 1 | QK 2, PV 1 | ...
//   consumer 1          QK 0 | softmax 0 | QK 1, PV 0 | softmax 1 | ...
//
// A consumer has 64 rows of queries. It gives the tensor cores the products of two steps at a time,
// and makes the weights of the one while they are at the other and at the products of the other
// consumers, who take turns (FlashAttention-3, arXiv:2407.08608). The loader decides which blocks
// of keys are worth reading and tells the consumers with each.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/attention_memory.cuh"
#include "schedule/roles.cuh"
#include "schedule/store_tile.cuh"
#include "schedule/visibility.cuh"
#include "tile/pipeline.cuh"
#include "tile/register_tile.cuh"
#include "tile/shared_tile.cuh"
#include "tile/softmax.cuh"

namespace pk::attention {

template <typename Shape, ptx::Type kType>
struct Attention {
  using Memory = Shared<Shape>;
  using Crew = Shape::Crew;
  using At = Cursor<Shape::kStages>;
  using Scores = Accumulator<Shape::kBlock>;
  using Out = Accumulator<Shape::kDv>;
  using Weights = RoundedTile<kType, Shape::kBlock>;

  const Args& args;
  Memory& shared;

  // A tile of queries.
  struct Place {
    int batch, head, row;
  };

  __device__ __forceinline__ Place place(int number) const {
    const AttentionWalk::Tile tile = args.walk.tile(number);
    const int batch = tile.head / args.num_heads;
    return {batch, tile.head - batch * args.num_heads, tile.row * Shape::kM};
  }

  __device__ __forceinline__ Visibility sight(int batch) const {
    return {args.queries.of(batch), args.keys.of(batch), args.left, args.right};
  }

  // Warp 0 of the movers.
  __device__ __forceinline__ void load() {
    Cursor<1> at_q;
    At at_k, at_v;
    for (int turn = 0;; ++turn) {
      const int number =
          args.tickets == nullptr ? blockIdx.x + turn * gridDim.x : take_ticket(args.tickets);
      if (number >= args.walk.num_tiles()) {
        load_queries(number, {}, true, at_q);
        return;
      }
      const Place tile = place(number);
      const int kv_head = tile.head / args.group;
      const Visibility sight = this->sight(tile.batch);
      auto found = sight.next(tile.row, Shape::kM, 0, Shape::kBlock);
      load_queries(number, tile, found.seen == Seen::kNone, at_q);
      int values_of = -1;  // the block whose values have still to come
      while (found.seen != Seen::kNone) {
        const int key = found.col;
        const bool masked = found.seen == Seen::kSome;
        found = sight.next(tile.row, Shape::kM, key + Shape::kBlock, Shape::kBlock);
        load_keys(tile.batch, kv_head, {key, masked, found.seen == Seen::kNone}, at_k);
        if (values_of >= 0) load_values(tile.batch, kv_head, values_of, at_v);
        values_of = key;
      }
      if (values_of >= 0) load_values(tile.batch, kv_head, values_of, at_v);
    }
  }

  __device__ __forceinline__ void consume(int consumer) {
    Memory& shared = ptx::kept(this->shared);
    Cursor<1> at_q;
    At at_k, at_v;
    Crew::begin_turns(consumer);
    for (;; at_q.advance()) {
      shared.queries.wait_full(at_q);
      const int number = shared.tile;
      if (number >= args.walk.num_tiles()) break;
      const Place tile = place(number);
      Out out{};
      RunningSoftmax softmax;
      if (!shared.sees_nothing) {
        attend(shared, tile, consumer, out, softmax, at_k, at_v);
      } else {
        sync_consumer(consumer);  // all have read that
        if (is_first_thread()) shared.queries.release(0);
      }
      finish(shared, tile, consumer, out, softmax);
    }
    Crew::end_turns(consumer);
    if (ptx::elect_one()) ptx::cp_async_bulk_wait_group_read<0>();
  }

 private:
  __device__ __forceinline__ void load_queries(int number, const Place& tile, bool sees_nothing,
                                               Cursor<1>& at) {
    shared.queries.wait_empty(at);
    if (ptx::elect_one()) {
      shared.tile = number;
      shared.sees_nothing = sees_nothing;
      if (sees_nothing) {
        shared.queries.fill(0);
      } else {
        load_panels(shared.q, &args.q, tile.row, tile.head * Shape::kD, tile.batch,
                    shared.queries.expect(at, sizeof(shared.q)), ptx::kEvictFirst);
      }
    }
    at.advance();
  }

  __device__ __forceinline__ void load_keys(int batch, int head, typename Memory::Step step,
                                            At& at) {
    shared.keys.wait_empty(at);
    if (ptx::elect_one()) {
      shared.step[at.stage] = step;
      load_panels(shared.k[at.stage], &args.k, step.key, head * Shape::kD, batch,
                  shared.keys.expect(at, sizeof(shared.k[0])), ptx::kEvictNormal);
    }
    at.advance();
  }

  __device__ __forceinline__ void load_values(int batch, int head, int key, At& at) {
    shared.values.wait_empty(at);
    if (ptx::elect_one()) {
      load_panels(shared.v[at.stage], &args.v, key, head * Shape::kDv, batch,
                  shared.values.expect(at, sizeof(shared.v[0])), ptx::kEvictNormal);
    }
    at.advance();
  }

  // All blocks of keys that the tile sees.
  __device__ __forceinline__ void attend(Memory& shared, const Place& tile, int consumer, Out& out,
                                         RunningSoftmax& softmax, At& at_k, At& at_v) {
    const int row = tile.row + consumer * 64;
    Scores scores;
    Weights weights;
    float2 scale;
    typename Memory::Step step{};
    const auto scores_of = [&] {  // the products QK of the next block
#pragma unroll
      for (int i = 0; i < Shape::kD / kWgmmaK; ++i) {
        constexpr int kSteps = kPanel / kWgmmaK;
        ptx::wgmma<kType, 0, 0>(scores.value,
                                shared.q[i / kSteps].descriptor(consumer * 64, i % kSteps),
                                shared.k[at_k.stage][i / kSteps].descriptor(0, i % kSteps), i > 0);
      }
      ptx::wgmma_commit_group();
    };
    const auto weighted_values = [&] {
#pragma unroll
      for (int i = 0; i < Shape::kBlock / kWgmmaK; ++i) {
        ptx::wgmma<kType, 1>(out.value, weights.value + 4 * i,
                             shared.v[at_v.stage][0].descriptor_by_rows(i), 1);
      }
      ptx::wgmma_commit_group();
    };
    const auto take_scores = [&] {  // when the products are there
      ptx::written(scores.value);
      if (is_first_thread()) {
        shared.keys.release(at_k.stage);
        if (step.last) shared.queries.release(0);
      }
      at_k.advance();
      weigh(scores, tile.batch, step, row, softmax, scale);
    };
    const auto give_back_values = [&] {
      ptx::written(out.value);
      if (is_first_thread()) shared.values.release(at_v.stage);
      at_v.advance();
    };

    shared.keys.wait_full(at_k);
    step = shared.step[at_k.stage];
    Crew::take_turn(consumer);
    ptx::wgmma_fence();
    scores_of();
    Crew::pass_turn(consumer);
    ptx::wgmma_wait_group<0>();
    take_scores();
    weights.round(scores);
    while (!step.last) {
      shared.keys.wait_full(at_k);
      step = shared.step[at_k.stage];
      Crew::take_turn(consumer);
      ptx::wgmma_fence();
      scores_of();
      shared.values.wait_full(at_v);
      ptx::wgmma_fence();
      weighted_values();
      Crew::pass_turn(consumer);
      ptx::wgmma_wait_group<1>();
      take_scores();
      ptx::wgmma_wait_group<0>();
      give_back_values();
      scale_rows(out, scale);
      weights.round(scores);
    }
    shared.values.wait_full(at_v);
    ptx::wgmma_fence();
    weighted_values();
    ptx::wgmma_wait_group<0>();
    give_back_values();
  }

  // Weights of a block's scores, and what the sums so far are to be multiplied by.
  __device__ __forceinline__ void weigh(Scores& scores, int batch,
                                        const typename Memory::Step& step, int row,
                                        RunningSoftmax& softmax, float2& scale) const {
    if (args.logits.is_capped) {
#pragma unroll
      for (int i = 0; i < Scores::kCount; ++i)
        scores.value[i] = tanh_of(scores.value[i] * args.logits.scale);
    }
    // What masks need is made when one is: there are no registers to keep it.
    if (step.masked) sight(batch).mask(scores, row, step.key, -INFINITY);
    scale = softmax.take(scores, args.logits.unit);
    // A quarter of the weights is made before the wait for PV, and some of the sums.
    ptx::made_before_wait(scores.value[Scores::kCount - 3]);
    ptx::made_before_wait(scores.value[Scores::kCount - 1]);
  }

  // The result and the log-sum-exp of a consumer's rows.
  __device__ __forceinline__ void finish(Memory& shared, const Place& tile, int consumer, Out& out,
                                         const RunningSoftmax& softmax) const {
    float log_sum_exp[2];
    scale_rows(out, softmax.finish(args.logits.unit, log_sum_exp));
    const int row = tile.row + consumer * 64, num_rows = args.queries.count;
    if (threadIdx.x % 4 == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = row + Out::row() + 8 * half;
        if (r < num_rows)
          args.log_sum_exp[(int64_t{tile.batch} * num_rows + r) * args.num_heads + tile.head] =
              log_sum_exp[half];
      }
    }
    const int col = tile.head * Shape::kDv;
    if (args.out.float32) {
      const int first = tile.batch * num_rows;
      args.out.store(out, first + row, col, first + num_rows);
      return;
    }
    RoundedTile<kType, Shape::kDv> rounded;
    rounded.round(out);
    store_panels(shared.out[consumer][threadIdx.x % 128 / 32], rounded, &args.out.map, tile.batch,
                 row, col);
  }
};

template <typename Shape, ptx::Type kType>
__global__ void __launch_bounds__(Shape::Crew::kThreads, 1)
    attention(const __grid_constant__ Args args) {
  using Op = Attention<Shape, kType>;
  extern __shared__ char memory[];
  // The launch adds what this rounding takes.
  const auto address = reinterpret_cast<uintptr_t>(memory) + kSwizzleBytes - 1;
  auto& shared = *reinterpret_cast<typename Op::Memory*>(address & ~uintptr_t{kSwizzleBytes - 1});
  if (threadIdx.x == 0) {
    shared.queries.init(Shape::Crew::kConsumers);
    shared.keys.init(Shape::Crew::kConsumers);
    shared.values.init(Shape::Crew::kConsumers);
  }
  if (threadIdx.x == 32) {
    ptx::prefetch_tensor_map(&args.q);
    ptx::prefetch_tensor_map(&args.k);
    ptx::prefetch_tensor_map(&args.v);
    if (!args.out.float32) ptx::prefetch_tensor_map(&args.out.map);
  }
  __syncthreads();
  Op op{args, shared};
  Shape::Crew::run(op);
}

}  // namespace pk::attention

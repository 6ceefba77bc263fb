// A consumer of attention's backward pass: 64 keys of a tile. What it does when is in
// attention_backward.cuh.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/attention_backward_shared.cuh"
#include "tile/softmax.cuh"

namespace pk::attention {

template <typename Shape, ptx::Type kType, bool kCapped>
struct BackwardConsumer {
  using Memory = BackwardShared<Shape>;
  static constexpr int kD = Shape::kD;
  using AtO = Cursor<Shape::kStagesO>;
  using Scores = Accumulator<kQueries>;
  using Rounded = RoundedTile<kType, kQueries>;
  using Sum = Accumulator<kD>;        // dK or dV
  using Share = Accumulator<kD / 2>;  // of dQ

  const BackwardArgs& args;
  Memory& shared;
  int consumer;

  Cursor<Shape::kStagesQ> at_q;
  uint32_t num_out;  // blocks of dO so far
  Cursor<2> at_parcel;
  // Of the step at hand: scores, then weights, with a cap times its derivative; and the weights.
  Scores weights;
  Rounded rounded;

  __device__ __forceinline__ void run() {
    pass_ds();
    while (true) {
      shared.queries.wait_full(at_q);
      const int flags = shared.steps[at_q.stage].flags;
      if (flags & Step::kEnd) break;
      Sum dk{}, dv{};
      if (!(flags & Step::kNothing)) attend(flags, dk, dv);
      const Step step = shared.steps[at_q.stage];
      __syncwarp();
      release(shared.queries, at_q.stage);
      at_q.advance();
#pragma unroll
      for (int i = 0; i < Sum::kCount; ++i) dk.value[i] *= args.scale;
      store(dk, args.dk, step, Content::kDk);
      store(dv, args.dv, step, Content::kDv);
    }
    take_ds();
    for (int i = 0; i < 2; ++i) {  // both copiers come to their end
      shared.parcels.wait_empty(at_parcel);
      send(Step{}, Content::kNone);
    }
  }

 private:
  // All steps of a tile. The last one's stage of Q is left for the caller to give back.
  __device__ __forceinline__ void attend(int flags, Sum& dk, Sum& dv) {
    const Cursor<1> at_tile{0, flags & Step::kOdd ? 1u : 0u};
    shared.keys.wait_full(at_tile);
    ptx::wgmma_fence();
    scores_of(weights, shared.k, shared.q[at_q.stage]);
    ptx::wgmma_wait_group<0>();
    flags = weigh();
    shared.values.wait_full(at_tile);
    while (!(flags & Step::kLast)) flags = step<false>(flags, dk, dv);
    step<true>(flags, dk, dv);
  }

  // From the weights of a step to those of the next, whose flags it returns.
  template <bool kLast>
  __device__ __forceinline__ int step(int flags, Sum& dk, Sum& dv) {
    const AtO at_o = AtO::after(num_out++);
    const auto& d_out = shared.d_out[at_o.stage];
    shared.d_outs.wait_full(at_o);
    Scores ds;
    ptx::wgmma_fence();
    scores_of(ds, shared.v, d_out);
    ptx::wgmma_wait_group<1>();  // dK of the step before
    if (!(flags & Step::kFirst))
      release(shared.queries, at_q.stage == 0 ? Shape::kStagesQ - 1 : at_q.stage - 1);
    if constexpr (!kCapped) rounded.round(weights);
    ptx::wgmma_fence();
    add_dv(dv, d_out);
    ptx::wgmma_wait_group<1>();
    ptx::written(ds.value);
    if constexpr (kLast) release(shared.values, 0);
    take_ds();
    write_ds(ds, shared.delta[at_o.stage]);
    ptx::fence_proxy_async_shared();

    const uint32_t stage = at_q.stage;
    if constexpr (!kLast) {
      at_q.advance();
      shared.queries.wait_full(at_q);
      ptx::wgmma_fence();
      scores_of(weights, shared.k, shared.q[at_q.stage]);
    }
    ptx::wgmma_wait_group<kLast ? 0 : 1>();  // dV, whose operand's registers are dQ's
    release(shared.d_outs, at_o.stage);
    ptx::named_barrier_sync(kDsThere, 256);
    Share dq;
    ptx::wgmma_fence();
    dq_of(dq);
    add_dk(dk, shared.q[stage]);
    if constexpr (!kLast) {
      ptx::wgmma_wait_group<2>();
      flags = weigh();
    }
    ptx::wgmma_wait_group<1>();
    ptx::written(dq.value);
    pass_ds();
    if constexpr (kLast) release(shared.keys, 0);
    shared.parcels.wait_empty(at_parcel);
    shared.outbox[at_parcel.stage].write(dq, consumer, args.scale);
    send(shared.steps[stage], Content::kDq);
    if constexpr (kLast) {
      ptx::wgmma_wait_group<0>();
      ptx::written(dk.value);
      ptx::written(dv.value);
    } else if constexpr (kCapped) {  // read again: there is no register to keep it
      ptx::forget();
      flags = shared.steps[at_q.stage].flags;
    }
    return flags;
  }

  // ---- Products, each a group

  // rows[128 keys, D] block[64 queries, D]^T of the consumer's 64 keys.
  __device__ __forceinline__ void scores_of(Scores& scores, const typename Memory::Tile& rows,
                                            const typename Memory::Block& block) const {
    constexpr int kInPanel = kPanel / kWgmmaK;
#pragma unroll
    for (int i = 0; i < kD / kWgmmaK; ++i) {
      ptx::wgmma<kType, 0, 0>(scores.value,
                              rows[i / kInPanel].descriptor(consumer * 64, i % kInPanel),
                              block[i / kInPanel].descriptor(0, i % kInPanel), i > 0);
    }
    ptx::wgmma_commit_group();
  }

  // P^T[64 keys, 64 queries] dO[64 queries, D]
  __device__ __forceinline__ void add_dv(Sum& dv, const typename Memory::Block& d_out) const {
#pragma unroll
    for (int i = 0; i < kQueries / kWgmmaK; ++i)
      ptx::wgmma<kType, 1>(dv.value, rounded.value + 4 * i, queries_as_k(d_out, i), 1);
    ptx::wgmma_commit_group();
  }

  // dS^T[64 keys, 64 queries] Q[64 queries, D]
  __device__ __forceinline__ void add_dk(Sum& dk, const typename Memory::Block& q) const {
    const uint16_t* ds = shared.ds[4 * consumer].data;
#pragma unroll
    for (int i = 0; i < kQueries / kWgmmaK; ++i) {
      ptx::wgmma<kType, 0, 1>(dk.value, panel_descriptor<Major::kK, kKeys>(ds, i),
                              queries_as_k(q, i), 1);
    }
    ptx::wgmma_commit_group();
  }

  // dS[64 queries, 128 keys] K[128 keys, the consumer's half of D]
  __device__ __forceinline__ void dq_of(Share& dq) const {
    const int col = consumer * (kD / 2);
    const uint16_t* k = shared.k[col / kPanel].data + col % kPanel;
#pragma unroll
    for (int i = 0; i < kKeys / kWgmmaK; ++i) {
      ptx::wgmma<kType, 1, 1>(dq.value, panel_descriptor<Major::kMn, kKeys>(shared.ds[0].data, i),
                              panel_descriptor<Major::kMn, kKeys>(k, i), i > 0);
    }
    ptx::wgmma_commit_group();
  }

  // 16 of a block's queries, as k, with all of D.
  static __device__ __forceinline__ uint64_t queries_as_k(const typename Memory::Block& block,
                                                          int step) {
    return panel_descriptor<Major::kMn, kQueries>(block[0].data, step);
  }

  // ---- Arithmetic

  // Of a row of kQueries floats in shared memory: this thread's columns 8 j and on.
  static __device__ __forceinline__ float2 pair_of(const float (&row)[kQueries], int j) {
    return ptx::ld_shared(reinterpret_cast<const float2*>(row + Scores::col() + 8 * j));
  }

  // Weights of the next step from its scores. Returns its flags.
  __device__ __forceinline__ int weigh() {
    const Step& step = shared.steps[at_q.stage];
    const int flags = step.flags;
    ptx::written(weights.value);
    if constexpr (kCapped) {
#pragma unroll
      for (int i = 0; i < Scores::kCount; ++i)
        weights.value[i] = tanh_of(weights.value[i] * args.logits.scale);
    }
    // Hidden scores have a weight of zero; under a cap their square is still a number.
    if (flags & Step::kMasked) {
      args.sight(step.batch)
          .mask(weights, step.key + consumer * 64, step.query, kCapped ? -1e15f : -INFINITY);
    }
    const float unit = args.logits.unit;
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < kQueries / 8; ++j) {
      const float2 lse = pair_of(shared.lse[at_q.stage], j);
      float* const score = weights.value + 4 * j;
      float weight[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        weight[i] = ptx::exp2_approx(fmaf(score[i], unit, i % 2 == 0 ? -lse.x : -lse.y));
      bits |= __float_as_uint(weight[1]) | __float_as_uint(weight[3]);
      if constexpr (kCapped) {
        rounded.value[2 * j] = pack<kType>(weight[0], weight[1]);
        rounded.value[2 * j + 1] = pack<kType>(weight[2], weight[3]);
#pragma unroll
        for (int i = 0; i < 4; ++i) weight[i] *= fmaf(-score[i], score[i], 1);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) score[i] = weight[i];
    }
    ptx::made_before_wait(bits);
    return flags;
  }

  // dS^T = P^T (dP^T - delta), rounded, to shared memory.
  __device__ __forceinline__ void write_ds(const Scores& dp,
                                           const float (&deltas)[kQueries]) const {
    ResultPanel& panel = shared.ds[4 * consumer + threadIdx.x % 128 / 32];
#pragma unroll
    for (int j = 0; j < kQueries / 8; j += 2) {
      uint32_t four[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 delta = pair_of(deltas, j + i);
        const float *const x = dp.value + 4 * (j + i), *const weight = weights.value + 4 * (j + i);
        four[2 * i] = pack<kType>((x[0] - delta.x) * weight[0], (x[1] - delta.y) * weight[1]);
        four[2 * i + 1] = pack<kType>((x[2] - delta.x) * weight[2], (x[3] - delta.y) * weight[3]);
      }
      Rounded::write_columns(panel, j / 2, four);
    }
  }

  // ---- What consumers tell each other and the movers

  // Barriers: dS is all there; and dS may be written, since the other consumer has read it.
  static constexpr int kDsThere = 5, kDsFree = 3;  // 1 and 2 are those of sync_consumer()
  static __device__ __forceinline__ void take_ds() {
    ptx::named_barrier_sync(kDsFree + threadIdx.x / 128, 256);
  }
  static __device__ __forceinline__ void pass_ds() {
    ptx::named_barrier_arrive(kDsFree + 1 - threadIdx.x / 128, 256);
  }

  // Each warp gives a stage back for itself.
  template <int kStages>
  static __device__ __forceinline__ void release(Pipeline<kStages>& pipeline, uint32_t stage) {
    if (ptx::elect_one()) pipeline.release(stage);
  }

  // What this warp has written of a parcel is there. The first warp writes the label.
  __device__ __forceinline__ void send(const Step& step, Content content) {
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (ptx::elect_one()) {
      if (threadIdx.x < 32) {
        shared.labels[at_parcel.stage] = step;
        shared.labels[at_parcel.stage].content = content;
      }
      shared.parcels.fill(at_parcel.stage);
    }
    at_parcel.advance();
  }

  // dK or dV of the consumer's keys.
  __device__ __forceinline__ void store(const Sum& sum, const Result& result, const Step& step,
                                        Content content) {
    if (result.float32) {
      const int first = step.batch * args.keys.count;
      result.store(sum, first + step.key + consumer * 64, step.kv_head * kD,
                   first + args.keys.count);
      return;
    }
    RoundedTile<kType, kD> tile;
    tile.round(sum);
    shared.parcels.wait_empty(at_parcel);
    shared.outbox[at_parcel.stage].write(tile, consumer);
    send(step, content);
  }
};

}  // namespace pk::attention

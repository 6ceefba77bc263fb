// The warps of attention's backward pass that move data: one plans, one loads, two store.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/attention_backward_shared.cuh"

namespace pk::attention {

template <typename Shape>
struct BackwardMovers {
  using Memory = BackwardShared<Shape>;
  static constexpr int kD = Shape::kD;
  using AtQ = Cursor<Shape::kStagesQ>;
  using AtO = Cursor<Shape::kStagesO>;

  const BackwardArgs& args;
  Memory& shared;

  // ---- Warp 1 of the movers: which tiles, and what to load for them. It has few registers: what
  // it knows of the tile and of the next step is in shared memory.

  __device__ __forceinline__ void plan() {
    if (ptx::elect_one()) shared.draft = {}, shared.num_planned = 0;
    __syncwarp();
    for (int number = take_ticket(args.ticket); number < args.walk.num_tiles();
         number = take_ticket(args.ticket)) {
      if (ptx::elect_one()) {
        const AttentionWalk::Tile tile = args.walk.tile(number);
        const int batch = tile.head / args.num_kv_heads;
        const int kv_head = tile.head - batch * args.num_kv_heads;
        shared.draft = {batch, 0, kv_head, tile.row * kKeys, -1, 0, Step::kFirst, Content::kDq};
        shared.head = kv_head * args.group;
        shared.sight = args.sight(batch);
      }
      __syncwarp();
      plan_tile();
    }
    tell(Step::kEnd);
  }

  // ---- Warp 0 of the movers

  __device__ __forceinline__ void load() {
    uint32_t num_out = 0, num_tiles = 0;
    for (uint32_t count = 0, flags = 0; !(flags & Step::kEnd); ++count) {
      const auto at = Cursor<kPlanned>::after(count);
      const auto at_q = AtQ::after(count);
      shared.planned.wait_full(at);
      const Step& step = shared.plan[at.stage];
      flags = step.flags;
      shared.queries.wait_empty(at_q);
      if (ptx::elect_one()) {
        shared.steps[at_q.stage] = step;
        if (num_tiles % 2 != 0) shared.steps[at_q.stage].flags |= Step::kOdd;
      }
      if (flags & (Step::kNothing | Step::kEnd)) {
        if (ptx::elect_one()) shared.queries.fill(at_q.stage);
      } else {
        load_step(step, at_q, AtO::after(num_out++));
        if (flags & Step::kFirst) load_tile(step, Cursor<1>::after(num_tiles++));
      }
      __syncwarp();
      if (ptx::elect_one()) shared.planned.release(at.stage);
    }
  }

  // ---- Warps 2 and 3, which take turns with the parcels

  __device__ __forceinline__ void copy(int which) {
    for (Cursor<2> at{static_cast<uint32_t>(which), 0};; ++at.round) {
      shared.parcels.wait_full(at);
      const Step label = shared.labels[which];
      if (label.content == Content::kNone) return;
      if (ptx::elect_one()) {
        if (label.content == Content::kDq) {
          add(label, which);
        } else {
          const CUtensorMap* map = label.content == Content::kDk ? &args.dk.map : &args.dv.map;
          for (int i = 0; i < kD / kPanel; ++i) {
            ptx::cp_async_bulk_tensor_store(map, label.kv_head * kD + i * kPanel, label.key,
                                            label.batch, shared.outbox[which].panel(i, 0).data);
          }
          ptx::cp_async_bulk_commit_group();
          ptx::cp_async_bulk_wait_group_read<0>();
          shared.parcels.release(which);
        }
      }
      __syncwarp();
    }
  }

 private:
  // All heads see the same. Whether a step is the last is known when there is no other.
  __device__ __forceinline__ void plan_tile() {
    Step& step = shared.draft;
    auto& window = shared.window;
    while (true) {
      if (ptx::elect_one()) window.end = args.query_blocks * kQueries;
      __syncwarp();
      while (window.end > 0) {
        look();
        while (window.seen != 0) {
          if (step.query >= 0) tell(0);
          __syncwarp();
          if (ptx::elect_one()) {
            const int i = __ffs(window.seen) - 1;
            step.head = shared.head;
            step.query = window.query(i);
            step.turn = window.turns[i];
            if (window.masked >> i & 1) step.flags |= Step::kMasked;
            window.seen &= window.seen - 1;
          }
          __syncwarp();
        }
        if (ptx::elect_one()) window.end -= 32 * kQueries;
        __syncwarp();
      }
      if (step.query < 0 || shared.head == (step.kv_head + 1) * args.group - 1) break;
      __syncwarp();
      if (ptx::elect_one()) ++shared.head;
    }
    tell(step.query < 0 ? Step::kNothing : Step::kLast);
  }

  // What the window's blocks of queries, a lane each, see of the tile; and what the turn of each
  // must have come to.
  __device__ __forceinline__ void look() {
    auto& window = shared.window;
    const Seen what = see(shared.draft.key);
    const uint32_t seen = __ballot_sync(0xFFFFFFFF, what != Seen::kNone);
    const uint32_t masked = __ballot_sync(0xFFFFFFFF, what == Seen::kSome);
    if (ptx::elect_one()) window.seen = seen, window.masked = masked;
    const int before = shared.draft.key - kKeys;  // mostly it is this tile that adds before
    const bool found = before >= 0 && see(before) != Seen::kNone;
    window.turns[ptx::lane_id()] = found ? 1 + before / kKeys : 0;
    const uint32_t all_found = __ballot_sync(0xFFFFFFFF, found);
    __syncwarp();
    if (ptx::elect_one()) window.open = window.seen & ~all_found;
    __syncwarp();
    while (window.open != 0) {
      const int row = shared.sight.previous_row(shared.draft.key - kKeys, kKeys,
                                                window.query(__ffs(window.open) - 1), kQueries);
      __syncwarp();
      if (ptx::elect_one()) {
        if (row >= 0) window.turns[__ffs(window.open) - 1] = 1 + row / kKeys;
        window.open &= window.open - 1;
      }
      __syncwarp();
    }
  }

  // The lane's block of the window and a tile of keys.
  __device__ __forceinline__ Seen see(int key) const {
    const int query = shared.window.query(ptx::lane_id());
    return query < 0 ? Seen::kNone : shared.sight.of_tile(key, kKeys, query, kQueries);
  }

  // The draft, with `flags`.
  __device__ __forceinline__ void tell(int flags) {
    const auto at = Cursor<kPlanned>::after(shared.num_planned);
    shared.planned.wait_empty(at);
    __syncwarp();
    if (ptx::elect_one()) {
      Step& step = shared.draft;
      shared.plan[at.stage] = step;
      shared.plan[at.stage].flags |= flags;
      step.flags = 0;
      ++shared.num_planned;
      shared.planned.fill(at.stage);
    }
    __syncwarp();
  }

  __device__ __forceinline__ void load_step(const Step& step, const AtQ& at_q, const AtO& at_o) {
    const int64_t row =
        (int64_t{step.batch} * args.num_heads + step.head) * args.query_blocks * kQueries +
        step.query;
    constexpr int kFloatBytes = kQueries * 4;
    if (ptx::elect_one()) {
      uint64_t* full = shared.queries.expect(at_q, sizeof(shared.q[0]) + kFloatBytes);
      load_panels(shared.q[at_q.stage], &args.q, step.query, step.head * kD, step.batch, full,
                  ptx::kEvictNormal);
      ptx::cp_async_bulk_load(shared.lse[at_q.stage], args.lse + row, kFloatBytes, full);
    }
    shared.d_outs.wait_empty(at_o);
    if (ptx::elect_one()) {
      uint64_t* full = shared.d_outs.expect(at_o, sizeof(shared.d_out[0]) + kFloatBytes);
      load_panels(shared.d_out[at_o.stage], &args.d_out, step.query, step.head * kD, step.batch,
                  full, ptx::kEvictNormal);
      ptx::cp_async_bulk_load(shared.delta[at_o.stage], args.delta + row, kFloatBytes, full);
    }
  }

  __device__ __forceinline__ void load_tile(const Step& step, const Cursor<1>& at) {
    shared.values.wait_empty(at);  // V is given back before K
    if (ptx::elect_one())
      load_panels(shared.v, &args.v, step.key, step.kv_head * kD, step.batch,
                  shared.values.expect(at, sizeof(shared.v)), ptx::kEvictFirst);
    shared.keys.wait_empty(at);
    if (ptx::elect_one())
      load_panels(shared.k, &args.k, step.key, step.kv_head * kD, step.batch,
                  shared.keys.expect(at, sizeof(shared.k)), ptx::kEvictFirst);
  }

  // One thread: a step's dQ, when it is the tile's turn.
  __device__ __forceinline__ void add(const Step& step, int which) {
    const int block = (step.batch * args.num_heads + step.head) * args.query_blocks;
    uint32_t* turn = args.turns + block + step.query / kQueries;
    // Acquire: pairs with the release below of the tile before, whose sums are in place. That tile
    // has a lower number: the wait ends, see attention_backward.cuh.
    while (ptx::ld_acquire_gpu(turn) != step.turn) {
    }
    ptx::fence_proxy_async();
#pragma unroll
    for (int i = 0; i < kD / kFloats; ++i) {
      ptx::cp_reduce_async_bulk_tensor_add(&args.dq, step.head * kD + i * kFloats, step.query,
                                           step.batch, shared.outbox[which].box(i));
    }
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group_read<0>();
    shared.parcels.release(which);
    ptx::cp_async_bulk_wait_group<0>();
    ptx::fence_proxy_async();
    ptx::st_release_gpu(turn, 1 + step.key / kKeys);
  }
};

}  // namespace pk::attention

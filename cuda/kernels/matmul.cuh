// The matrix product: C[m, n] = A[m, k] B[k, n], fp32 accumulation. The main loop of every op that
// has one: an op brings a source (what to wait for before rows of A are read) and an epilogue (what
// becomes of an element of C).
//
//   mover        loads k | loads k + 1 | ...   | loads of the next tile
//   consumer 0       wgmma k | wgmma k + 1 | ... | round | wgmma 0, store | wgmma 1, store | ...
//   consumer 1       wgmma k | wgmma k + 1 | ... | round | wgmma 0, store | wgmma 1, store | ...
//
// Persistent blocks walk the tiles (matmul_walk.h). The loads run through a ring of stages, across
// tiles, so that the next tile is on its way while this one is stored.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "schedule/cluster_sum.cuh"
#include "schedule/matmul_walk.h"
#include "schedule/roles.cuh"
#include "schedule/store_tile.cuh"
#include "tile/pipeline.cuh"
#include "tile/register_tile.cuh"
#include "tile/shared_tile.cuh"
#include "tile/timeline.cuh"

namespace pk::matmul {

using timeline::Did;

// A walk says which block makes which tiles: MatmulWalk or GroupedWalk.
template <typename Walk>
struct Args {
  CUtensorMap a, b;  // of a batch of one, of a matrix for each group
  Result c;
  uint32_t step_bytes;  // that a step's copies bring
  ptx::CachePolicy policy_b;
  Walk walk;
};

// A block's tile of C. If two consumers share it they are one above the other, or side by side if
// it has 64 rows.
template <int kRows, int kCols, int kNumStages, int kNumConsumers = 2>
struct TileShape {
  using Crew = Roles<kNumConsumers>;
  static constexpr int kM = kRows, kN = kCols, kStages = kNumStages;
  static constexpr bool kSideBySide = kM == 64;
  static constexpr int kConsumerN = kSideBySide ? kN / kNumConsumers : kN;
  // Whether a consumer's warps wait for peers between steps, each for something else, and so come
  // apart without a bound: then every one gives its stages back by itself. Else, where they wait
  // for this SM alone, one thread does for all four, which is 3 to 4% faster; that wgmma and the
  // ring keep them within a round is not promised by PTX.
  static constexpr bool kWarpsApart = false;
  static_assert(kSideBySide || kM == 64 * kNumConsumers);
};

template <typename Shape, Major kMajorA, Major kMajorB>
struct Shared {
  using A = OperandTile<Shape::kM, kMajorA>;
  using B = OperandTile<Shape::kN, kMajorB>;

  A a[Shape::kStages];
  B b[Shape::kStages];
  PanelBuffers c[Shape::Crew::kConsumers];
  Pipeline<Shape::kStages> pipeline;
};

// Where the rows of A for a part are: the map of their matrix, and the first of them in it.
struct RowsOfA {
  const CUtensorMap* map;
  int first;
};

// A is whole before the kernel starts. A source whose rows come bit by bit has wait_step(step) too,
// for the columns of each step of the part.
struct WholeSource {
  // Until the rows of the part, which begin at `row` of the result, may be read.
  template <typename Part>
  __device__ __forceinline__ RowsOfA wait(const CUtensorMap& a, const Part&, int row) const {
    return {&a, row};
  }
};

template <typename Shape, ptx::Type kType, Major kMajorA, Major kMajorB, typename Walk,
          typename Source, typename Epilogue>
struct Matmul {
  using Memory = Shared<Shape, kMajorA, kMajorB>;
  using At = Cursor<Shape::kStages>;
  using Tile = Accumulator<Shape::kConsumerN>;
  using Part = Walk::Part;
  using Crew = Shape::Crew;
  using Sum = ClusterSum<Crew::kConsumers, Shape::kConsumerN>;
  static_assert(Sum::kBytes <= sizeof(Memory::a) + sizeof(Memory::b));
  static constexpr int kGivers = Crew::kConsumers * (Shape::kWarpsApart ? 4 : 1);
  static constexpr ptx::Type kResult = ptx::half_of(kType);
  // wgmma adds products of e4m3 up in some 14 bits, so that each step's sum goes into registers of
  // its own, and the steps are added up in fp32.
  static constexpr bool kSumOfSteps = kType == ptx::Type::kE4m3;

  const Args<Walk>& args;
  Memory& shared;
  Source source;
  Epilogue epilogue;
  int block;  // its number in the walk

  // Warp 0 of the movers.
  __device__ __forceinline__ void load() {
    At at;
    typename Walk::Parts parts(args.walk, block);
    for (Part part = parts.next(); part.num_steps > 0; part = parts.next()) {
      const RowsOfA rows = source.wait(args.a, part, part.row(Shape::kM));
      const int col = part.n * Shape::kN;
      for (int step = 0; step < part.num_steps; ++step) {
        if constexpr (requires { source.wait_step(step); }) source.wait_step(step);
        load_step(rows, col, (part.begin + step) * kBlockK, part.group(), at);
      }
    }
  }

  __device__ __forceinline__ void consume(int consumer) {
    Memory& shared = ptx::kept(this->shared);
    const int row = Shape::kSideBySide ? 0 : consumer * 64;
    const int col = Shape::kSideBySide ? consumer * Shape::kConsumerN : 0;
    PanelBuffers& buffers = shared.c[consumer];
    PendingTile<kResult, Shape::kConsumerN> pending;
    At at;
    typename Walk::Parts parts(args.walk, block);
    int end_row = INT32_MAX;  // of the pending tile
    Part part = parts.next(), next{};
    for (; part.num_steps > 0; part = next) {
      const int tile_row = part.row(Shape::kM) + row, tile_col = part.n * Shape::kN + col;
      pending.spread(part.num_steps, consumer, Crew::kConsumers);
      const auto meanwhile = [&](int step) {
        if (step == 0) next = parts.next();
        pending.store_due(step, buffers, args.c, end_row);
      };
      if (tile_row >= part.end_row()) {  // the other consumer's rows are all there are
        skip(shared.pipeline, consumer, part.num_steps, at, meanwhile);
        continue;
      }
      Tile tile;
      multiply(shared, tile, row, col, part.num_steps, at, meanwhile);
      if (is_first_thread())
        timeline::lap(Did::kMultiply, timeline::tile(tile_row / Shape::kM, part.n));
      pending.store_rest(buffers, args.c, end_row);
      end_row = part.end_row();
      if (!args.walk.is_whole(part)) {
        ResultPanel& panel = buffers[threadIdx.x % 128 / 32][0];
        if (ptx::elect_one()) ptx::cp_async_bulk_wait_group_read<0>();
        Sum{reinterpret_cast<float4*>(shared.a)}.run(
            tile, consumer, args.c.rows - tile_row, [&](int row, int col, Strip& strip) {
              store(strip, panel, tile_row + row, tile_col + col);
            });
        return;  // it is the last part
      }
      epilogue.template apply<kType>(tile, tile_row, tile_col);
      if (args.c.float32) {
        args.c.store(tile, tile_row, tile_col, end_row);
        continue;
      }
      pending.take(tile, tile_row, tile_col);
      if (is_first_thread()) timeline::lap(Did::kEpilogue);
    }
    pending.store_rest(buffers, args.c, end_row);
    if constexpr (requires { parts.rows_in_groups(); }) {
      // Rows in no group.
      constexpr int kThreads = 128 * Crew::kConsumers;
      args.c.clear(parts.rows_in_groups(), block * kThreads + threadIdx.x,
                   int64_t{gridDim.x} * kThreads);
    }
    if (ptx::elect_one()) ptx::cp_async_bulk_wait_group_read<0>();
  }

 protected:
  // One step's operands into the next stage.
  __device__ __forceinline__ void load_step(const RowsOfA& rows, int col, int k, int group,
                                            At& at) {
    shared.pipeline.wait_empty(at);
    if (ptx::elect_one()) {
      uint64_t* full = shared.pipeline.expect(at, args.step_bytes);
      shared.a[at.stage].load(rows.map, rows.first, k, 0, full, ptx::kEvictNormal);
      shared.b[at.stage].load(&args.b, col, k, group, full, args.policy_b);
    }
    at.advance();
  }

  __device__ __forceinline__ static bool gives_back() {
    return Shape::kWarpsApart ? ptx::elect_one() : is_first_thread();
  }

  // Gives back the stages of `steps` steps unread. Here no wgmma holds the warps together, so a
  // barrier does, unless each gives back for itself: one that fell a round behind would wait for a
  // phase that is past.
  template <typename Meanwhile>
  __device__ __forceinline__ void skip(Pipeline<Shape::kStages>& pipeline, int consumer, int steps,
                                       At& at, Meanwhile meanwhile) {
    for (int step = 0; step < steps; ++step, at.advance()) {
      pipeline.wait_full(at);
      if constexpr (!Shape::kWarpsApart) sync_consumer(consumer);
      if (gives_back()) pipeline.release(at.stage);
      meanwhile(step);
    }
  }

  // The product of `steps` steps. A step's instructions are in flight while the next one's operands
  // are waited for; its stage is given back one step later. `meanwhile(step)` runs while the tensor
  // cores are at it, and may take the stages that follow.
  template <typename Meanwhile>
  __device__ __forceinline__ void multiply(Memory& shared, Tile& tile, int row, int col, int steps,
                                           At& at, Meanwhile meanwhile) {
    uint32_t previous = 0;
    Tile own;  // of one step
    Tile& sum = kSumOfSteps ? own : tile;
    if constexpr (kSumOfSteps) tile = Tile{};
    for (int step = 0; step < steps; ++step) {
      shared.pipeline.wait_full(at);
      if (step == 0 && is_first_thread()) timeline::lap(Did::kWaitOperands);
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kBlockK / kWgmmaK; ++i) {
        ptx::wgmma<kType, Memory::A::kTransposed, Memory::B::kTransposed>(
            sum.value, shared.a[at.stage].descriptor(row, i), shared.b[at.stage].descriptor(col, i),
            (!kSumOfSteps && step > 0) || i > 0);
      }
      ptx::wgmma_commit_group();
      const uint32_t stage = at.stage;
      at.advance();
      // Two steps may be in flight now, so this may take long.
      meanwhile(step);
      if constexpr (kSumOfSteps) {
        // The tensor cores go on with the other consumer's step.
        ptx::wgmma_wait_group<0>();
        ptx::written(own.value);
        if (gives_back()) shared.pipeline.release(stage);
        tile.add(own);
        continue;
      }
      if (step > 0) {
        ptx::wgmma_wait_group<1>();
        if (gives_back()) shared.pipeline.release(previous);
      }
      previous = stage;
    }
    if constexpr (kSumOfSteps) return;
    ptx::wgmma_wait_group<0>();
    ptx::written(tile.value);
    if (gives_back()) shared.pipeline.release(previous);
  }

  __device__ __forceinline__ void store(Strip& strip, ResultPanel& panel, int row, int col) const {
    epilogue.template apply<kType>(strip, row, col);
    if (args.c.float32) {
      args.c.store(strip, row, col);
    } else {
      args.c.template store_rounded<kResult>(strip, panel, row, col);
    }
  }
};

// What a block does before it meets and takes up its roles.
template <typename Op, typename Walk>
__device__ __forceinline__ typename Op::Memory& set_up(char* memory, const Args<Walk>& args) {
  // The launch adds what this rounding takes.
  const auto address = reinterpret_cast<uintptr_t>(memory) + kSwizzleBytes - 1;
  auto& shared = *reinterpret_cast<typename Op::Memory*>(address & ~uintptr_t{kSwizzleBytes - 1});
  if (threadIdx.x == 0) shared.pipeline.init(Op::kGivers);
  if (threadIdx.x == 0) timeline::start();
  if (threadIdx.x == 32) {
    ptx::prefetch_tensor_map(&args.a);
    ptx::prefetch_tensor_map(&args.b);
    if (!args.c.float32) ptx::prefetch_tensor_map(&args.c.map);
  }
  return shared;
}

template <typename Shape, ptx::Type kType, Major kMajorA, Major kMajorB, typename Walk,
          typename Source, typename Epilogue>
__global__ void __launch_bounds__(Shape::Crew::kThreads, Shape::Crew::kMinBlocks)
    matmul(const __grid_constant__ Args<Walk> args, Source source, Epilogue epilogue) {
  using Op = Matmul<Shape, kType, kMajorA, kMajorB, Walk, Source, Epilogue>;
  extern __shared__ char memory[];
  auto& shared = set_up<Op>(memory, args);
  __syncthreads();
  Op op{args, shared, source, epilogue, static_cast<int>(blockIdx.x)};
  Shape::Crew::run(op);
}

}  // namespace pk::matmul

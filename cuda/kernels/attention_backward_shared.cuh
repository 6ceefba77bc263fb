// What the warps of attention's backward pass share: arguments, and shared memory.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <utility>

#include "kernels/attention_memory.cuh"
#include "schedule/attention_walk.h"
#include "schedule/roles.cuh"
#include "schedule/store_tile.cuh"
#include "schedule/visibility.cuh"
#include "tile/pipeline.cuh"
#include "tile/register_tile.cuh"
#include "tile/shared_tile.cuh"

namespace pk::attention {

struct BackwardArgs {
  CUtensorMap q, k, v, d_out;  // of a matrix of [rows, heads * width] for each of the batch
  CUtensorMap dq;              // of fp32, with boxes of kQueries x kFloats
  Result dk, dv;               // of the whole batch, with boxes of kKeys x kPanel
  const float *lse, *delta;    // [batch, heads, blocks of queries * kQueries], lse in log2 units
  uint32_t* turns;  // [batch, heads, blocks of queries]: 1 + the tile of keys that added last
  uint32_t* ticket;
  AttentionWalk walk;  // of tiles of keys
  int num_heads, num_kv_heads, group;
  int query_blocks;
  RowsOfBatch queries, keys;
  int before, after;  // a key at p is seen by queries at p - before .. p + after
  float scale;
  Logits logits;

  // Rows are keys, columns are queries.
  __device__ __forceinline__ Visibility sight(int batch) const {
    return {keys.of(batch), queries.of(batch), before, after};
  }
};

inline constexpr int kKeys = 128, kQueries = 64;  // of a tile, and of a step
inline constexpr int kFloats = 32;                // in 128 bytes

template <int kWidth, int kQueryStages, int kOutStages, int kMover>
struct BackwardShape {
  using Crew = Roles<2, kMover>;
  static constexpr int kD = kWidth, kStagesQ = kQueryStages, kStagesO = kOutStages;
};

inline constexpr int kPlanned = 4;  // steps, ahead of the loader

// What a parcel is.
enum class Content : int { kDq, kDk, kDv, kNone };

// A step, as it is planned; and the label of a parcel.
struct alignas(16) Step {
  enum : int { kMasked = 1, kFirst = 2, kLast = 4, kNothing = 8, kEnd = 16, kOdd = 32 };
  int batch, head, kv_head;
  int key, query;  // the first of the tile, and of the block; none below zero
  uint32_t turn;   // what the turn of the block of queries must have come to
  int flags;  // kNothing: nobody sees the tile; kEnd: there is no tile; kOdd: the round of K and V,
              // in a first step
  Content content;
};

// What leaves for global memory: dQ of a step in fp32, or dK or dV of the tile.
template <int kD>
struct alignas(kSwizzleBytes) Parcel {
  char data[kQueries * kD * 4];
  static_assert(sizeof(data) == kKeys * kD * 2);

  // Columns kFloats * i and on of dQ.
  __device__ __forceinline__ char* box(int i) { return data + i * kQueries * kFloats * 4; }

  // Panel i of dK or dV, from row `row` on.
  __device__ __forceinline__ ResultPanel& panel(int i, int row) {
    return *reinterpret_cast<ResultPanel*>(data + (i * kKeys + row) * kPanel * 2);
  }

  // A consumer's half of the columns of dQ, times `scale`, in swizzled boxes.
  __device__ __forceinline__ void write(const Accumulator<kD / 2>& dq, int consumer, float scale) {
    const int row = dq.row(), col = dq.col();
    const uint32_t swizzle = (col / 4 ^ row % 8) * 16 + col % 4 * 4;
    char* const to = box(consumer * (kD / 2 / kFloats)) + row * 128;
#pragma unroll
    for (int i = 0; i < kD / 4; i += 2) {
      const int j = i / 4;  // of 8 columns
      char* const at = to + j / 4 * (kQueries * 128) + i / 2 % 2 * (8 * 128);
      ptx::st_shared(reinterpret_cast<float2*>(at + (swizzle ^ j % 4 * 32)),
                     float2{dq.value[i] * scale, dq.value[i + 1] * scale});
    }
  }

  // A consumer's keys of dK or dV.
  template <ptx::Type kType>
  __device__ __forceinline__ void write(const RoundedTile<kType, kD>& tile, int consumer) {
    const int row = consumer * 64 + threadIdx.x % 128 / 32 * ResultPanel::kRows;
    [&]<int... kIndices>(std::integer_sequence<int, kIndices...>) {
      (tile.template write_panel<kIndices>(panel(kIndices, row)), ...);
    }(std::make_integer_sequence<int, kD / kPanel>{});
  }
};

// 32 blocks of queries, the last one first, as seen from a tile of keys: a bit each.
struct Window {
  int end;
  uint32_t seen, masked;
  uint32_t open;  // its turn is to be found
  uint32_t turns[32];

  __device__ __forceinline__ int query(int i) const { return end - (1 + i) * kQueries; }
};

template <typename Shape>
struct BackwardShared {
  using Block = OperandTile<kQueries, Major::kK>[Shape::kD / kPanel];
  using Tile = OperandTile<kKeys, Major::kK>[Shape::kD / kPanel];

  using Parcel = attention::Parcel<Shape::kD>;
  Tile k, v;
  Block q[Shape::kStagesQ], d_out[Shape::kStagesO];
  ResultPanel ds[kKeys / ResultPanel::kRows];  // [key, query]
  Parcel outbox[2];
  alignas(128) float lse[Shape::kStagesQ][kQueries];
  alignas(128) float delta[Shape::kStagesO][kQueries];
  // Of the planner: the tile, its head of queries at hand, and what blocks of queries see of it.
  Visibility sight;
  int head;
  Window window;
  uint32_t num_planned;
  Step draft, plan[kPlanned];
  Step steps[Shape::kStagesQ];
  Step labels[2];  // of the outbox
  Pipeline<kPlanned> planned;
  Pipeline<1> keys, values;
  Pipeline<Shape::kStagesQ> queries;
  Pipeline<Shape::kStagesO> d_outs;
  Pipeline<2> parcels;

  __device__ void init() {
    constexpr int kWarps = 4 * Shape::Crew::kConsumers;
    planned.init(1);
    keys.init(kWarps);
    values.init(kWarps);
    queries.init(kWarps);
    d_outs.init(kWarps);
    // Filled by all warps of the consumers, emptied by one.
    for (int i = 0; i < 2; ++i) {
      ptx::mbarrier_init(&parcels.full[i], kWarps);
      ptx::mbarrier_init(&parcels.empty[i], 1);
    }
    ptx::fence_mbarrier_init();
  }
};

}  // namespace pk::attention

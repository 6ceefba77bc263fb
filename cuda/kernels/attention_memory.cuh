// What a block of attention works with: its arguments, its sizes and its shared memory.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "schedule/attention_walk.h"
#include "schedule/roles.cuh"
#include "schedule/store_tile.cuh"
#include "schedule/visibility.cuh"
#include "tile/pipeline.cuh"
#include "tile/shared_tile.cuh"

namespace pk::attention {

// Of the scores before they are masked: scale, then an optional cap.
struct Logits {
  float scale;     // with a cap: of the products, divided by it
  float unit;      // what is left to multiply by for log2 units: scale or cap times log2(e)
  bool is_capped;  // the score is tanh(scale * product), and 1 for its unit the cap
};

struct Args {
  CUtensorMap q, k, v;   // of a matrix of [rows, heads * width] for each of the batch
  Result out;            // of the whole batch
  float* log_sum_exp;    // [batch, queries, heads]
  AttentionWalk walk;    // tiles of queries
  uint32_t* tickets;     // how many have been taken, zero at first; null to deal tiles in turn
  int num_heads, group;  // heads of the queries; and how many share one of the keys
  RowsOfBatch queries, keys;
  int left, right;  // a query at p sees keys at p - left .. p + right
  Logits logits;
};

// Sizes of a tile. kBlock: keys in a block. kOutPanels: panels of 64 columns that each warp has for
// the result.
template <int kWidth, int kValueWidth, int kBlockKeys, int kNumStages, int kNumConsumers,
          int kNumOutPanels, int kMover>
struct TileShape {
  using Crew = Roles<kNumConsumers, kMover>;
  static constexpr int kD = kWidth, kDv = kValueWidth, kBlock = kBlockKeys, kStages = kNumStages;
  static constexpr int kM = 64 * kNumConsumers, kOutPanels = kNumOutPanels;
};

template <typename Shape>
struct Shared {
  using Q = OperandTile<Shape::kM, Major::kK>;
  using Rows = OperandTile<Shape::kBlock, Major::kK>;  // of keys or values

  Q q[Shape::kD / kPanel];
  Rows k[Shape::kStages][Shape::kD / kPanel];
  Rows v[Shape::kStages][Shape::kDv / kPanel];
  ResultPanel out[Shape::Crew::kConsumers][4][Shape::kOutPanels];
  Pipeline<1> queries;
  Pipeline<Shape::kStages> keys, values;
  // What the loader found, written before the barrier of Q, or of a stage of K, is armed.
  int tile;  // its number; past the last if there is none
  bool sees_nothing;
  struct Step {
    int key;
    bool masked, last;
  } step[Shape::kStages];
};

}  // namespace pk::attention

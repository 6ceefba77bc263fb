// The kernels of attention by name, and what the host fills in for them and for their derivatives.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "kernels/attention.cuh"
#include "kernels/attention.h"
#include "tile/launch.h"
#include "tile/tensor_map.h"

namespace pk::attention {

// With as many stages as shared memory holds.
using Tile64 = TileShape<64, 64, 128, 4, 2, 1, 24>;
using Tile128 = TileShape<128, 128, 128, 2, 2, 2, 24>;
using Tile192 = TileShape<192, 128, 128, 2, 2, 1, 24>;
using Tile256 = TileShape<256, 256, 64, 2, 2, 2, 24>;

struct Instance {
  void (*kernel)(Args);
  int shared_bytes, num_threads;
  int width, value_width;
  int rows, block;  // queries of a tile, keys of a block
};

template <typename Shape, ptx::Type kType>
Instance make_instance() {
  return {attention<Shape, kType>,
          static_cast<int>(sizeof(Shared<Shape>)) + kSwizzleBytes,
          Shape::Crew::kThreads,
          Shape::kD,
          Shape::kDv,
          Shape::kM,
          Shape::kBlock};
}

inline constexpr int kNumInstances = 4;

template <ptx::Type kType>
Instance of_index(int i) {
  switch (i) {
    case 0:
      return make_instance<Tile64, kType>();
    case 1:
      return make_instance<Tile128, kType>();
    case 2:
      return make_instance<Tile192, kType>();
    default:
      return make_instance<Tile256, kType>();
  }
}

// Of one operand type, each compiled by itself.
Instance bfloat16_instance(int i);
Instance float16_instance(int i);

// One array as a matrix of [rows, heads * width] for each of the batch.
inline Matrix rows_of(const void* address, int64_t batch, int64_t rows, int64_t heads,
                      int64_t width) {
  return {const_cast<void*>(address), rows, heads * width, heads * width, batch};
}

// Whether the kernels count so far, and the arrays fit each other.
inline bool is_valid(const AttentionShape& in) {
  const auto is_size = [](int64_t x) { return x > 0 && x <= INT32_MAX / 2; };
  const auto is_reach = [](int64_t x) { return x >= -1 && x <= INT32_MAX; };
  const bool segments = in.query_segments != nullptr;
  return is_size(in.batch) && is_size(in.num_queries) && is_size(in.num_keys) &&
         is_size(in.num_heads) && is_size(in.num_kv_heads) && in.num_heads % in.num_kv_heads == 0 &&
         is_size(in.num_heads * in.width) && is_size(in.num_heads * in.value_width) &&
         is_size(in.batch * in.num_heads) &&
         is_size(in.batch * std::max(in.num_queries, in.num_keys)) && in.scale > 0 &&
         in.soft_cap >= 0 && is_reach(in.left) && is_reach(in.right) &&
         (in.query_starts != nullptr) == (in.key_starts != nullptr) &&
         segments == (in.key_segments != nullptr) && segments == (in.query_bounds != nullptr) &&
         segments == (in.key_bounds != nullptr);
}

inline RowsOfBatch queries_of(const AttentionShape& in) {
  return {static_cast<int>(in.num_queries), in.query_starts, in.query_segments,
          reinterpret_cast<const int2*>(in.query_bounds)};
}

inline RowsOfBatch keys_of(const AttentionShape& in) {
  return {static_cast<int>(in.num_keys), in.key_starts, in.key_segments,
          reinterpret_cast<const int2*>(in.key_bounds)};
}

// How far a query sees to one side.
inline int reach(int64_t side) {
  return side < 0 ? Visibility::kUnlimited : static_cast<int>(side);
}

inline Logits logits_of(const AttentionShape& in) {
  if (in.soft_cap > 0) return {in.scale / in.soft_cap, in.soft_cap * kLog2E, true};
  return {1, in.scale * kLog2E, false};
}

// The walk over tiles of `tile_rows` of `rows` rows of each head, of which `group` share keys.
inline AttentionWalk walk_of(const AttentionShape& in, int64_t rows, int tile_rows, int64_t heads,
                             int group, bool from_last) {
  // Blocks on the same head read keys at the same time, and what stays in the L2 costs no energy at
  // HBM; a power of two leaves no band of a few heads, with nothing to fill the last wave, for most
  // numbers of heads.
  constexpr int64_t kBandBytes = 16 << 20;
  const int64_t bytes = 2 * in.num_keys * (in.width + in.value_width);
  int64_t groups = 1;
  while (2 * groups * bytes <= kBandBytes) groups *= 2;
  AttentionWalk walk;
  walk.num_rows = static_cast<int>((rows + tile_rows - 1) / tile_rows);
  walk.num_heads = static_cast<int>(in.batch * heads);
  walk.band_heads = static_cast<int>(std::min<int64_t>(groups * group, walk.num_heads));
  walk.from_last = from_last;
  return walk;
}

// Loads a kernel on the current device and gives it its shared memory.
template <typename Kernel>
cudaError_t load(Kernel kernel, int shared_bytes) {
  if (cudaError_t error = cudaFuncSetAttribute(
          kernel_pointer(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes))
    return error;
  return load_kernels({kernel_pointer(kernel)});
}

}  // namespace pk::attention

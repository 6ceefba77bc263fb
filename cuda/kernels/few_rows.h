// matmul_all_reduce and matmul_reduce_scatter of few rows: x [m, k] times w [k, p], m up to 128,
// summed over the ranks, whose parts along k they are. Each rank gets all rows, or its share.
//
// Each rank's partial is rounded to the result's type, once; partials are added in rank order in
// fp32, and the sum is rounded once: what pk.psum or pk.psum_scatter makes of the product.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/comm_view.h"
#include "tile/published.h"

namespace pk {

struct FewRowsOperands {
  const void* x;  // [m, k]
  const void* w;  // [k, p], or [p, k] with transpose_w
  void* y;        // [m, p] of an all_reduce, or [m / ranks, p]
  Published scratch;
  int64_t m, k, p;
  int64_t pitch_x, pitch_w, pitch_y;  // elements from row to row, multiples of 8
  bool transpose_w;
  bool bfloat16;  // or float16
  bool all_reduce;
  int channel;
};

struct FewRowsPlan {
  bool low_latency;  // see schedule/strip_sum.cuh
  int num_blocks;    // the same on every rank, like the rest
  int split_tiles;   // see schedule/matmul_walk.h
  int split;         // parts of each: 1, 2, 4 or 8 blocks of a cluster
};

inline constexpr int kMostFewRows = 128;
inline constexpr int kFewRowsRanks = 9;

// The most columns that a partial of m rows may have.
int64_t few_rows_most_cols(int64_t m, int num_ranks, bool all_reduce, bool low_latency);

// Bytes of scratch that the call needs.
int64_t few_rows_scratch(int64_t m, int64_t p, int num_ranks, bool all_reduce, bool low_latency);

// cudaErrorInvalidValue for what a plan or a tensor map cannot be.
cudaError_t launch_few_rows(const CommView& comm, const FewRowsOperands& operands,
                            const FewRowsPlan& plan, cudaStream_t stream);

// Loads all kernels on the current device and gives them their shared memory.
cudaError_t load_few_rows();

}  // namespace pk

// matmul_reduce_scatter and matmul_all_reduce: the product of x [m, k] and w [k, p], whose k is
// scattered over the ranks, summed over them. Each rank keeps its share of the rows, or all.
//
// What a rank sends is rounded to the result's type, once. Onto the own partial, in fp32, the
// others are added in rank order, and the sum is rounded once.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "schedule/scatter_walk.h"
#include "tile/comm_view.h"
#include "tile/published.h"

namespace pk {

struct MatmulReduceOperands {
  const void* x;  // [m, k]: `outer` matrices of m / outer rows, whose rows are scattered alike
  const void* w;  // [k, p], or [p, k] with transpose_w
  Published y;    // [m / ranks, p], or [m, p] of an all_reduce
  Published scratch;
  int64_t outer, m, k, p;
  int64_t pitch_x, pitch_w, pitch_y;  // elements from row to row, multiples of 8
  bool transpose_w;
  bool bfloat16;  // or float16
  bool all_reduce;
  int channel;
};

struct MatmulReducePlan {
  int num_blocks;  // the same on every rank
  int lead;        // see schedule/scatter_walk.h
};

inline constexpr int kMatmulReduceRanks = ScatterWalk::kMostRanks;

// Rows of the result that each rank adds up; with an all_reduce whole tiles, so that none belongs
// to two ranks, and fewer, or none, on the last ranks.
int64_t matmul_reduce_rows(int64_t m, int num_ranks, bool all_reduce);

// Whether the rows of several matrices can be scattered: a rank's share of each is whole tiles.
bool matmul_reduce_takes(int64_t outer, int64_t m, int num_ranks);

// Bytes of scratch that the call needs.
int64_t matmul_reduce_scratch(int64_t m, int64_t p, int num_ranks, bool all_reduce);

// cudaErrorInvalidValue for what a plan or a tensor map cannot be.
cudaError_t launch_matmul_reduce(const CommView& comm, const MatmulReduceOperands& operands,
                                 const MatmulReducePlan& plan, cudaStream_t stream);

// Loads all kernels on the current device and gives them their shared memory.
cudaError_t load_matmul_reduce();

}  // namespace pk

// ragged_dot: C[m, n] = A[m, k] B[group of the row][k, n] of bfloat16 or float16, accumulated in
// fp32. Rows come group by group; those past the last group are zero.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/matmul.h"

namespace pk {

struct RaggedDotOperands {
  const void* a;               // [m, k]
  const void* b;               // [num_groups, k, n], or [num_groups, n, k] with transpose_b
  const int32_t* group_sizes;  // [num_groups], on the device
  void* c;                     // [m, n]
  int64_t m, n, k, num_groups;
  int64_t pitch_a, pitch_b, pitch_c;  // elements from row to row, multiples of 8
  bool transpose_b;
  bool bfloat16;  // or float16
  bool float32_result;
};

// cudaErrorInvalidValue for what a tensor map or the walk cannot be.
cudaError_t launch_ragged_dot(const RaggedDotOperands& operands, MatmulTile tile, int num_blocks,
                              cudaStream_t stream);

// Loads all kernels on the current device.
cudaError_t load_ragged_dot();

}  // namespace pk

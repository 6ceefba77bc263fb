// matmul: C[m, n] = activation(A[m, k] B[k, n] + bias[n]) of bfloat16 or float16, in fp32 until it
// is rounded.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace pk {

// gelu is the form with tanh.
enum class MatmulActivation { kNone, kRelu, kGelu, kSilu };

struct MatmulOperands {
  const void* a;  // [m, k], or [k, m] with transpose_a
  const void* b;  // [k, n], or [n, k] with transpose_b
  void* c;        // [m, n]
  int64_t m, n, k;
  int64_t pitch_a, pitch_b, pitch_c;  // elements from row to row, multiples of 8
  bool transpose_a, transpose_b;
  bool bfloat16;  // or float16
  bool float32_result;
  const void* bias;   // [pitch_c], or null
  bool float32_bias;  // or of the operands' type
  MatmulActivation activation;
};

// Rows and columns of a block's tile.
enum class MatmulTile { k128x256, k128x128, k64x256, k64x128, k64x64 };
inline constexpr MatmulTile kMatmulTiles[] = {MatmulTile::k128x256, MatmulTile::k128x128,
                                              MatmulTile::k64x256, MatmulTile::k64x128,
                                              MatmulTile::k64x64};

struct MatmulPlan {
  MatmulTile tile;
  int num_blocks;
  int split_tiles;  // see schedule/matmul_walk.h
  int split;        // parts of each: 1, 2, 4 or 8 blocks of a cluster
};

// cudaErrorInvalidValue for what a plan or a tensor map cannot be.
cudaError_t launch_matmul(const MatmulOperands& operands, const MatmulPlan& plan,
                          cudaStream_t stream);

// Loads all kernels on the current device and gives them their shared memory.
cudaError_t load_matmul();

}  // namespace pk

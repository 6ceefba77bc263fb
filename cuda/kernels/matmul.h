// matmul: C[m, n] = activation(A[m, k] B[k, n] + bias[n]) of bfloat16, float16 or, with scales,
// float8_e4m3fn, in fp32 until it is rounded.
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
  int64_t pitch_a, pitch_b, pitch_c;  // elements from row to row, multiples of 16 bytes
  bool transpose_a, transpose_b;
  bool float8;    // A and B, with transpose_b and without transpose_a, and with zeros past k
  bool bfloat16;  // or float16: what has 16 bits. With float8 that is the result
  bool float32_result;
  const float* row_scale;  // with float8: one, or [m]; null for none, as then col_scale is too
  const float* col_scale;  // one, or [n]
  bool scale_each_row, scale_each_col;
  const void* bias;   // [pitch_c], or null
  bool float32_bias;  // or of the type that has 16 bits
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

// cudaErrorInvalidValue for what a plan or a tensor map cannot be. With float8 there are tiles of
// 128x128 and 64x128.
cudaError_t launch_matmul(const MatmulOperands& operands, const MatmulPlan& plan,
                          cudaStream_t stream);

// Loads all kernels on the current device and gives them their shared memory.
cudaError_t load_matmul();

}  // namespace pk

// Flops: 2 m n k. Bytes of HBM: operands and result once. A step of a 128 x 256 tile is 48 KiB for
// 4.2 Mflop, 85 flop a byte out of the L2; tensor cores are the bound but for a few rows, where it
// is the reading of B.
#include <algorithm>

#include "kernels/matmul.h"
#include "kernels/matmul_instances.cuh"

namespace pk {
namespace {

using matmul::ceil_div;
using matmul::Instance;
using matmul::kMostSize;

// Kernels of float8 take two neighbours in k for an element of 16 bits: their step is 128 of k.
MatmulOperands in_pairs(MatmulOperands in) {
  in.k = ceil_div(in.k, 2);
  in.pitch_a /= 2;
  in.pitch_b /= 2;
  return in;
}

Instance<MatmulWalk> instance_of(MatmulTile tile, bool bfloat16, bool transpose_a,
                                 bool transpose_b) {
  const auto find = bfloat16 ? matmul::bfloat16_instance : matmul::float16_instance;
  // A transposed A has m contiguous, a transposed B has k.
  return find(tile, transpose_a, !transpose_b);
}

Epilogue epilogue_of(const MatmulOperands& in) {
  Epilogue epilogue;
  epilogue.row_scale = in.row_scale;
  epilogue.col_scale = in.col_scale;
  epilogue.last_row_scale = in.scale_each_row ? static_cast<int>(in.m) - 1 : 0;
  epilogue.last_col_scale = in.scale_each_col ? static_cast<int>(in.n) - 1 : 0;
  epilogue.bias = in.bias;
  epilogue.float32_bias = in.float32_bias;
  epilogue.last_col = static_cast<int>(in.pitch_c) - 2;
  switch (in.activation) {
    case MatmulActivation::kNone:
      break;
    case MatmulActivation::kRelu:
      epilogue.activation = Activation::kRelu;
      break;
    case MatmulActivation::kGelu:  // 2 sqrt(2 / pi) (1 + 0.044715 x^2)
      epilogue.activation = Activation::kSigmoid;
      epilogue.linear = 1.5957691216f;
      epilogue.cubic = 0.0713548163f;
      break;
    case MatmulActivation::kSilu:
      epilogue.activation = Activation::kSigmoid;
      epilogue.linear = 1;
      break;
  }
  return epilogue;
}

}  // namespace

cudaError_t launch_matmul(const MatmulOperands& operands, const MatmulPlan& plan,
                          cudaStream_t stream) {
  const MatmulOperands in = operands.float8 ? in_pairs(operands) : operands;
  if (in.m <= 0 || in.n <= 0 || in.k <= 0 || in.m > kMostSize || in.n > kMostSize ||
      in.k > kMostSize)
    return cudaErrorInvalidValue;
  const bool scaled = in.row_scale != nullptr;
  if (scaled != (in.col_scale != nullptr) || (scaled && !in.float8) ||
      (in.float8 && (in.transpose_a || !in.transpose_b || !in.bfloat16)))
    return cudaErrorInvalidValue;
  const auto instance = in.float8
                            ? matmul::float8_instance(plan.tile)
                            : instance_of(plan.tile, in.bfloat16, in.transpose_a, in.transpose_b);
  if (instance.kernel == nullptr) return cudaErrorInvalidValue;
  matmul::Args<MatmulWalk> args{};
  const int num_n = ceil_div(in.n, instance.tile_n);
  MatmulWalk& walk = args.walk;
  walk.num_m = ceil_div(in.m, instance.tile_m);
  walk.num_n = num_n;
  walk.num_steps = ceil_div(in.k, kBlockK);
  walk.num_blocks = plan.num_blocks;
  walk.split_tiles = plan.split_tiles;
  walk.split = plan.split;
  // A band of a narrow result is a wave, so that no wave reads what another has read.
  walk.band_rows = std::max(matmul::kBandRows / instance.tile_m, plan.num_blocks / num_n);
  if (!walk.is_valid() || reinterpret_cast<uintptr_t>(in.bias) % 8 != 0)
    return cudaErrorInvalidValue;

  // With few rows of tiles all blocks that need a part of B read it at the same time.
  args.policy_b = walk.num_m <= 2 ? ptx::kEvictFirst : ptx::kEvictNormal;
  // Rows of A past the last are neither read nor cleared: what comes of them are rows of C that
  // nobody stores. (A box that reaches over the edge takes longer than one that lies within.)
  const int rows_past =
      in.transpose_a || walk.num_m > 1 ? 0 : instance.tile_m - ceil_div(in.m, 8) * 8;
  const Matrix a{const_cast<void*>(in.a), in.transpose_a ? in.k : in.m,
                 in.transpose_a ? in.m : in.k, in.pitch_a};
  const Matrix b{const_cast<void*>(in.b), in.transpose_b ? in.n : in.k,
                 in.transpose_b ? in.k : in.n, in.pitch_b};
  const Matrix c{in.c, in.m, in.n, in.pitch_c};
  return launch(instance, args, epilogue_of(in), a, b, c, in.bfloat16, in.float32_result, rows_past,
                plan.num_blocks, plan.split, stream);
}

cudaError_t load_matmul() {
  for (MatmulTile tile : kMatmulTiles) {
    for (int which = 0; which < 8; ++which) {
      if (cudaError_t error = load(instance_of(tile, which & 1, which & 2, which & 4)))
        return error;
    }
    if (const auto float8 = matmul::float8_instance(tile); float8.kernel != nullptr) {
      if (cudaError_t error = load(float8)) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace pk

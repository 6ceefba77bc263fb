// attention_backward: the derivatives of attention by query, key and value.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/attention.h"

namespace pk {

inline constexpr int kBackwardQueries = 64;  // in a block, up to which rows of queries are padded

struct AttentionBackwardOperands {
  AttentionShape shape;  // float32_result: of dk and dv
  const void *q, *k, *v;
  const void* d_out;  // [batch, num_queries, num_heads, value_width]
  // [batch, num_heads, blocks of queries * kBackwardQueries]. The log-sum-exp in log2 units, inf
  // for rows that see nothing or are none; sum(d_out * out) less the derivative by the log-sum-exp.
  const float *lse, *delta;
  float* dq;        // [batch, num_queries, num_heads, width]
  void *dk, *dv;    // as k and v
  uint32_t* turns;  // batch * num_heads * blocks of queries + 1 words of scratch
};

// Whether there is a kernel for heads of these widths.
bool has_attention_backward(int64_t width, int64_t value_width);

// cudaErrorInvalidValue for what no kernel or no tensor map can be.
cudaError_t launch_attention_backward(const AttentionBackwardOperands& operands, int num_blocks,
                                      cudaStream_t stream);

// Loads all kernels on the current device and gives them their shared memory.
cudaError_t load_attention_backward();

}  // namespace pk

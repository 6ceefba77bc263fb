// attention: softmax(scale Q K^T) V and the log-sum-exp of each row, of bfloat16 or float16.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace pk {

// What attention and its derivative know of the scores. Arrays are [batch, rows, heads, width].
struct AttentionShape {
  int64_t batch, num_queries, num_keys;
  int64_t num_heads, num_kv_heads;  // of queries; of keys and values, a divisor
  int64_t width, value_width;       // of queries and keys; of values and results
  bool bfloat16;                    // or float16
  bool float32_result;
  float scale;     // of the logits, positive
  float soft_cap;  // logits become cap tanh(logit / cap); 0 for none
  // A query at position p sees keys at p - left .. p + right; -1 for no end.
  int64_t left, right;
  // Positions at which the two halves of the rows begin, [batch, 2], not negative; null if rows
  // begin at 0.
  const int *query_starts, *key_starts;
  // Ids, [batch, rows], of which only equal ones see each other; null for one. And the least and
  // the greatest of each 64 rows, [batch, ceil(rows / 64), 2].
  const int *query_segments, *key_segments;
  const int *query_bounds, *key_bounds;
};

struct AttentionOperands {
  AttentionShape shape;
  const void *q, *k, *v;
  void* out;           // [batch, num_queries, num_heads, value_width]
  float* log_sum_exp;  // [batch, num_queries, num_heads]
  uint32_t* tickets;   // a word of scratch
};

// Whether there is a kernel for heads of these widths.
bool has_attention(int64_t width, int64_t value_width);

// cudaErrorInvalidValue for what no kernel or no tensor map can be.
cudaError_t launch_attention(const AttentionOperands& operands, int num_blocks,
                             cudaStream_t stream);

// Loads all kernels on the current device and gives them their shared memory.
cudaError_t load_attention();

}  // namespace pk

// psum, pmax, pmin and psum_scatter: every rank's parts, combined in rank order.
//
//   scatter    the operand holds a part for each rank, [rows, ranks, inner]; each keeps its own
//              part of the sum
//   one shot   everyone sends the whole operand to everyone and combines all of it: the least
//              latency, (n - 1) times the operand over the link
//   two shots  each combines one share of the operand and sends the sum to everyone: 2 (n - 1) / n
//              times the operand, one trip more
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "mechanism/mechanism.h"
#include "tile/comm_view.h"
#include "tile/error_record.h"
#include "tile/host_device.h"
#include "tile/part_layout.h"
#include "tile/published.h"

namespace pk {

enum class Reduction { kSum, kMax, kMin };

enum class Element { kF32, kF64, kBF16, kF16, kS8, kS16, kS32, kS64, kU8, kU16, kU32, kU64 };

enum class Pattern { kScatter, kOneShot, kTwoShot };

struct ReduceArgs {
  Op op;  // for the error record
  const char* source;
  Published result;
  Published scratch;  // scratch_slot(rows * inner) bytes for each peer; unused by kLowLatency
  Reduction reduction;
  Element element;
  Pattern pattern;
  PartLayout from;  // the ranks' parts in `source`
  int64_t rows;     // of a part
  int64_t inner;    // bytes of a row
  int64_t bytes;    // of the operand: two shots, whose last part may be shorter than the others
  int channel;
  int num_blocks;  // 0: one for each SM. The same on every rank
  int num_sms;
};

// The part of each rank by two shots: an equal share, rounded up to whole cache lines.
inline int64_t two_shot_share(int64_t bytes, int num_ranks) {
  return ((bytes + num_ranks - 1) / num_ranks + 127) / 128 * 128;
}

// What a part takes in the scratch: as aligned as the scratch itself.
PK_HOST_DEVICE inline int64_t scratch_slot(int64_t part_bytes) {
  return (part_bytes + 127) / 128 * 128;
}

// Sets rows, inner and from of a psum of `bytes` bytes, or of a psum_scatter of [rows, num_ranks,
// inner].
void shape_psum(ReduceArgs& args, Pattern pattern, int64_t bytes, int num_ranks);
void shape_scatter(ReduceArgs& args, int64_t rows, int64_t inner, int num_ranks);

// kLowLatency needs rows * inner <= low_latency_bytes(num_ranks) and is never kTwoShot. All
// pointers are 16-byte aligned.
cudaError_t launch_reduce(const CommView& comm, const ReduceArgs& args, Protocol protocol,
                          cudaStream_t stream);

cudaError_t load_reduce();

}  // namespace pk

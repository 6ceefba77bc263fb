// What a call that combines the ranks' elements needs to know; host and device.
#pragma once

#include <cstdint>

#include "tile/error_record.h"
#include "tile/host_device.h"
#include "tile/part_layout.h"
#include "tile/published.h"

namespace pk {

enum class Reduction { kSum, kMax, kMin };

enum class Element { kF32, kF64, kBF16, kF16, kS8, kS16, kS32, kS64, kU8, kU16, kU32, kU64 };

enum class Algorithm { kScatter, kOneShot, kTwoShot };

struct ReduceArgs {
  Op op;  // for the error record
  const char* source;
  Published result;
  Published scratch;  // scratch_slot(rows * inner) bytes for each peer; unused by kLowLatency
  Reduction reduction;
  Element element;
  Algorithm algorithm;
  PartLayout from;  // the ranks' parts in `source`
  int64_t rows;     // of a part
  int64_t inner;    // bytes of a row
  int64_t bytes;    // of the operand of a psum: the last part of two shots may be shorter
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

}  // namespace pk

// What a call of an op that only moves data needs to know; host and device.
#pragma once

#include <cstdint>

#include "tile/part_layout.h"
#include "tile/published.h"

namespace pk {

struct PushArgs {
  const char* source;
  Published result;
  PartLayout from;  // the parts of the ranks they go to, in `source`
  PartLayout to;    // the parts of the ranks they come from, in `result`
  int64_t rows;     // of one part, all bands
  int64_t inner;    // bytes of a row
  int channel;
  int num_blocks;  // 0: one for each SM
  int num_sms;
};

}  // namespace pk

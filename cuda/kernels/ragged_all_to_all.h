// ragged_all_to_all: slices of any number of rows, straight from operand to the peers' results.
//
// Offsets and sizes are read on the device. Rows past the end of a buffer are not moved; with
// `checks` they stop the op with an error record.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/comm_view.h"
#include "tile/published.h"

namespace pk {

struct RaggedArgs {
  const char* source;
  Published result;  // holds the output's old rows already
  // [num_updates] each, int32_t or int64_t; updates of a peer follow one another.
  const void* input_offsets;
  const void* send_sizes;
  const void* output_offsets;
  bool wide_indices;  // int64_t
  int num_updates;    // a multiple of num_ranks
  int64_t row_bytes;
  int64_t source_rows;
  int64_t result_rows;  // the same on every rank
  bool checks;
  int channel;
  int num_blocks;  // 0: one for each SM
  int num_sms;
};

cudaError_t launch_ragged_all_to_all(const CommView& comm, const RaggedArgs& args,
                                     cudaStream_t stream);

cudaError_t load_ragged_all_to_all();

}  // namespace pk

// rms_norm_gather: every rank's rows, normalised and weighted, on every rank.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/comm_view.h"
#include "tile/error_record.h"
#include "tile/published.h"

enum class Element { kFloat32, kBfloat16 };

struct RmsNormGatherArgs {
  const void* x;       // [rows, cols] of this rank
  const void* weight;  // [cols], the same on all ranks
  pk::Published y;     // [ranks, rows, cols]
  int64_t rows;
  int64_t cols;
  float eps;
  pk::Op op;
  int channel;
};

cudaError_t launch_rms_norm_gather(const pk::CommView& comm, const RmsNormGatherArgs& args,
                                   Element element, int num_sms, cudaStream_t stream);

cudaError_t load_rms_norm_gather();

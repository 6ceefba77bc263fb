// all_gather: every rank's [rows, inner] matrix of bytes, side by side, on every rank: [rows,
// num_ranks, inner].
//
// That is jax.lax.all_gather for any axis, tiled or not: rows are the dimensions before the axis.
// dtype is irrelevant.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "mechanism/mechanism.h"
#include "tile/comm_view.h"

namespace pk {

struct AllGatherArgs {
  const char* source;  // [rows, inner] bytes
  char* result;        // [rows, num_ranks, inner] bytes
  int64_t rows;
  int64_t inner;
  uint64_t published;  // where peers find `result`: offset in the published space of this rank
  int channel;
  int num_blocks;  // 0: the kernel's own default for this device
  int num_sms;
};

// Register and TMA mechanisms. kLowLatency needs rows * inner <= kLowLatencyBytes; kTma needs
// 16-byte aligned pointers and rows.
cudaError_t launch_all_gather(const CommView& comm, const AllGatherArgs& args, Mechanism mechanism,
                              Protocol protocol, cudaStream_t stream);

// Loads every kernel of this file on the current device, so that no launch ever has to (a load may
// wait for kernels that are spinning).
cudaError_t load_all_gather();

}  // namespace pk

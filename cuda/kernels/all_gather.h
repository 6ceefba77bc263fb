// all_gather: every rank's [rows, inner] matrix of bytes, side by side, on every rank: [rows,
// num_ranks, inner].
//
// That is jax.lax.all_gather for any axis, tiled or not: rows are the dimensions before the axis.
// dtype is irrelevant.
#pragma once

#include <cuda_runtime_api.h>

#include "mechanism/mechanism.h"
#include "schedule/push_args.h"
#include "tile/comm_view.h"

namespace pk {

// args.from and args.to are set here. Register and TMA mechanisms; kLowLatency needs rows * inner
// <= low_latency_bytes(num_ranks).
cudaError_t launch_all_gather(const CommView& comm, PushArgs args, Mechanism mechanism,
                              Protocol protocol, cudaStream_t stream);

// Loads every kernel of this op on the current device, so that no launch ever has to (a load may
// wait for kernels that are spinning).
cudaError_t load_all_gather();

}  // namespace pk

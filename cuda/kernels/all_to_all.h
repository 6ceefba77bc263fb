// all_to_all: part i of every rank's operand goes to rank i, straight to its place.
//
// That is jax.lax.all_to_all for any pair of dimensions, tiled or not. With the dimensions of one
// part cut in [batch, rows, inner] at the two places where the rank's dimension stands, before and
// after the move, one side is [batch, ranks, rows, inner] and the other [batch, rows, ranks,
// inner]. dtype is irrelevant.
#pragma once

#include <cuda_runtime_api.h>

#include "mechanism/mechanism.h"
#include "schedule/push_args.h"
#include "tile/comm_view.h"

namespace pk {

// args.rows = batch * rows; args.from and args.to are set here. `split_first`: the operand is the
// side whose ranks stand before the rows. kLowLatency needs rows * inner <= low_latency_bytes.
cudaError_t launch_all_to_all(const CommView& comm, PushArgs args, int64_t batch, bool split_first,
                              Mechanism mechanism, Protocol protocol, cudaStream_t stream);

cudaError_t load_all_to_all();

}  // namespace pk

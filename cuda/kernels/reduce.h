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
#include "schedule/reduce_args.h"
#include "tile/comm_view.h"

namespace pk {

// Fills in what follows from the shape: of a psum of `bytes` bytes, or of a psum_scatter of [rows,
// num_ranks, inner].
void shape_psum(ReduceArgs& args, Algorithm algorithm, int64_t bytes, int num_ranks);
void shape_scatter(ReduceArgs& args, int64_t rows, int64_t inner, int num_ranks);

// kLowLatency needs rows * inner <= low_latency_bytes(num_ranks) and is never kTwoShot. Result and
// scratch are 16-byte aligned, and the operand of two shots. By bulk copies where operand and rows
// are too, else by registers.
cudaError_t launch_reduce(const CommView& comm, const ReduceArgs& args, Protocol protocol,
                          cudaStream_t stream);

cudaError_t load_reduce();

}  // namespace pk

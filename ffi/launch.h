// From a plan to kernels, for the XLA handlers and the test harness alike: publishes what peers
// will write into, and launches.
#pragma once

#include <cuda_runtime_api.h>

#include "ffi/call_site.h"
#include "kernels/all_gather.h"
#include "kernels/all_gather_copy_engine.h"
#include "kernels/all_gather_matmul.h"
#include "kernels/all_to_all.h"
#include "kernels/few_rows.h"
#include "kernels/matmul_reduce.h"
#include "kernels/ppermute.h"
#include "kernels/ragged_all_to_all.h"
#include "kernels/reduce.h"
#include "runtime/check.h"
#include "runtime/communicator.h"

namespace pk {

// Low-latency words find their own way through the mailbox; nothing is published for them.
inline void publish_result(const Communicator& communicator, PushArgs& args, size_t result_bytes,
                           const Plan& plan) {
  if (plan.protocol == Protocol::kSimple)
    args.result.offset = communicator.publish(args.result.address, result_bytes);
}

// Every rank's [rows, inner] bytes into every result.
inline void run_all_gather(Communicator& communicator, PushArgs args, size_t result_bytes,
                           const Plan& plan, cudaStream_t stream) {
  communicator.count_launch();
  if (plan.mechanism == Mechanism::kCopyEngine) {
    check(launch_all_gather_copy_engine(communicator.view(), args, communicator.copy_engine(),
                                        communicator.landing(args.channel), stream),
          "launch (copy engine)");
    return;
  }
  publish_result(communicator, args, result_bytes, plan);
  check(launch_all_gather(communicator.view(), args, plan.mechanism, plan.protocol, stream),
        "launch");
}

inline void run_all_to_all(Communicator& communicator, PushArgs args, int64_t batch,
                           bool split_first, size_t result_bytes, const Plan& plan,
                           cudaStream_t stream) {
  communicator.count_launch();
  publish_result(communicator, args, result_bytes, plan);
  check(launch_all_to_all(communicator.view(), args, batch, split_first, plan.mechanism,
                          plan.protocol, stream),
        "launch");
}

inline void run_ppermute(Communicator& communicator, PushArgs args,
                         const Destinations& destinations, size_t result_bytes, const Plan& plan,
                         cudaStream_t stream) {
  communicator.count_launch();
  publish_result(communicator, args, result_bytes, plan);
  check(launch_ppermute(communicator.view(), args, destinations, plan.mechanism, plan.protocol,
                        stream),
        "launch");
}

inline void run_ragged_all_to_all(Communicator& communicator, RaggedArgs args, size_t result_bytes,
                                  cudaStream_t stream) {
  communicator.count_launch();
  args.result.offset = communicator.publish(args.result.address, result_bytes);
  check(launch_ragged_all_to_all(communicator.view(), args, stream), "launch");
}

// The scratch must have room for a slot of every peer; the low-latency protocol needs none.
inline void run_reduce(Communicator& communicator, ReduceArgs args, size_t result_bytes,
                       size_t scratch_bytes, const Plan& plan, cudaStream_t stream) {
  communicator.count_launch();
  if (plan.mechanism == Mechanism::kCopyEngine) throw Error("no sums by copy engine");
  if (plan.protocol == Protocol::kSimple) {
    const size_t needed = (communicator.num_ranks() - 1) * scratch_slot(args.rows * args.inner);
    if (scratch_bytes < needed) {
      throw Error("scratch of " + std::to_string(scratch_bytes) + " bytes; " +
                  std::to_string(needed) + " are needed");
    }
    args.scratch.offset = communicator.publish(args.scratch.address, scratch_bytes);
    if (args.algorithm == Algorithm::kTwoShot)
      args.result.offset = communicator.publish(args.result.address, result_bytes);
  }
  check(launch_reduce(communicator.view(), args, plan.protocol, stream), "launch");
}

inline void run_all_gather_matmul(Communicator& communicator, AllGatherMatmulOperands operands,
                                  size_t gathered_bytes, const AllGatherMatmulPlan& plan,
                                  cudaStream_t stream) {
  communicator.count_launch();
  operands.gathered.offset = communicator.publish(operands.gathered.address, gathered_bytes);
  check(launch_all_gather_matmul(communicator.view(), operands, plan, stream), "launch");
}

inline void run_matmul_reduce(Communicator& communicator, MatmulReduceOperands in,
                              const MatmulReducePlan& plan, size_t result_bytes,
                              size_t scratch_bytes, cudaStream_t stream) {
  communicator.count_launch();
  const auto needed = static_cast<size_t>(
      matmul_reduce_scratch(in.m, in.p, communicator.num_ranks(), in.all_reduce));
  if (scratch_bytes < needed)
    throw Error("scratch of " + std::to_string(scratch_bytes) + " bytes; " +
                std::to_string(needed) + " are needed");
  in.scratch.offset = communicator.publish(in.scratch.address, scratch_bytes);
  if (in.all_reduce) in.y.offset = communicator.publish(in.y.address, result_bytes);
  check(launch_matmul_reduce(communicator.view(), in, plan, stream), "launch");
}

inline void run_few_rows(Communicator& communicator, FewRowsOperands in, const FewRowsPlan& plan,
                         size_t scratch_bytes, cudaStream_t stream) {
  communicator.count_launch();
  const auto needed = static_cast<size_t>(
      few_rows_scratch(in.m, in.p, communicator.num_ranks(), in.all_reduce, plan.low_latency));
  if (scratch_bytes < needed)
    throw Error("scratch of " + std::to_string(scratch_bytes) + " bytes; " +
                std::to_string(needed) + " are needed");
  if (needed > 0) in.scratch.offset = communicator.publish(in.scratch.address, scratch_bytes);
  check(launch_few_rows(communicator.view(), in, plan, stream), "launch");
}

}  // namespace pk

// Which kernels a mechanism and a protocol mean, for the XLA handler and the test harness alike.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "kernels/all_gather.h"
#include "kernels/all_gather_copy_engine.h"
#include "runtime/check.h"
#include "runtime/communicator.h"

namespace pk {

// Fills in what the communicator knows and launches. `result_bytes` is the size of args.result.
inline void run_all_gather(Communicator& communicator, AllGatherArgs args, size_t result_bytes,
                           Mechanism mechanism, Protocol protocol, cudaStream_t stream) {
  communicator.count_launch();
  if (mechanism == Mechanism::kCopyEngine) {
    check(launch_all_gather_copy_engine(communicator.view(), args, communicator.copy_engine(),
                                        communicator.landing(args.channel), stream),
          "launch (copy engine)");
    return;
  }
  // Low-latency words find their own way through the mailbox; nothing is published.
  if (protocol == Protocol::kSimple) {
    args.published = communicator.publish(args.result, result_bytes);
  }
  check(launch_all_gather(communicator.view(), args, mechanism, protocol, stream), "launch");
}

}  // namespace pk

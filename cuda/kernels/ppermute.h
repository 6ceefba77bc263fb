// ppermute: every rank's operand goes to at most one rank; who gets none has zeros.
#pragma once

#include <cuda_runtime_api.h>

#include "mechanism/mechanism.h"
#include "schedule/push_args.h"
#include "tile/comm_view.h"

namespace pk {

struct Destinations {
  int8_t rank[kMaxRanks];  // [source]: its destination, -1 for none; no destination twice
};

// args.rows = 1; args.from and args.to are set here. kLowLatency needs inner <= low_latency_bytes.
cudaError_t launch_ppermute(const CommView& comm, PushArgs args, const Destinations& destinations,
                            Mechanism mechanism, Protocol protocol, cudaStream_t stream);

cudaError_t load_ppermute();

}  // namespace pk

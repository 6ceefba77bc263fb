// all_gather with the copy-engine mechanism: for large parts, and for callers who need the SMs.
#pragma once

#include <cuda_runtime_api.h>

#include "mechanism/copy_engine.h"
#include "schedule/push_args.h"

namespace pk {

// Host work: a handful of launches and copies a chunk; may be captured.
cudaError_t launch_all_gather_copy_engine(const CommView& comm, const PushArgs& args,
                                          CopyEngine& engine, const Landing& landing,
                                          cudaStream_t stream);

cudaError_t load_all_gather_copy_engine();

}  // namespace pk

// The exchange of a real job: NCCL, on the communicator XLA made for the group. Used when a
// communicator is built or grows, and for nothing else.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "runtime/exchange.h"

namespace pk {

class NcclExchange : public Exchange {
 public:
  // `comm` is an ncclComm_t of the libnccl that XLA loaded. `rank` is this rank's place in the
  // group's own order, or -1 to take NCCL's. Collective. Throws Error when a rank is missing or
  // named twice.
  NcclExchange(void* comm, int rank, cudaStream_t stream);

  int rank() const override { return rank_; }
  int num_ranks() const override { return num_ranks_; }
  void all_gather(const void* mine, void* all, size_t bytes) override;
  using Exchange::all_gather;

 private:
  void* comm_;
  cudaStream_t stream_;
  int rank_ = 0;
  int num_ranks_ = 0;
  std::vector<int> rank_of_;  // [NCCL rank]
};

}  // namespace pk

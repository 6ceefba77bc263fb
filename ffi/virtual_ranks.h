// Test harness: the ranks of a group as streams on whatever GPUs there are, without XLA.
//
// It runs the real kernels on real communicators, built over an exchange among threads instead of
// NCCL, so that the protocols of 8 ranks can be tested on one GPU. Ranks that share a GPU share its
// SMs: a kernel gets few enough blocks for all ranks to be resident together.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "runtime/communicator.h"

namespace pk {

class VirtualRanks {
 public:
  // Rank r lives on devices[r % devices.size()].
  VirtualRanks(int num_ranks, std::vector<int> devices, double timeout_s);
  ~VirtualRanks();
  VirtualRanks(const VirtualRanks&) = delete;
  VirtualRanks& operator=(const VirtualRanks&) = delete;

  int num_ranks() const { return static_cast<int>(ranks_.size()); }

  // Kernels that no communicator loads, on the device of every rank.
  void load(cudaError_t (*load)());

  // The buffers of one rank in one call; `num_sms` is its share of the GPU's.
  struct Buffers {
    const char* source;
    char* result;
    char* scratch;
    int num_sms;
    cudaStream_t stream;
  };
  using Launch = std::function<void(Communicator&, int call, const Buffers&)>;

  struct Calls {
    int count;
    int64_t operand_bytes;  // of one rank in one call, like the others
    int64_t result_bytes;
    int64_t scratch_bytes;
    int channel;
    bool needs_landing;
    int offset;               // moves operands and results off their alignment
    std::vector<int> absent;  // these ranks take no part
  };

  // Calls in a row on one channel, enqueued on all ranks before any result is looked at. operands:
  // [count, num_ranks, operand_bytes]; results: [count, num_ranks, result_bytes], which the device
  // buffers start with. Returns the error text if the ranks did not finish.
  std::string run(const Calls& calls, const uint8_t* operands, uint8_t* results,
                  const Launch& launch);

 private:
  struct Rank {
    int device;
    cudaStream_t stream;
    std::unique_ptr<Communicator> communicator;
  };
  template <typename Body>
  void on_every_rank(Body body);

  struct Meeting;
  std::shared_ptr<Meeting> meeting_;
  std::vector<Rank> ranks_;
};

}  // namespace pk

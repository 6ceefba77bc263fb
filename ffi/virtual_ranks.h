// Test harness: the ranks of a group as streams on whatever GPUs there are, without XLA.
//
// It runs the real kernels on real communicators, built over an exchange among threads instead of
// NCCL, so that the protocols of 8 ranks can be tested on one GPU. Ranks that share a GPU share its
// SMs: a kernel gets few enough blocks for all ranks to be resident together.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mechanism/mechanism.h"
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

  // How one call is made; blocks of rank r are num_blocks[r % size].
  struct Plan {
    Mechanism mechanism;
    Protocol protocol;
    std::vector<int> num_blocks;
  };

  // `calls` all_gathers in a row on one channel, call c by plans[c % size], enqueued on all ranks
  // before any result is looked at. operands: [calls, num_ranks, bytes]; results: [calls,
  // num_ranks, num_ranks * bytes], poisoned first. `offset` moves the device buffers off their
  // alignment. Ranks named in `absent` take no part. Returns the error text if the ranks did not
  // finish.
  std::string all_gather(const uint8_t* operands, uint8_t* results, int calls, int64_t bytes,
                         int64_t rows, const std::vector<Plan>& plans, int channel, int offset,
                         const std::vector<int>& absent);

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

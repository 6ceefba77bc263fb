// The ranks of one group, seen from one of them: shared memory, counters, and what a kernel needs
// to use both.
//
// A communicator is built once for a group and lives as long as the process: its addresses are
// baked into captured CUDA graphs. Everything marked collective is called by all ranks in the same
// order, before any of them executes the op that needs it.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mechanism/copy_engine.h"
#include "runtime/exchange.h"
#include "runtime/symmetric_region.h"
#include "tile/comm_view.h"

namespace pk {

class Communicator {
 public:
  // Collective. `device` is current; `heap_pointer` lies in the allocation that will hold every
  // buffer given to the ops, and points to 8 bytes that may be changed for a moment when the group
  // spans processes. `stream` is idle.
  Communicator(Exchange& exchange, int device, void* heap_pointer, uint64_t timeout_ns,
               cudaStream_t stream);
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  const CommView& view() const { return view_; }
  int rank() const { return view_.rank; }
  int num_ranks() const { return view_.num_ranks; }
  int device() const { return device_; }
  int num_sms() const { return num_sms_; }
  int num_processes() const { return num_processes_; }
  size_t workspace_bytes() const { return workspace_bytes_.load(std::memory_order_relaxed); }

  // Launches asked of this process: replays of a captured graph are not among them.
  void count_launch() { launches_.fetch_add(1, std::memory_order_relaxed); }
  uint64_t launches() const { return launches_.load(std::memory_order_relaxed); }

  // True if the ops of `channel` can run; otherwise prepare_channel must be called first.
  bool has_channel(int channel, bool needs_landing) const;
  // Collective. Grows the workspace; `stream` is idle.
  void prepare_channel(Exchange& exchange, int channel, bool needs_landing, cudaStream_t stream);

  // The offset under which peers find `pointer`. Throws Error if they cannot.
  uint64_t publish(const void* pointer, size_t bytes) const;

  // Copy-engine path, once the channel has been prepared with a landing buffer.
  CopyEngine& copy_engine() { return *copy_engine_; }
  Landing landing(int channel) const;

 private:
  void check_pages(Exchange& exchange, cudaStream_t stream);
  size_t landing_bytes() const;
  void check_heaps(Exchange& exchange, void* scratch, cudaStream_t stream);

  int device_;
  int num_sms_ = 0;
  int num_processes_ = 1;
  std::atomic<uint64_t> launches_{0};
  std::atomic<size_t> workspace_bytes_{0};  // other threads may ask
  std::vector<Placement> placements_;
  CommView view_{};
  std::unique_ptr<SymmetricRegion> region_;  // signal page, then mailboxes
  std::unique_ptr<PeerHeaps> heaps_;
  std::array<std::unique_ptr<SymmetricRegion>, kNumChannels> landing_;
  std::unique_ptr<CopyEngine> copy_engine_;
};

}  // namespace pk

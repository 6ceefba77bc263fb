// What every pk call site knows and does before it executes: which ranks it spans, and their
// Communicator on each local device.
//
// XLA runs Prepare and Initialize of every call site on every execution, also when the calls
// themselves are replayed from a CUDA graph, so the two must cost next to nothing once the
// communicator is there: one request a run and group, one pointer load a call site.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "mechanism/mechanism.h"
#include "runtime/communicator.h"
#include "xla/ffi/api/ffi.h"

namespace pk {

inline constexpr int kMaxLocalDevices = 64;

// The replica groups of a mesh axis. Interned: equal groups are one object for the life of the
// process.
struct Groups {
  std::vector<std::vector<int64_t>> logical;  // logical (flattened) ids, as XLA wants them
  std::vector<std::vector<int64_t>> devices;  // global device ids in the same places, in rank order

  // Throws Error when the arrays do not fit.
  static const Groups* intern(xla::ffi::Span<const int64_t> logical,
                              xla::ffi::Span<const int64_t> devices, int64_t group_size);
  // Place of the device in its group; -1 if it is in none or if the devices of this process are not
  // known.
  int rank_of(int device_ordinal) const;
};

// Global device ids of this process by local ordinal; told by Python before the first lowering.
void set_local_devices(const std::map<int, int64_t>& global_id_of);

// The knobs of one call, as attributes say them.
struct Plan {
  Mechanism mechanism = Mechanism::kRegister;
  Protocol protocol = Protocol::kSimple;
  int num_blocks = 0;
};

// What all ops have; each derives its own with what else it needs.
struct CallSite {
  const char* op = "";
  const Groups* groups = nullptr;
  int channel = 0;
  Plan plan;
  cudaError_t (*load)() = nullptr;  // kernels of its own, which no communicator loads
  std::array<std::atomic<Communicator*>, kMaxLocalDevices>
      ready{};  // set once the channel can run on that device

  virtual ~CallSite() = default;
  bool needs_landing() const { return plan.mechanism == Mechanism::kCopyEngine; }
  int num_ranks() const { return static_cast<int>(groups->logical[0].size()); }
  // Throws Error when execution is asked for on a device that Initialize has not seen.
  Communicator& communicator(int device) const;

  static xla::ffi::TypeId id;
};

XLA_FFI_TypeId* call_site_type_id();
const XLA_FFI_TypeInfo* call_site_type_info();

// The stages that are the same for every op. Prepare tells XLA that the group's communicator will
// be needed (which also takes its lock on concurrent programs), once a run. Initialize builds the
// communicator the first time, and grows it for this call site.
extern "C" XLA_FFI_Error* pk_call_site_prepare(XLA_FFI_CallFrame* frame);
extern "C" XLA_FFI_Error* pk_call_site_initialize(XLA_FFI_CallFrame* frame);

struct CommunicatorInfo {
  int device, rank, num_ranks, num_processes;
  size_t workspace_bytes;
  uint64_t launches;
};
std::vector<CommunicatorInfo> communicators();

}  // namespace pk

#include "ffi/call_site.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <utility>

#include "ffi/collectives_extension.h"
#include "ffi/status.h"
#include "runtime/check.h"
#include "runtime/error_log.h"
#include "runtime/nccl_exchange.h"
#include "runtime/time_limit.h"

namespace pk {
namespace {

// XLA's own communicator for the group: sharing it saves a second NCCL initialisation.
constexpr int64_t kCommunicationId = 0;

// Everything that lives as long as the process. Never destroyed: device addresses of it are baked
// into captured graphs, and at exit the driver takes back memory and mappings by itself.
struct Process {
  std::shared_mutex mutex;
  std::map<int, int64_t> global_id_of;
  std::vector<std::unique_ptr<Groups>> groups;
  std::map<std::pair<const Groups*, int>, std::unique_ptr<Communicator>> communicators;
  std::map<std::pair<const Groups*, int>, std::string>
      broken;  // why no further attempt may be made
};
Process& process() {
  static Process& process = *new Process;
  return process;
}

Communicator* find(const Groups* groups, int device) {
  std::shared_lock lock(process().mutex);
  const auto found = process().communicators.find({groups, device});
  return found == process().communicators.end() ? nullptr : found->second.get();
}

XlaCommunicators extension(const xla::ffi::Context& context) {
  auto found = context.get<xla::ffi::Extension<CollectivesExtension>>();
  if (!found.has_value()) {
    throw Error("this jaxlib gives no FFI Collectives extension (needs jaxlib >= 0.11.2): " +
                found.error().message());
  }
  return *found;
}

// After a rank was lost half way, an exchange of it may still be under way: another attempt would
// meet it.
void refuse_if_broken(const Groups* groups, int device) {
  std::shared_lock lock(process().mutex);
  const auto found = process().broken.find({groups, device});
  if (found == process().broken.end()) return;
  throw Error("an earlier attempt to build this communicator failed (" + found->second +
              "); restart the processes");
}

// Builds the communicator of a call site unless there is one, makes its channel ready and loads its
// own kernels. Collective.
Communicator& build(const CallSite& site, Communicator* communicator, cudaStream_t stream,
                    int device, const xla::ffi::Context& context,
                    const std::function<void*()>& buffer) {
  const uint64_t limit_ns = time_limit_ns();
  // What earlier programs enqueued may be waiting for peers: let it finish, before anything below
  // could wait for the device, and before the time for the other ranks to come here starts.
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  auto xla_communicator = extension(context).GetCommunicator(
      xla::ffi::GroupMode::kFlattenedId, site.groups->logical, kCommunicationId);
  if (!xla_communicator.has_value()) {
    throw Error("no communicator from XLA: " + xla_communicator.error().message());
  }
  NcclExchange exchange(*xla_communicator, site.groups->rank_of(device), stream);
  if (!communicator) {
    auto made = std::make_unique<Communicator>(exchange, device, buffer(), limit_ns, stream);
    communicator = made.get();
    std::unique_lock lock(process().mutex);
    process().communicators[{site.groups, device}] = std::move(made);
  }
  communicator->prepare_channel(exchange, site.channel, site.needs_landing(), stream);
  if (site.load) {
    exchange.together("loading kernels", [&] {
      check(site.load(), "loading the op's kernels (are they built for this GPU?)");
    });
  }
  return *communicator;
}

}  // namespace

const Groups* Groups::intern(xla::ffi::Span<const int64_t> logical,
                             xla::ffi::Span<const int64_t> devices, int64_t group_size) {
  if (group_size < 1 || group_size > kMaxRanks || logical.size() == 0 ||
      logical.size() % group_size != 0 || devices.size() != logical.size()) {
    throw Error("attributes groups (" + std::to_string(logical.size()) + " ids), devices (" +
                std::to_string(devices.size()) + " ids) and group_size " +
                std::to_string(group_size) + " do not fit");
  }
  auto made = std::make_unique<Groups>();
  for (size_t at = 0; at < logical.size(); at += group_size) {
    made->logical.emplace_back(logical.begin() + at, logical.begin() + at + group_size);
    made->devices.emplace_back(devices.begin() + at, devices.begin() + at + group_size);
  }
  std::unique_lock lock(process().mutex);
  for (const auto& known : process().groups) {
    if (known->logical == made->logical && known->devices == made->devices) return known.get();
  }
  return process().groups.emplace_back(std::move(made)).get();
}

int Groups::rank_of(int device_ordinal) const {
  std::shared_lock lock(process().mutex);
  const auto id = process().global_id_of.find(device_ordinal);
  if (id == process().global_id_of.end()) return -1;
  for (const std::vector<int64_t>& group : devices) {
    const auto place = std::find(group.begin(), group.end(), id->second);
    if (place != group.end()) return static_cast<int>(place - group.begin());
  }
  return -1;
}

void set_local_devices(const std::map<int, int64_t>& global_id_of) {
  std::unique_lock lock(process().mutex);
  process().global_id_of = global_id_of;
}

Communicator& CallSite::communicator(int device) const {
  Communicator* found = device >= 0 && device < kMaxLocalDevices
                            ? ready[device].load(std::memory_order_acquire)
                            : nullptr;
  if (!found)
    throw Error("device " + std::to_string(device) + " was not initialised for this call");
  return *found;
}

std::vector<CommunicatorInfo> communicators() {
  std::shared_lock lock(process().mutex);
  std::vector<CommunicatorInfo> all;
  for (const auto& [key, c] : process().communicators) {
    all.push_back({c->device(), c->rank(), c->num_ranks(), c->num_processes(), c->workspace_bytes(),
                   c->launches()});
  }
  return all;
}

namespace {

// The request is repeated in every run although the communicator is long known. It is XLA's promise
// that no device executes this run before all of them are ready to: without it one GPU could spin
// for a peer whose thread is still allocating or loading, which CUDA may hold up until the GPUs are
// idle.
xla::ffi::Error prepare(CallSite* call_site, xla::ffi::RunId run, int32_t device,
                        xla::ffi::Context context) {
  const CallSite& site = *call_site;
  struct Asked {
    int64_t run = -1;
    int device = -1;
    std::vector<const Groups*> groups;
  };
  thread_local Asked asked;
  if (asked.run != run.run_id || asked.device != device) {
    if (auto text = error_text()) return xla::ffi::Error::Internal(*text);
    asked.run = run.run_id;
    asked.device = device;
    asked.groups.clear();
  }
  if (std::find(asked.groups.begin(), asked.groups.end(), site.groups) != asked.groups.end()) {
    return xla::ffi::Error::Success();
  }
  asked.groups.push_back(site.groups);
  xla::ffi::Error requested = xla::ffi::Error::Success();
  xla::ffi::Error failed = guarded(site.op, [&] {
    requested = extension(context).RequestCommunicator(xla::ffi::GroupMode::kFlattenedId,
                                                       site.groups->logical, kCommunicationId);
  });
  return failed.failure() ? failed : requested;
}

xla::ffi::Error initialize(CallSite* call_site, cudaStream_t stream, int32_t device,
                           xla::ffi::Context context, xla::ffi::RemainingRets results) {
  CallSite& site = *call_site;
  // Any buffer of XLA's heap.
  const auto buffer = [&]() -> void* {
    auto result = results.get<xla::ffi::AnyBuffer>(0);
    if (!result.has_value())
      throw Error("Initialize got no result buffer: " + result.error().message());
    return (*result)->untyped_data();
  };
  if (device < 0 || device >= kMaxLocalDevices) {
    return xla::ffi::Error::Internal("pk_jax: device ordinal " + std::to_string(device) +
                                     " is out of range");
  }
  if (site.ready[device].load(std::memory_order_relaxed)) return xla::ffi::Error::Success();
  return guarded(site.op, [&] {
    Communicator* communicator = find(site.groups, device);
    // A call site with kernels of its own goes this way once on each device, whatever others did:
    // all ranks of a group do so alike.
    if (!communicator || site.load ||
        !communicator->has_channel(site.channel, site.needs_landing())) {
      refuse_if_broken(site.groups, device);
      try {
        communicator = &build(site, communicator, stream, device, context, buffer);
      } catch (const Lost& error) {
        std::unique_lock lock(process().mutex);
        process().broken[{site.groups, device}] = error.what();
        throw;
      }
    }
    site.ready[device].store(communicator, std::memory_order_release);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(pk_call_site_prepare, prepare,
                              xla::ffi::Ffi::BindPrepare()
                                  .Ctx<xla::ffi::State<CallSite>>()
                                  .Ctx<xla::ffi::RunId>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Ctx<xla::ffi::Context>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(pk_call_site_initialize, initialize,
                              xla::ffi::Ffi::BindInitialize()
                                  .Ctx<xla::ffi::State<CallSite>>()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<xla::ffi::DeviceOrdinal>()
                                  .Ctx<xla::ffi::Context>()
                                  .RemainingRets());

xla::ffi::TypeId CallSite::id = {};

XLA_FFI_TypeId* call_site_type_id() { return &CallSite::id; }

const XLA_FFI_TypeInfo* call_site_type_info() {
  static const XLA_FFI_TypeInfo info = xla::ffi::MakeTypeInfo<CallSite>();
  return &info;
}

}  // namespace pk

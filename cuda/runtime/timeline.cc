#include "runtime/timeline.h"

#include "runtime/check.h"

#ifdef PK_JAX_TIMELINE
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>

#include "kernels/clock.h"
#include "tile/timeline.h"
#endif

namespace pk::timeline {

#ifndef PK_JAX_TIMELINE

namespace {
[[noreturn]] void missing() {
  throw Error("this build of pk_jax records no timelines: it needs -DPK_JAX_TIMELINE=ON");
}
}  // namespace

void start(int) { missing(); }
Records take(int) { missing(); }
Reading read_clock(int) { missing(); }

#else

namespace {

// Makes a device the current one for as long as it lives.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    check(cudaSetDevice(device), "cudaSetDevice");
  }
  ~OnDevice() { cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

struct Freed {
  void operator()(void* memory) const { cudaFree(memory); }
};
using DeviceBuffer = std::unique_ptr<Buffer, Freed>;

std::mutex mutex;
std::map<int, DeviceBuffer> recording;  // by device

// On the current device, between kernels.
void set_pointers(Buffer* buffer) {
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  for (const void* pointer : pointers())
    check(cudaMemcpyToSymbol(pointer, &buffer, sizeof(buffer)), "cudaMemcpyToSymbol");
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

int64_t host_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

void start(int device) {
  const std::lock_guard lock(mutex);
  const OnDevice current(device);
  if (recording.count(device) != 0)
    throw Error("device " + std::to_string(device) + " is recording already: take() ends that");
  void* memory = nullptr;
  check(cudaMalloc(&memory, sizeof(Buffer)), "cudaMalloc of the timeline");
  DeviceBuffer buffer(static_cast<Buffer*>(memory));
  check(cudaMemset(memory, 0, sizeof(Buffer)), "cudaMemset");
  set_pointers(buffer.get());
  recording[device] = std::move(buffer);
}

Records take(int device) {
  const std::lock_guard lock(mutex);
  const OnDevice current(device);
  const auto found = recording.find(device);
  if (found == recording.end())
    throw Error("device " + std::to_string(device) + " records nothing: start() comes first");
  set_pointers(nullptr);
  const DeviceBuffer buffer = std::move(found->second);
  recording.erase(found);
  uint32_t begun = 0;
  check(cudaMemcpy(&begun, &buffer->begun, sizeof(begun), cudaMemcpyDefault), "cudaMemcpy");
  const uint32_t kept = std::min<uint32_t>(begun, kMostBlocks);
  Records records{std::string(kept * sizeof(Block), '\0'), begun - kept};
  check(cudaMemcpy(records.blocks.data(), buffer->blocks, records.blocks.size(), cudaMemcpyDefault),
        "cudaMemcpy");
  return records;
}

Reading read_clock(int device) {
  constexpr uint32_t kReadings = 200;
  constexpr int64_t kLimitNs = 5'000'000'000;  // the kernel gives up earlier
  const OnDevice current(device);
  void* memory = nullptr;
  check(cudaHostAlloc(&memory, sizeof(ClockTalk), cudaHostAllocPortable | cudaHostAllocMapped),
        "cudaHostAlloc");
  const auto release = [](ClockTalk* talk) { cudaFreeHost(talk); };
  const std::unique_ptr<ClockTalk, decltype(release)> talk(new (memory) ClockTalk{}, release);
  check(launch_clock(talk.get(), kReadings, nullptr), "the kernel that tells its clock");
  Reading best{0, 0, INT64_MAX};
  bool answered = true;
  const int64_t start = host_ns();
  for (uint32_t question = 1; question <= kReadings && answered; ++question) {
    const int64_t before = host_ns();
    std::atomic_ref(talk->asked).store(question, std::memory_order_release);
    // Acquire of the time; pairs with the release in tell_clock().
    while (std::atomic_ref(talk->answered).load(std::memory_order_acquire) != question && answered)
      answered = host_ns() - start < kLimitNs;
    const int64_t after = host_ns();
    if (answered && (after - before) / 2 < best.error_ns)
      best = {talk->ns, before + (after - before) / 2, (after - before) / 2};
  }
  check(cudaDeviceSynchronize(), "the kernel that tells its clock");
  if (!answered) throw Error("device " + std::to_string(device) + " does not tell its clock");
  return best;
}

#endif

}  // namespace pk::timeline

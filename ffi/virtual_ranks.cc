#include "ffi/virtual_ranks.h"

#include <algorithm>
#include <barrier>
#include <cstring>
#include <exception>
#include <thread>

#include "runtime/check.h"
#include "runtime/error_log.h"

namespace pk {

// Where the threads that stand for ranks exchange bytes.
struct VirtualRanks::Meeting {
  explicit Meeting(int num_ranks) : everybody(num_ranks), parts(num_ranks) {}
  std::barrier<> everybody;
  std::vector<const void*> parts;
};

namespace {

template <typename Meeting>
class ThreadExchange : public Exchange {
 public:
  ThreadExchange(Meeting& meeting, int rank) : meeting_(meeting), rank_(rank) {}
  int rank() const override { return rank_; }
  int num_ranks() const override { return static_cast<int>(meeting_.parts.size()); }
  void all_gather(const void* mine, void* all, size_t bytes) override {
    meeting_.parts[rank_] = mine;
    meeting_.everybody.arrive_and_wait();
    for (int r = 0; r < num_ranks(); ++r)
      std::memcpy(static_cast<char*>(all) + r * bytes, meeting_.parts[r], bytes);
    meeting_.everybody.arrive_and_wait();
  }
  using Exchange::all_gather;

 private:
  Meeting& meeting_;
  int rank_;
};

class DeviceBuffer {
 public:
  DeviceBuffer(int device, size_t bytes) : device_(device) {
    check(cudaSetDevice(device), "cudaSetDevice");
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes), "cudaMalloc");
    data_ = static_cast<char*>(memory);
  }
  DeviceBuffer(DeviceBuffer&& other) noexcept : device_(other.device_), data_(other.data_) {
    other.data_ = nullptr;
  }
  ~DeviceBuffer() {
    if (!data_) return;
    cudaSetDevice(device_);
    cudaFree(data_);
  }
  char* get() const { return data_; }

 private:
  int device_;
  char* data_ = nullptr;
};

}  // namespace

template <typename Body>
void VirtualRanks::on_every_rank(Body body) {
  std::vector<std::thread> threads;
  std::vector<std::exception_ptr> failures(ranks_.size());
  for (int r = 0; r < num_ranks(); ++r) {
    threads.emplace_back([&, r] {
      try {
        check(cudaSetDevice(ranks_[r].device), "cudaSetDevice");
        ThreadExchange<Meeting> exchange(*meeting_, r);
        body(exchange, ranks_[r]);
      } catch (...) {
        failures[r] = std::current_exception();
        // The others go on, and read zeros of this rank.
        static const char zeros[1 << 12] = {};
        meeting_->parts[r] = zeros;
        meeting_->everybody.arrive_and_drop();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& failure : failures) {
    if (!failure) continue;
    meeting_ = std::make_shared<Meeting>(num_ranks());  // who failed has left the old one
    std::rethrow_exception(failure);
  }
}

VirtualRanks::VirtualRanks(int num_ranks, std::vector<int> devices, double timeout_s)
    : meeting_(std::make_shared<Meeting>(num_ranks)), ranks_(num_ranks) {
  if (devices.empty()) throw Error("VirtualRanks needs at least one device");
  for (int r = 0; r < num_ranks; ++r) ranks_[r].device = devices[r % devices.size()];
  on_every_rank([&](Exchange& exchange, Rank& rank) {
    check(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking),
          "cudaStreamCreateWithFlags");
    rank.communicator = std::make_unique<Communicator>(
        exchange, rank.device, nullptr, static_cast<uint64_t>(timeout_s * 1e9), rank.stream);
  });
}

VirtualRanks::~VirtualRanks() {
  for (Rank& rank : ranks_) {
    cudaSetDevice(rank.device);
    cudaDeviceSynchronize();
    rank.communicator.reset();
    cudaStreamDestroy(rank.stream);
  }
}

void VirtualRanks::load(cudaError_t (*load)()) {
  on_every_rank([&](Exchange&, Rank&) { check(load(), "loading the op's kernels"); });
}

std::string VirtualRanks::run(const Calls& calls, const uint8_t* operands, uint8_t* results,
                              const Launch& launch) {
  if (calls.operand_bytes < 1 || calls.result_bytes < 1) throw Error("nothing to move");
  on_every_rank([&](Exchange& exchange, Rank& rank) {
    if (!rank.communicator->has_channel(calls.channel, calls.needs_landing))
      rank.communicator->prepare_channel(exchange, calls.channel, calls.needs_landing, rank.stream);
  });
  // One buffer of each kind a rank, cut into calls: 256-byte aligned like XLA's own buffers.
  const auto stride = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
  std::vector<DeviceBuffer> sources, outputs, scratches;
  for (int r = 0; r < num_ranks(); ++r) {
    const int device = ranks_[r].device;
    sources.emplace_back(device, calls.count * stride(calls.operand_bytes) + calls.offset);
    outputs.emplace_back(device, calls.count * stride(calls.result_bytes) + calls.offset);
    scratches.emplace_back(device, calls.count * stride(calls.scratch_bytes) + 1);
  }
  const auto source = [&](int r, int call) {
    return sources[r].get() + call * stride(calls.operand_bytes) + calls.offset;
  };
  const auto output = [&](int r, int call) {
    return outputs[r].get() + call * stride(calls.result_bytes) + calls.offset;
  };
  const auto at = [&](int call, int r, int64_t bytes) {
    return (static_cast<int64_t>(call) * num_ranks() + r) * bytes;
  };
  for (int r = 0; r < num_ranks(); ++r) {
    check(cudaSetDevice(ranks_[r].device), "cudaSetDevice");
    check(cudaMemset(scratches[r].get(), 0xa5, calls.count * stride(calls.scratch_bytes) + 1),
          "cudaMemset");
    for (int call = 0; call < calls.count; ++call) {
      check(cudaMemcpy(source(r, call), operands + at(call, r, calls.operand_bytes),
                       calls.operand_bytes, cudaMemcpyHostToDevice),
            "cudaMemcpy");
      check(cudaMemcpy(output(r, call), results + at(call, r, calls.result_bytes),
                       calls.result_bytes, cudaMemcpyHostToDevice),
            "cudaMemcpy");
    }
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  // A thread a rank, as XLA does it: no rank's launches wait for another's.
  on_every_rank([&](Exchange& exchange, Rank& rank) {
    const int r = exchange.rank();
    if (std::find(calls.absent.begin(), calls.absent.end(), r) != calls.absent.end()) return;
    for (int call = 0; call < calls.count; ++call) {
      launch(*rank.communicator, call,
             {source(r, call), output(r, call),
              scratches[r].get() + call * stride(calls.scratch_bytes),
              std::max(1, rank.communicator->num_sms() / num_ranks()), rank.stream});
    }
  });
  for (Rank& rank : ranks_) {
    check(cudaSetDevice(rank.device), "cudaSetDevice");
    if (cudaStreamSynchronize(rank.stream) != cudaSuccess)
      return error_text().value_or("the kernels failed without a word");
  }
  for (int r = 0; r < num_ranks(); ++r) {
    check(cudaSetDevice(ranks_[r].device), "cudaSetDevice");
    for (int call = 0; call < calls.count; ++call) {
      check(cudaMemcpy(results + at(call, r, calls.result_bytes), output(r, call),
                       calls.result_bytes, cudaMemcpyDeviceToHost),
            "cudaMemcpy");
    }
  }
  return "";
}

}  // namespace pk

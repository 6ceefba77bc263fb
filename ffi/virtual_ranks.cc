#include "ffi/virtual_ranks.h"

#include <algorithm>
#include <barrier>
#include <cstring>
#include <exception>
#include <thread>

#include "ffi/launch.h"
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
    if (failure) std::rethrow_exception(failure);
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

std::string VirtualRanks::all_gather(const uint8_t* operands, uint8_t* results, int calls,
                                     int64_t bytes, int64_t rows, const std::vector<Plan>& plans,
                                     int channel, int offset, const std::vector<int>& absent) {
  const bool landing = std::any_of(plans.begin(), plans.end(), [](const Plan& plan) {
    return plan.mechanism == Mechanism::kCopyEngine;
  });
  if (plans.empty()) throw Error("all_gather needs at least one plan");
  const int64_t out_bytes = bytes * num_ranks();
  if (rows < 1 || bytes < 1 || bytes % rows != 0)
    throw Error("bytes must be a positive multiple of rows");
  on_every_rank([&](Exchange& exchange, Rank& rank) {
    if (!rank.communicator->has_channel(channel, landing))
      rank.communicator->prepare_channel(exchange, channel, landing, rank.stream);
  });
  std::vector<DeviceBuffer> sources, outputs;
  for (int r = 0; r < num_ranks(); ++r) {
    sources.emplace_back(ranks_[r].device, calls * (bytes + 256) + offset);
    outputs.emplace_back(ranks_[r].device, calls * (out_bytes + 256) + offset);
  }
  // 256-byte aligned like XLA's own buffers, then off by `offset`.
  const auto source = [&](int r, int call) {
    return sources[r].get() + call * ((bytes + 255) / 256 * 256) + offset;
  };
  const auto output = [&](int r, int call) {
    return outputs[r].get() + call * ((out_bytes + 255) / 256 * 256) + offset;
  };
  for (int r = 0; r < num_ranks(); ++r) {
    check(cudaSetDevice(ranks_[r].device), "cudaSetDevice");
    for (int call = 0; call < calls; ++call) {
      check(cudaMemcpy(source(r, call),
                       operands + (static_cast<int64_t>(call) * num_ranks() + r) * bytes, bytes,
                       cudaMemcpyHostToDevice),
            "cudaMemcpy");
      check(cudaMemset(output(r, call), 0xa5, out_bytes), "cudaMemset");
    }
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  // A thread a rank, as XLA does it: no rank's launches wait for another's.
  on_every_rank([&](Exchange& exchange, Rank& rank) {
    const int r = exchange.rank();
    if (std::find(absent.begin(), absent.end(), r) != absent.end()) return;
    Communicator& communicator = *rank.communicator;
    for (int call = 0; call < calls; ++call) {
      AllGatherArgs args{};
      args.source = source(r, call);
      args.result = output(r, call);
      args.rows = rows;
      args.inner = bytes / rows;
      args.channel = channel;
      args.num_sms = std::max(1, communicator.num_sms() / num_ranks());
      const Plan& plan = plans[call % plans.size()];
      if (!plan.num_blocks.empty()) args.num_blocks = plan.num_blocks[r % plan.num_blocks.size()];
      run_all_gather(communicator, args, out_bytes, plan.mechanism, plan.protocol, rank.stream);
    }
  });
  for (Rank& rank : ranks_) {
    check(cudaSetDevice(rank.device), "cudaSetDevice");
    if (cudaStreamSynchronize(rank.stream) != cudaSuccess)
      return error_text().value_or("the kernels failed without a word");
  }
  for (int r = 0; r < num_ranks(); ++r) {
    check(cudaSetDevice(ranks_[r].device), "cudaSetDevice");
    for (int call = 0; call < calls; ++call) {
      check(cudaMemcpy(results + (static_cast<int64_t>(call) * num_ranks() + r) * out_bytes,
                       output(r, call), out_bytes, cudaMemcpyDeviceToHost),
            "cudaMemcpy");
    }
  }
  return "";
}

}  // namespace pk

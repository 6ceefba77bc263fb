#include "runtime/nccl_exchange.h"

#include <dlfcn.h>

#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "runtime/check.h"
#include "runtime/time_limit.h"

namespace pk {
namespace {

constexpr int kNcclSuccess = 0;
constexpr int kNcclInProgress = 7;
constexpr int kNcclInt8 = 0;

// The calls used, found in the library that is already in the process: linking a libnccl of our own
// would make two.
struct Nccl {
  int (*comm_user_rank)(void*, int*);
  int (*comm_count)(void*, int*);
  int (*all_gather)(const void*, void*, size_t, int, void*, cudaStream_t);
  int (*comm_get_async_error)(void*, int*);
  const char* (*get_error_string)(int);

  static const Nccl& get() {
    static const Nccl nccl = load();
    return nccl;
  }

 private:
  template <typename Function>
  static void look_up(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (!function) throw Error(std::string("XLA's NCCL has no ") + name);
  }
  static Nccl load() {
    void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
    if (!library) library = RTLD_DEFAULT;
    Nccl nccl{};
    look_up(library, "ncclCommUserRank", nccl.comm_user_rank);
    look_up(library, "ncclCommCount", nccl.comm_count);
    look_up(library, "ncclAllGather", nccl.all_gather);
    look_up(library, "ncclCommGetAsyncError", nccl.comm_get_async_error);
    look_up(library, "ncclGetErrorString", nccl.get_error_string);
    return nccl;
  }
};

void check_nccl(int status, const char* what) {
  if (status != kNcclSuccess && status != kNcclInProgress) {
    throw Error(std::string(what) + ": " + Nccl::get().get_error_string(status));
  }
}

// Device memory for one exchange. Lost on purpose unless the exchange is over: freeing it would
// wait for the NCCL kernel that is still waiting for some rank.
struct Buffer {
  char* data = nullptr;
  bool idle = true;
  explicit Buffer(size_t bytes) {
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes), "cudaMalloc");
    data = static_cast<char*>(memory);
  }
  ~Buffer() {
    if (idle) cudaFree(data);
  }
};

// XLA's communicators may be non-blocking, and a rank may be gone: wait with an eye on both.
void wait(void* comm, cudaStream_t stream, Buffer& buffer) {
  const auto limit = std::chrono::nanoseconds(time_limit_ns());
  const auto start = std::chrono::steady_clock::now();
  buffer.idle = false;
  for (int polls = 0;; ++polls) {
    int status = kNcclSuccess;
    check_nccl(Nccl::get().comm_get_async_error(comm, &status), "ncclCommGetAsyncError");
    if (status != kNcclSuccess && status != kNcclInProgress) {
      throw Lost(std::string("NCCL: ") + Nccl::get().get_error_string(status));
    }
    const cudaError_t done = cudaStreamQuery(stream);
    if (done == cudaSuccess && status == kNcclSuccess) {
      buffer.idle = true;
      return;
    }
    if (done != cudaErrorNotReady) check(done, "cudaStreamQuery");
    if (std::chrono::steady_clock::now() - start > limit) {
      throw Lost(
          "a rank did not take part in building a communicator within PK_JAX_TIMEOUT_S; did "
          "every process run the same program?");
    }
    if (polls > 1000) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

}  // namespace

NcclExchange::NcclExchange(void* comm, int rank, cudaStream_t stream)
    : comm_(comm), stream_(stream) {
  int nccl_rank = 0;
  check_nccl(Nccl::get().comm_user_rank(comm, &nccl_rank), "ncclCommUserRank");
  check_nccl(Nccl::get().comm_count(comm, &num_ranks_), "ncclCommCount");
  rank_ = nccl_rank;
  for (int r = 0; r < num_ranks_; ++r) rank_of_.push_back(r);
  const std::vector<int> order = Exchange::all_gather(rank < 0 ? nccl_rank : rank);
  std::vector<bool> seen(num_ranks_, false);
  for (int r : order) {
    if (r < 0 || r >= num_ranks_ || seen[r])
      throw Error("the ranks of the group and of XLA's communicator do not match");
    seen[r] = true;
  }
  rank_of_ = order;
  rank_ = order[nccl_rank];
}

void NcclExchange::all_gather(const void* mine, void* all, size_t bytes) {
  Buffer buffer(bytes * (num_ranks_ + 1));
  check(cudaMemcpyAsync(buffer.data, mine, bytes, cudaMemcpyHostToDevice, stream_),
        "cudaMemcpyAsync");
  check_nccl(
      Nccl::get().all_gather(buffer.data, buffer.data + bytes, bytes, kNcclInt8, comm_, stream_),
      "ncclAllGather");
  wait(comm_, stream_, buffer);
  std::vector<char> gathered(bytes * num_ranks_);
  check(cudaMemcpyAsync(gathered.data(), buffer.data + bytes, gathered.size(),
                        cudaMemcpyDeviceToHost, stream_),
        "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  for (int r = 0; r < num_ranks_; ++r) {
    std::memcpy(static_cast<char*>(all) + rank_of_[r] * bytes, gathered.data() + r * bytes, bytes);
  }
}

}  // namespace pk

#include "runtime/communicator.h"

#include <algorithm>
#include <functional>
#include <set>
#include <string>

#include "kernels/all_gather.h"
#include "kernels/all_gather_copy_engine.h"
#include "kernels/all_to_all.h"
#include "kernels/ppermute.h"
#include "kernels/ragged_all_to_all.h"
#include "kernels/reduce.h"
#include "kernels/round_trip.h"
#include "runtime/check.h"
#include "runtime/error_log.h"

namespace pk {
namespace {

// A few words of device memory for a check.
class Scratch {
 public:
  explicit Scratch(size_t words) : words_(words) {
    void* memory = nullptr;
    check(cudaMalloc(&memory, words * sizeof(uint64_t)), "cudaMalloc");
    pointer_ = static_cast<uint64_t*>(memory);
  }
  ~Scratch() { cudaFree(pointer_); }
  uint64_t* get() const { return pointer_; }
  std::vector<uint64_t> read(cudaStream_t stream) const {
    std::vector<uint64_t> host(words_);
    check(cudaMemcpyAsync(host.data(), pointer_, words_ * sizeof(uint64_t), cudaMemcpyDeviceToHost,
                          stream),
          "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    return host;
  }

 private:
  uint64_t* pointer_ = nullptr;
  size_t words_;
};

size_t mailbox_bytes(int num_channels, int num_ranks) {
  return low_latency_offset(num_channels, 0, 0, num_ranks);
}

[[noreturn]] void wrong_data(const char* where, int rank, int peer) {
  throw Error(
      std::string("the data round trip between rank ") + std::to_string(rank) + " and rank " +
      std::to_string(peer) + " (" + where +
      ") brought back wrong data although peer access is reported: this pair of GPUs cannot be "
      "trusted; check "
      "IOMMU/ACS settings and `nvidia-smi topo -p2p rw`, or use implementation=\"reference\"");
}

void enable_peer_access(const std::vector<Placement>& placements, int rank) {
  for (size_t peer = 0; peer < placements.size(); ++peer) {
    if (placements[peer].host == placements[rank].host) continue;
    throw Error("rank " + std::to_string(peer) + " is on another host than rank " +
                std::to_string(rank) +
                ": their memory cannot be mapped; compose a pk op inside a host with a jax.lax op "
                "across hosts");
  }
  for (const Placement& peer : placements) {
    if (peer.process != placements[rank].process || peer.device == placements[rank].device)
      continue;
    int can = 0;
    check(cudaDeviceCanAccessPeer(&can, placements[rank].device, peer.device),
          "cudaDeviceCanAccessPeer");
    if (!can) {
      throw Error("GPU " + std::to_string(placements[rank].device) + " has no peer access to GPU " +
                  std::to_string(peer.device));
    }
    const cudaError_t status = cudaDeviceEnablePeerAccess(peer.device, 0);
    if (status == cudaErrorPeerAccessAlreadyEnabled) {
      cudaGetLastError();  // XLA has done so already; clear the sticky report
    } else {
      check(status, "cudaDeviceEnablePeerAccess");
    }
  }
}

}  // namespace

Communicator::Communicator(Exchange& exchange, int device, void* heap_pointer, uint64_t timeout_ns,
                           cudaStream_t stream)
    : device_(device) {
  const int rank = exchange.rank();
  const int num_ranks = exchange.num_ranks();
  Placement mine{};
  exchange.together("looking at the device", [&] {
    if (num_ranks > kMaxRanks) {
      throw Error(std::to_string(num_ranks) + " ranks; the most is " + std::to_string(kMaxRanks));
    }
    check(cudaDeviceGetAttribute(&num_sms_, cudaDevAttrMultiProcessorCount, device),
          "cudaDeviceGetAttribute");
    mine = Placement{std::hash<std::string>{}(host_id()), process_id(), device};
  });
  placements_ = exchange.all_gather(mine);
  exchange.together("enabling peer access", [&] { enable_peer_access(placements_, rank); });
  std::set<uint64_t> processes;
  for (const Placement& placement : placements_) processes.insert(placement.process);
  num_processes_ = static_cast<int>(processes.size());

  region_ = std::make_unique<SymmetricRegion>(exchange, placements_,
                                              mailbox_bytes(kNumChannels, num_ranks));
  region_->grow(exchange, kSignalPageBytes, stream);
  view_.rank = rank;
  view_.num_ranks = num_ranks;
  view_.timeout_ns = timeout_ns;
  for (int peer = 0; peer < num_ranks; ++peer) view_.region[peer] = region_->base(peer);
  check_pages(exchange, stream);

  heaps_ = std::make_unique<PeerHeaps>(exchange, placements_, heap_pointer);
  if (num_processes_ > 1) check_heaps(exchange, heap_pointer, stream);

  // Loading a kernel may wait for running ones; none may spin for a peer that is still loading.
  exchange.together("loading kernels", [&] {
    view_.error = new_error_record();
    uint64_t heap_base[kMaxRanks] = {};
    for (int peer = 0; peer < num_ranks; ++peer) {
      heap_base[peer] = reinterpret_cast<uint64_t>(heaps_->base(peer));
    }
    check(cudaMemcpyAsync(region_->base(rank) + offsetof(SignalPage, heap_base), heap_base,
                          sizeof heap_base, cudaMemcpyHostToDevice, stream),
          "cudaMemcpyAsync");
    check(load_all_gather(), "loading the all_gather kernels (is the library built for this GPU?)");
    check(load_all_gather_copy_engine(), "loading the all_gather copy-engine kernels");
    check(load_all_to_all(), "loading the all_to_all kernels");
    check(load_ppermute(), "loading the ppermute kernels");
    check(load_ragged_all_to_all(), "loading the ragged_all_to_all kernels");
    check(load_reduce(), "loading the kernels of psum and psum_scatter");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  });
}

void Communicator::check_pages(Exchange& exchange, cudaStream_t stream) {
  const uint64_t seed = exchange.all_gather(process_id() ^ reinterpret_cast<uint64_t>(this))[0];
  exchange.together("writing into the peers' memory", [&] {
    check(load_round_trip(), "loading the round-trip kernels (is the library built for this GPU?)");
    check(launch_leave_tokens(view_, seed, stream), "launch_leave_tokens");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  });
  exchange.together("the data round trip", [&] {
    Scratch scratch(kObservedPerPeer * num_ranks());
    check(launch_read_tokens(view_, scratch.get(), stream), "launch_read_tokens");
    const std::vector<uint64_t> observed = scratch.read(stream);
    for (int peer = 0; peer < num_ranks(); ++peer) {
      const uint64_t* seen = &observed[kObservedPerPeer * peer];
      if (seen[0] != round_trip_token(seed, peer, rank()) ||
          seen[1] != round_trip_token(seed, rank(), peer) || seen[2] != 1) {
        wrong_data("signal page", rank(), peer);
      }
    }
  });
}

void Communicator::check_heaps(Exchange& exchange, void* scratch_word, cudaStream_t stream) {
  uint64_t* word = static_cast<uint64_t*>(scratch_word);
  const uint64_t seed = process_id() + 1;
  uint64_t offset = 0;
  std::unique_ptr<Scratch> scratch;  // a word seen of each rank, then the word's own content
  bool swapped = false;
  const auto restore = [&] {
    if (!swapped) return;
    swapped = false;
    check(cudaMemcpyAsync(word, scratch->get() + num_ranks(), sizeof(uint64_t),
                          cudaMemcpyDeviceToDevice, stream),
          "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  };
  try {
    exchange.together("writing into XLA's heap", [&] {
      if (!heaps_->locate(scratch_word, sizeof(uint64_t), &offset)) {
        throw Error("the exported heap does not hold its own buffer");
      }
      scratch = std::make_unique<Scratch>(num_ranks() + 1);
      check(launch_swap_word(word, round_trip_token(seed, rank(), rank()),
                             scratch->get() + num_ranks(), stream),
            "launch_swap_word");
      swapped = true;
      check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    });
    const std::vector<uint64_t> offsets = exchange.all_gather(offset);
    const std::vector<uint64_t> seeds = exchange.all_gather(seed);
    exchange.together("the data round trip through XLA's heap", [&] {
      for (int peer = 0; peer < num_ranks(); ++peer) {
        const char* remote =
            peer == rank() ? reinterpret_cast<char*>(word) : heaps_->base(peer) + offsets[peer];
        check(launch_read_word(reinterpret_cast<const uint64_t*>(remote), scratch->get() + peer,
                               stream),
              "launch_read_word");
      }
      const std::vector<uint64_t> seen = scratch->read(stream);
      for (int peer = 0; peer < num_ranks(); ++peer) {
        if (seen[peer] != round_trip_token(seeds[peer], peer, peer)) {
          wrong_data("XLA's heap", rank(), peer);
        }
      }
    });
    exchange.together("giving XLA's heap its word back", restore);
  } catch (...) {
    try {
      restore();
    } catch (const Error&) {
      // The failure that brought us here says more.
    }
    throw;
  }
}

bool Communicator::has_channel(int channel, bool needs_landing) const {
  return region_->bytes() >= mailbox_bytes(channel + 1, num_ranks()) &&
         (!needs_landing || landing_[channel]);
}

void Communicator::prepare_channel(Exchange& exchange, int channel, bool needs_landing,
                                   cudaStream_t stream) {
  region_->grow(exchange, mailbox_bytes(channel + 1, num_ranks()), stream);
  workspace_bytes_.store(region_->bytes() + landing_bytes(), std::memory_order_relaxed);
  if (!needs_landing || landing_[channel]) return;
  exchange.together("making streams for the copy engines", [&] {
    if (copy_engine_) return;
    auto engine = std::make_unique<CopyEngine>();
    if (!engine->ok()) throw Error("cannot make the streams of the copy-engine mechanism");
    copy_engine_ = std::move(engine);
  });
  const size_t bytes = Landing::bytes(num_ranks());
  auto landing = std::make_unique<SymmetricRegion>(exchange, placements_, bytes);
  landing->grow(exchange, bytes, stream);
  landing_[channel] = std::move(landing);
  workspace_bytes_.store(region_->bytes() + landing_bytes(), std::memory_order_relaxed);
}

size_t Communicator::landing_bytes() const {
  size_t bytes = 0;
  for (const auto& landing : landing_) bytes += landing ? landing->bytes() : 0;
  return bytes;
}

uint64_t Communicator::publish(const void* pointer, size_t bytes) const {
  uint64_t offset = 0;
  if (!heaps_->locate(pointer, bytes, &offset)) {
    throw Error(
        "a buffer lies outside the heap that was mapped into the peer processes; with several "
        "processes pk_jax needs XLA's default "
        "preallocated heap (unset XLA_PYTHON_CLIENT_PREALLOCATE and XLA_PYTHON_CLIENT_ALLOCATOR)");
  }
  if (offset >> kOffsetBits != 0) throw Error("a device address does not fit into 48 bits");
  return offset;
}

Landing Communicator::landing(int channel) const {
  Landing landing{};
  for (int owner = 0; owner < num_ranks(); ++owner)
    landing.base[owner] = landing_[channel]->base(owner);
  return landing;
}

}  // namespace pk

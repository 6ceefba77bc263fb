// all_gather by push. Every rank reads its own part once and stores it into the results of all
// ranks, its own included, so the local copy and the remote ones are the same loop and move at the
// same time.
//
// Bytes over the link, each way: (n - 1) * part. Bytes of HBM: part read, n * part written. The
// link is the bound: part * (n - 1) / 370 GB/s.
//
// Two protocols. Simple: entry handshake, tiles straight into the peers' results, exit handshake
// (schedule/rendezvous.cuh). Low latency: words of data and epoch into the peers' mailboxes; one
// trip, no handshake. A mailbox has two halves, by parity of the epoch: when a rank writes half e &
// 1, it has finished call e - 1 and so heard from every peer in e - 1; the peer had then finished
// call e - 2, the last that read this half.
#include <algorithm>

#include "kernels/all_gather.h"
#include "mechanism/granule.h"
#include "mechanism/low_latency.cuh"
#include "mechanism/register.cuh"
#include "mechanism/tma.cuh"
#include "schedule/rendezvous.cuh"
#include "tile/launch.h"
#include "tile/row_tiles.h"

namespace pk {
namespace {

constexpr int kRegisterThreads = 512;
constexpr uint32_t kRegisterTileBytes = 32 << 10;  // 4 vectors of 16 bytes a thread
constexpr int kLowLatencyThreads = 256;
constexpr int kTmaStages = 8;
constexpr uint32_t kTmaStageBytes = 16 << 10;
using TmaRing = tma::Ring<kTmaStages, kTmaStageBytes>;

__device__ __forceinline__ int next_rank(const CommView& comm) {
  return comm.rank + 1 == comm.num_ranks ? 0 : comm.rank + 1;
}

template <typename Vector>
__global__ void __launch_bounds__(kRegisterThreads, 1)
    all_gather_register(const __grid_constant__ CommView comm,
                        const __grid_constant__ AllGatherArgs args) {
  __shared__ Guests guests;
  const Waiter waiter{comm, Op::kAllGather, args.channel};
  const uint32_t epoch = enter(waiter, args.published, args.result, guests);
  const PeerTensor results{guests.address, comm.num_ranks, comm.num_ranks * args.inner,
                           comm.rank * args.inner};
  const RowTiles tiles = RowTiles::make(args.rows, args.inner, kRegisterTileBytes);
  for (int64_t i = blockIdx.x; i < tiles.num_tiles; i += gridDim.x) {
    const RowTile tile = tiles.tile(i);
    reg::store_tile<Vector>(results, args.source + tile.row * args.inner + tile.col, tile,
                            next_rank(comm), comm.num_ranks);
  }
  leave(waiter, epoch, guests);
}

__global__ void __launch_bounds__(32, 1)
    all_gather_tma(const __grid_constant__ CommView comm,
                   const __grid_constant__ AllGatherArgs args) {
  extern __shared__ __align__(128) char shared[];
  __shared__ Guests guests;
  TmaRing& ring = *reinterpret_cast<TmaRing*>(shared);
  ring.init();
  const Waiter waiter{comm, Op::kAllGather, args.channel};
  const PeerTensor results{guests.address, comm.num_ranks, comm.num_ranks * args.inner,
                           comm.rank * args.inner};
  const RowTiles tiles = RowTiles::make(args.rows, args.inner, kTmaStageBytes);
  uint32_t epoch = 0;
  tma::broadcast_tiles(
      ring, results, args.source, tiles, blockIdx.x, gridDim.x, next_rank(comm), [&] {
        epoch = enter(waiter, args.published, args.result, guests);
        ptx::fence_proxy_async();  // the peers' buffers are written through the async proxy
      });
  leave(waiter, epoch, guests);
}

// Stores the 8 bytes at flat offset `at` of rank's part to their place, in pieces of kGranule
// bytes: the largest power of two that divides the row length and both addresses.
template <int kGranule>
__device__ __forceinline__ void place_word(const AllGatherArgs& args, int num_ranks, int rank,
                                           uint32_t at, uint32_t bytes, uint64_t word) {
  const uint32_t inner = static_cast<uint32_t>(args.inner);
#pragma unroll
  for (int piece = 0; piece < 8; piece += kGranule) {
    const uint32_t offset = at + piece;
    if (kGranule < 8 && offset >= bytes) break;
    const uint32_t row = offset / inner;
    const uint32_t col = offset - row * inner;
    char* to = args.result + (static_cast<int64_t>(row) * num_ranks + rank) * inner + col;
    const uint64_t value = word >> (8 * piece);
    if constexpr (kGranule == 8) *reinterpret_cast<uint64_t*>(to) = value;
    if constexpr (kGranule == 4) *reinterpret_cast<uint32_t*>(to) = static_cast<uint32_t>(value);
    if constexpr (kGranule == 2) *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(value);
    if constexpr (kGranule == 1) *reinterpret_cast<uint8_t*>(to) = static_cast<uint8_t>(value);
  }
}

// The 8 bytes at flat offset `at` of a packed source, zeros past its end.
template <int kGranule>
__device__ __forceinline__ uint64_t read_word(const char* source, uint32_t at, uint32_t bytes) {
  if constexpr (kGranule == 8) return *reinterpret_cast<const uint64_t*>(source + at);
  uint64_t word = 0;
#pragma unroll
  for (int piece = 0; piece < 8; piece += kGranule) {
    if (at + piece >= bytes) break;
    const char* from = source + at + piece;
    uint64_t value = 0;
    if constexpr (kGranule == 4) value = *reinterpret_cast<const uint32_t*>(from);
    if constexpr (kGranule == 2) value = *reinterpret_cast<const uint16_t*>(from);
    if constexpr (kGranule == 1) value = *reinterpret_cast<const uint8_t*>(from);
    word |= value << (8 * piece);
  }
  return word;
}

template <int kGranule>
__global__ void __launch_bounds__(kLowLatencyThreads, 1)
    all_gather_low_latency(const __grid_constant__ CommView comm,
                           const __grid_constant__ AllGatherArgs args) {
  const Waiter waiter{comm, Op::kAllGather, args.channel};
  Channel& channel = signal_page(comm, comm.rank).channels[args.channel];
  const uint32_t bytes = static_cast<uint32_t>(args.rows * args.inner);
  const uint32_t num_words = (bytes + 7) / 8;
  const uint32_t first = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t stride = gridDim.x * blockDim.x;
  const uint32_t epoch = this_epoch(channel);
  // A block sends all its words before it waits for any, and waits for the peers' blocks of the
  // same index: blocks start in that order on every GPU, so the first resident ones always meet.
  for (uint32_t i = first; i < num_words; i += stride) {
    const uint64_t word = read_word<kGranule>(args.source, 8 * i, bytes);
    for (int k = 1; k < comm.num_ranks; ++k) {
      low_latency::send(waiter, epoch, (comm.rank + k) % comm.num_ranks, i, word);
    }
    place_word<kGranule>(args, comm.num_ranks, comm.rank, 8 * i, bytes, word);
  }
  for (uint32_t i = first; i < num_words; i += stride) {
    for (int k = 1; k < comm.num_ranks; ++k) {
      const int peer = (comm.rank + k) % comm.num_ranks;
      const uint64_t word = low_latency::receive(waiter, epoch, peer, i);
      place_word<kGranule>(args, comm.num_ranks, peer, 8 * i, bytes, word);
    }
  }
  end_block(channel, epoch);
}

int default_blocks(const AllGatherArgs& args, int64_t num_tiles, int most) {
  const int64_t blocks = std::min<int64_t>(num_tiles, args.num_blocks > 0 ? args.num_blocks : most);
  return static_cast<int>(std::clamp<int64_t>(blocks, 1, kMaxBlocks));
}

}  // namespace

cudaError_t launch_all_gather(const CommView& comm, const AllGatherArgs& args, Mechanism mechanism,
                              Protocol protocol, cudaStream_t stream) {
  if (args.rows <= 0 || args.inner <= 0) return cudaErrorInvalidValue;
  if (protocol == Protocol::kLowLatency) {
    const int64_t bytes = args.rows * args.inner;
    if (mechanism != Mechanism::kRegister || bytes > static_cast<int64_t>(kLowLatencyBytes))
      return cudaErrorInvalidValue;
    const int64_t words = (bytes + 7) / 8;
    const int blocks =
        default_blocks(args, (words + kLowLatencyThreads - 1) / kLowLatencyThreads, args.num_sms);
    return by_granule(granule(args.source, args.result, args.inner, 8), [&](auto vector) {
      constexpr int kGranule =
          sizeof(vector) > 8 ? 8 : sizeof(vector);  // never more than 8: the limit above
      all_gather_low_latency<kGranule><<<blocks, kLowLatencyThreads, 0, stream>>>(comm, args);
      return cudaGetLastError();
    });
  }
  const uint32_t vector_bytes = granule(args.source, args.result, args.inner, 16);
  // Each rank decides for itself: the handshake around the two mechanisms is the same.
  if (mechanism == Mechanism::kTma && vector_bytes == 16) {
    const RowTiles tiles = RowTiles::make(args.rows, args.inner, kTmaStageBytes);
    all_gather_tma<<<default_blocks(args, tiles.num_tiles, args.num_sms), 32, sizeof(TmaRing),
                     stream>>>(comm, args);
    return cudaGetLastError();
  }
  if (mechanism == Mechanism::kCopyEngine) return cudaErrorInvalidValue;
  const RowTiles tiles = RowTiles::make(args.rows, args.inner, kRegisterTileBytes);
  return by_granule(vector_bytes, [&](auto vector) {
    all_gather_register<decltype(vector)>
        <<<default_blocks(args, tiles.num_tiles, args.num_sms), kRegisterThreads, 0, stream>>>(
            comm, args);
    return cudaGetLastError();
  });
}

cudaError_t load_all_gather() {
  if (cudaError_t error = load_kernels(
          {kernel_pointer(all_gather_register<uint8_t>),
           kernel_pointer(all_gather_register<uint16_t>),
           kernel_pointer(all_gather_register<uint32_t>),
           kernel_pointer(all_gather_register<uint64_t>),
           kernel_pointer(all_gather_register<uint4>), kernel_pointer(all_gather_low_latency<1>),
           kernel_pointer(all_gather_low_latency<2>), kernel_pointer(all_gather_low_latency<4>),
           kernel_pointer(all_gather_low_latency<8>), kernel_pointer(all_gather_tma)})) {
    return error;
  }
  return cudaFuncSetAttribute(all_gather_tma, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              sizeof(TmaRing));
}

}  // namespace pk

// The schedule of every op that only moves data: each rank reads its own parts once and stores them
// into the results of the ranks they belong to, its own included, so that the local copies and the
// remote ones are the same loop and move at the same time.
//
// An op says which tile goes where, in a route (kernels/all_to_all.cu has one):
//
//   kOp                             for the error record
//   num_moves(tiles, ranks, rank)   how many moves this rank makes
//   move(args, tiles, comm, i)      the i-th of them
//   sends(from, to)                 whether data passes at all
//   receives(ranks, rank)           false: this rank's result is zeros
//
// Two protocols. Simple: entry handshake, tiles straight into the peers' results, exit handshake
// (rendezvous.cuh). Low latency: words of data and epoch into the peers' mailboxes; one trip, no
// handshake (mechanism/low_latency.cuh).
#pragma once

#include <algorithm>

#include "mechanism/granule.h"
#include "mechanism/low_latency.cuh"
#include "mechanism/mechanism.h"
#include "mechanism/register.cuh"
#include "mechanism/tma.cuh"
#include "schedule/push_args.h"
#include "schedule/rendezvous.cuh"
#include "tile/launch.h"

namespace pk::push {

inline constexpr int kRegisterThreads = 512;
inline constexpr uint32_t kRegisterTileBytes = 32 << 10;  // 4 vectors of 16 bytes a thread
inline constexpr int kLowLatencyThreads = 256;
inline constexpr int kTmaStages = 8;
inline constexpr uint32_t kTmaStageBytes = 16 << 10;
using TmaRing = tma::Ring<kTmaStages, kTmaStageBytes>;

__device__ __forceinline__ int next_rank(const CommView& comm) {
  return comm.rank + 1 == comm.num_ranks ? 0 : comm.rank + 1;
}

template <typename Route, typename Vector>
__global__ void __launch_bounds__(kRegisterThreads, 1)
    by_register(const __grid_constant__ CommView comm, const __grid_constant__ PushArgs args,
                const __grid_constant__ Route route) {
  __shared__ Guests guests;
  const Waiter waiter{comm, Route::kOp, args.channel};
  const Published mine[] = {args.result};
  const uint32_t epoch = enter(waiter, mine, guests);
  const PeerTensor results{guests.address[0], comm.num_ranks, args.to, comm.rank};
  const RowTiles tiles = RowTiles::make(args.rows, args.inner, kRegisterTileBytes);
  const int64_t num_moves = route.num_moves(tiles, comm.num_ranks, comm.rank);
  for (int64_t i = blockIdx.x; i < num_moves; i += gridDim.x) {
    reg::store_tile<Vector>(results, route.move(args, tiles, comm, i));
  }
  if (!route.receives(comm.num_ranks, comm.rank)) {
    for (int64_t i = blockIdx.x; i < tiles.num_tiles; i += gridDim.x) {
      reg::clear_tile<Vector>(args.result.address, args.to, tiles.tile(i));
    }
  }
  leave(waiter, epoch, guests);
}

template <typename Route>
__global__ void __launch_bounds__(32, 1)
    by_tma(const __grid_constant__ CommView comm, const __grid_constant__ PushArgs args,
           const __grid_constant__ Route route) {
  extern __shared__ __align__(128) char shared[];
  __shared__ Guests guests;
  TmaRing& ring = *reinterpret_cast<TmaRing*>(shared);
  ring.init();
  const Waiter waiter{comm, Route::kOp, args.channel};
  const Published mine[] = {args.result};
  const PeerTensor results{guests.address[0], comm.num_ranks, args.to, comm.rank};
  const RowTiles tiles = RowTiles::make(args.rows, args.inner, kTmaStageBytes);
  uint32_t epoch = 0;
  tma::store_tiles(
      ring, results, [&](int64_t i) { return route.move(args, tiles, comm, i); }, blockIdx.x,
      gridDim.x, route.num_moves(tiles, comm.num_ranks, comm.rank),
      [&] {
        epoch = enter(waiter, mine, guests);
        ptx::fence_proxy_async();  // the peers' buffers are written through the async proxy
      });
  if (!route.receives(comm.num_ranks, comm.rank)) {
    for (int64_t i = blockIdx.x; i < tiles.num_tiles; i += gridDim.x) {
      reg::clear_tile<uint4>(args.result.address, args.to, tiles.tile(i));
    }
  }
  leave(waiter, epoch, guests);
}

// A block sends all its words before it waits for any, and with equal grids waits for the peers'
// blocks of the same index: blocks start in that order on every GPU, so the first resident ones
// always meet. (With unlike grids all blocks must be resident.) To a peer that gets no data goes
// one empty word, for every rank must hear from every other.
template <typename Route>
__global__ void __launch_bounds__(kLowLatencyThreads, 1)
    by_low_latency(const __grid_constant__ CommView comm, const __grid_constant__ PushArgs args,
                   const __grid_constant__ Route route, int granule) {
  const Waiter waiter{comm, Route::kOp, args.channel};
  Channel& channel = channel_of(waiter);
  const auto inner = static_cast<uint32_t>(args.inner);
  const auto bytes = static_cast<uint32_t>(args.rows * args.inner);
  const uint32_t num_words = (bytes + 7) / 8;
  const uint32_t first = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t stride = gridDim.x * blockDim.x;
  const uint32_t epoch = this_epoch(channel);
  const auto words = [&](const PartLayout& layout, int rank) {
    return low_latency::Words{layout, rank, inner, bytes, granule};
  };
  for (uint32_t i = first; i < num_words; i += stride) {
    for (int k = 1; k < comm.num_ranks; ++k) {
      const int peer = (comm.rank + k) % comm.num_ranks;
      const bool data = route.sends(comm.rank, peer);
      if (!data && i > 0) continue;
      const uint64_t word = data ? words(args.from, peer).load(args.source, i) : 0;
      low_latency::send(waiter, epoch, peer, i, word);
    }
    if (route.sends(comm.rank, comm.rank)) {
      words(args.to, comm.rank)
          .store(args.result.address, i, words(args.from, comm.rank).load(args.source, i));
    } else if (!route.receives(comm.num_ranks, comm.rank)) {
      words(args.to, comm.rank).store(args.result.address, i, 0);
    }
  }
  for (uint32_t i = first; i < num_words; i += stride) {
    for (int k = 1; k < comm.num_ranks; ++k) {
      const int peer = (comm.rank + k) % comm.num_ranks;
      const bool data = route.sends(peer, comm.rank);
      if (!data && i > 0) continue;
      const uint64_t word = low_latency::receive(waiter, epoch, peer, i);
      if (data) words(args.to, peer).store(args.result.address, i, word);
    }
  }
  end_block(channel, epoch);
}

// How many blocks a call starts: those asked for, or `most`, but no more than there is work for.
inline int grid_size(int asked, int64_t work, int most) {
  const int64_t blocks = std::min<int64_t>(work, asked > 0 ? asked : most);
  return static_cast<int>(std::clamp<int64_t>(blocks, 1, kMaxBlocks));
}

// kLowLatency needs rows * inner <= low_latency_bytes(num_ranks); TMA needs 16-byte aligned
// pointers and rows, and gives way to registers where they are not: each rank decides for itself,
// since the handshake around the two is the same.
template <typename Route>
cudaError_t launch(const CommView& comm, const PushArgs& args, const Route& route,
                   Mechanism mechanism, Protocol protocol, cudaStream_t stream) {
  if (args.rows <= 0 || args.inner <= 0) return cudaErrorInvalidValue;
  // Alone, a row may end with less than a vector.
  const bool one_row =
      args.rows == 1 && args.from.rank_pitch % 16 == 0 && args.to.rank_pitch % 16 == 0;
  const int64_t length = one_row ? 0 : args.inner;
  if (protocol == Protocol::kLowLatency) {
    const int64_t bytes = args.rows * args.inner;
    if (mechanism != Mechanism::kRegister ||
        bytes > static_cast<int64_t>(low_latency_bytes(comm.num_ranks)))
      return cudaErrorInvalidValue;
    const int64_t words = (bytes + 7) / 8;
    const int blocks = grid_size(
        args.num_blocks, (words + kLowLatencyThreads - 1) / kLowLatencyThreads, args.num_sms);
    // The last word of a row must not reach past it.
    const int pieces = granule(args.source, args.result.address, args.inner, 8);
    by_low_latency<Route><<<blocks, kLowLatencyThreads, 0, stream>>>(comm, args, route, pieces);
    return cudaGetLastError();
  }
  const uint32_t vector_bytes = granule(args.source, args.result.address, length, 16);
  const auto moves = [&](uint32_t tile_bytes) {
    const RowTiles tiles = RowTiles::make(args.rows, args.inner, tile_bytes);
    const int64_t num_moves = route.num_moves(tiles, comm.num_ranks, comm.rank);
    return route.receives(comm.num_ranks, comm.rank) ? num_moves
                                                     : std::max(num_moves, tiles.num_tiles);
  };
  if (mechanism == Mechanism::kTma && vector_bytes == 16 && args.inner % 16 == 0) {
    const int blocks = grid_size(args.num_blocks, moves(kTmaStageBytes), args.num_sms);
    by_tma<Route><<<blocks, 32, sizeof(TmaRing), stream>>>(comm, args, route);
    return cudaGetLastError();
  }
  if (mechanism == Mechanism::kCopyEngine) return cudaErrorInvalidValue;
  const int blocks = grid_size(args.num_blocks, moves(kRegisterTileBytes), args.num_sms);
  return by_granule(vector_bytes, [&](auto vector) {
    by_register<Route, decltype(vector)>
        <<<blocks, kRegisterThreads, 0, stream>>>(comm, args, route);
    return cudaGetLastError();
  });
}

// Loads every kernel of a route on the current device.
template <typename Route>
cudaError_t load() {
  if (cudaError_t error = load_kernels(
          {kernel_pointer(by_register<Route, uint8_t>),
           kernel_pointer(by_register<Route, uint16_t>),
           kernel_pointer(by_register<Route, uint32_t>),
           kernel_pointer(by_register<Route, uint64_t>), kernel_pointer(by_register<Route, uint4>),
           kernel_pointer(by_low_latency<Route>), kernel_pointer(by_tma<Route>)})) {
    return error;
  }
  return cudaFuncSetAttribute(by_tma<Route>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              sizeof(TmaRing));
}

}  // namespace pk::push

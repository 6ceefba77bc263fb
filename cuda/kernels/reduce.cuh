// The kernels behind reduce.h, for any element and reduction: what combines, on the schedule of
// schedule/staged_push.cuh, and the low-latency protocol.
//
// Bytes over the link, each way: (n - 1) * part, and as much again by two shots. HBM: the operand
// read and read again (mostly from the L2), the scratch written and read, the result written.
#pragma once

#include <algorithm>

#include "kernels/reduce.h"
#include "mechanism/low_latency.cuh"
#include "schedule/staged_push.cuh"
#include "tile/combine.cuh"
#include "tile/launch.h"

namespace pk::reduce {

inline constexpr int kLowLatencyThreads = 256;

// Combines kUnroll vectors of all ranks' and stores the results. Vector i of a tile is in row i /
// per_row.
template <typename T, typename Op, typename Vector, int kUnroll>
__device__ __forceinline__ void combine_vectors(const CommView& comm, const ReduceArgs& args,
                                                const Guests& guests, const RowTile& tile,
                                                uint32_t per_row, uint32_t first, uint32_t step,
                                                uint32_t end) {
  const Part own{args.source, args.from, comm.rank};
  const int64_t slot_bytes = scratch_slot(args.rows * args.inner);
  const char* mine[kUnroll];
  int64_t at[kUnroll];  // in a packed part
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const uint32_t i = first + u * step;
    const uint32_t row = tile.num_rows == 1 ? 0 : i / per_row;
    const int64_t col = tile.col + static_cast<int64_t>(i - row * per_row) * sizeof(Vector);
    mine[u] = own.at(tile.row + row, col);
    at[u] = (tile.row + row) * args.inner + col;
  }
  const auto load = [&](int rank, Vector(&vector)[kUnroll]) {
    const char* staged = args.scratch.address + peer_index(rank, comm.rank) * slot_bytes;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (first + u * step < end)
        vector[u] = *reinterpret_cast<const Vector*>(rank == comm.rank ? mine[u] : staged + at[u]);
    }
  };
  Combined<T, Op, Vector> total[kUnroll];
  Vector now[kUnroll], next[kUnroll];
  load(0, now);
  load(1, next);  // the trips to memory of two ranks at a time
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) total[u].start(now[u]);
  for (int rank = 1; rank < comm.num_ranks; ++rank) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) now[u] = next[u];
    if (rank + 1 < comm.num_ranks) load(rank + 1, next);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) total[u].add(now[u]);
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (first + u * step >= end) break;
    const Vector result = total[u].result();
    if (args.algorithm != Algorithm::kTwoShot) {
      *reinterpret_cast<Vector*>(args.result.address + at[u]) = result;
      continue;
    }
    for (int k = 0; k < comm.num_ranks; ++k) {
      char* to = guests.address[1][(comm.rank + k) % comm.num_ranks] + comm.rank * args.inner;
      *reinterpret_cast<Vector*>(to + at[u]) = result;
    }
  }
}

template <typename T, typename Op, typename Vector>
__device__ __forceinline__ void combine_tile(const CommView& comm, const ReduceArgs& args,
                                             const Guests& guests, const RowTile& tile,
                                             uint32_t thread) {
  // As many as there are registers for.
  constexpr int kUnroll = std::is_integral_v<T> || sizeof(T) == 8 ? 1 : kVectors;
  const uint32_t per_row = tile.num_cols / sizeof(Vector), total = tile.num_rows * per_row;
  for (uint32_t i = thread; i < total; i += kUnroll * kGroupThreads) {
    combine_vectors<T, Op, Vector, kUnroll>(comm, args, guests, tile, per_row, i, kGroupThreads,
                                            total);
  }
  // A part of a single row may end with less than a vector.
  const uint32_t tail = per_row * (sizeof(Vector) / sizeof(T)) + thread;
  const uint32_t end = tile.num_cols / sizeof(T);
  if (sizeof(Vector) > sizeof(T) && tile.num_rows == 1 && tail < end)
    combine_vectors<T, Op, T, 1>(comm, args, guests, tile, end, tail, 1, end);
}

// The tiles of this rank's part, each when all peers' are there.
template <typename T, typename Vector>
__device__ __forceinline__ void combine(const CommView& comm, const ReduceArgs& args,
                                        const Guests& guests, const Share& share,
                                        const uint32_t* ready) {
  const uint32_t combiner = threadIdx.x - 32 * kFirstCombiner;
  const uint32_t group = combiner / kGroupThreads, thread = combiner % kGroupThreads;
  for (uint32_t i = group; i < share.count; i += kGroups) {
    // Without a limit of its own: the watcher has one for all.
    while (ptx::ld_acquire_cta(ready) <= i) {
    }
    const RowTile tile = clipped(args, share.tile(i), comm.rank);
    switch (args.reduction) {
      case Reduction::kSum:
        combine_tile<T, Sum, Vector>(comm, args, guests, tile, thread);
        break;
      case Reduction::kMax:
        combine_tile<T, Max, Vector>(comm, args, guests, tile, thread);
        break;
      case Reduction::kMin:
        combine_tile<T, Min, Vector>(comm, args, guests, tile, thread);
        break;
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    by_push(const __grid_constant__ CommView comm, const __grid_constant__ ReduceArgs args,
            const uint32_t tile_bytes, const bool bulk) {
  extern __shared__ __align__(128) char shared[];
  __shared__ Guests guests;
  __shared__ uint32_t ready;  // tiles that all peers have announced
  if (threadIdx.x == 0) ready = 0;
  Ring& ring = *reinterpret_cast<Ring*>(shared);
  if (threadIdx.x / 32 == kPusher) ring.init();
  const Waiter waiter{comm, args.op, args.channel};
  uint32_t epoch;
  if (args.algorithm == Algorithm::kTwoShot) {
    const Published mine[] = {args.scratch, args.result};
    epoch = enter(waiter, mine, guests);
  } else {
    const Published mine[] = {args.scratch};
    epoch = enter(waiter, mine, guests);
  }
  check_grids(waiter, guests);
  for (int peer = threadIdx.x; peer < comm.num_ranks; peer += blockDim.x) {
    if (peer != comm.rank)
      guests.address[0][peer] += peer_index(comm.rank, peer) * scratch_slot(args.rows * args.inner);
  }
  __syncthreads();
  const RowTiles tiles = RowTiles::make(args.rows, args.inner, tile_bytes);
  const Share share{
      tiles, static_cast<uint32_t>((tiles.num_tiles - blockIdx.x + gridDim.x - 1) / gridDim.x)};
  const uint32_t warp = threadIdx.x / 32;
  if (!bulk) push_elements<T>(comm, args, guests, share);
  if (warp == kPusher) {
    if (bulk) push(comm, args, guests, share, ring);
  } else if (warp == kWatcher) {
    watch(waiter, share, &ready);
  } else if (bulk) {
    combine<T, uint4>(comm, args, guests, share, &ready);
  } else {
    combine<T, T>(comm, args, guests, share, &ready);
  }
  __syncthreads();
  // Read again by this block of a later call only.
  if (threadIdx.x == 0) channel_of(waiter).staged_before[blockIdx.x] += share.count;
  if (args.algorithm == Algorithm::kTwoShot) {
    leave(waiter, epoch, guests);
  } else {
    end_block(channel_of(waiter), epoch);
  }
}

// The words of all ranks, word_of(rank), combined.
template <typename T, typename Op, typename WordOf>
__device__ __forceinline__ uint64_t combined_word(int num_ranks, WordOf word_of) {
  Combined<T, Op, uint64_t> total;
  total.start(word_of(0));
  for (int rank = 1; rank < num_ranks; ++rank) total.add(word_of(rank));
  return total.result();
}

template <typename T, typename WordOf>
__device__ __forceinline__ uint64_t combined_word(Reduction reduction, int num_ranks,
                                                  WordOf word_of) {
  switch (reduction) {
    case Reduction::kMax:
      return combined_word<T, Max>(num_ranks, word_of);
    case Reduction::kMin:
      return combined_word<T, Min>(num_ranks, word_of);
    default:
      return combined_word<T, Sum>(num_ranks, word_of);
  }
}

// Words of data and epoch into the mailboxes, combined as they come: one trip. Progress as in
// schedule/push.cuh.
template <typename T>
__global__ void __launch_bounds__(kLowLatencyThreads, 1)
    by_low_latency(const __grid_constant__ CommView comm, const __grid_constant__ ReduceArgs args,
                   const int granule) {
  const Waiter waiter{comm, args.op, args.channel};
  Channel& channel = channel_of(waiter);
  const auto inner = static_cast<uint32_t>(args.inner);
  const auto bytes = static_cast<uint32_t>(args.rows * args.inner);
  const uint32_t num_words = (bytes + 7) / 8;
  const uint32_t first = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32_t stride = gridDim.x * blockDim.x;
  const uint32_t epoch = this_epoch(channel);
  const auto part = [&](int rank) {
    return low_latency::Words{args.from, rank, inner, bytes, granule};
  };
  for (uint32_t i = first; i < num_words; i += stride) {
    for (int k = 1; k < comm.num_ranks; ++k) {
      const int peer = (comm.rank + k) % comm.num_ranks;
      low_latency::send(waiter, epoch, peer, i, part(peer).load(args.source, i));
    }
  }
  const low_latency::Words result{PartLayout::packed(args.inner), 0, inner, bytes, granule};
  for (uint32_t i = first; i < num_words; i += stride) {
    const auto word_of = [&](int rank) {
      return rank == comm.rank ? part(rank).load(args.source, i)
                               : low_latency::receive(waiter, epoch, rank, i);
    };
    result.store(args.result.address, i, combined_word<T>(args.reduction, comm.num_ranks, word_of));
  }
  end_block(channel, epoch);
}

// A tile size that gives every block the same number of tiles, or nearly.
inline uint32_t even_tile(int64_t part_bytes, int blocks) {
  const int64_t share = (part_bytes + blocks - 1) / blocks;
  const int64_t tiles = (share + kMostTileBytes - 1) / kMostTileBytes;
  const int64_t even = ((share + tiles - 1) / tiles + 127) / 128 * 128;
  return static_cast<uint32_t>(std::clamp<int64_t>(even, kLeastTileBytes, kMostTileBytes));
}

template <typename T>
cudaError_t launch(const CommView& comm, const ReduceArgs& args, Protocol protocol,
                   cudaStream_t stream) {
  if (protocol == Protocol::kLowLatency) {
    // Pieces of no less than an element: a word that the part does not fill holds whole ones.
    const int64_t all = args.inner | reinterpret_cast<intptr_t>(args.source) | 8;
    const int granule = static_cast<int>(all & -all);
    const int64_t words = (args.rows * args.inner + 7) / 8;
    const int64_t work = (words + kLowLatencyThreads - 1) / kLowLatencyThreads;
    const int most = args.num_blocks > 0 ? args.num_blocks : args.num_sms;
    const int blocks = static_cast<int>(std::min<int64_t>({work, most, kMaxBlocks}));
    by_low_latency<T><<<blocks, kLowLatencyThreads, 0, stream>>>(comm, args, granule);
    return cudaGetLastError();
  }
  const int most = std::min(args.num_blocks > 0 ? args.num_blocks : args.num_sms, kMaxBlocks);
  const uint32_t tile_bytes = even_tile(args.rows * args.inner, most);
  const RowTiles tiles = RowTiles::make(args.rows, args.inner, tile_bytes);
  const int blocks = static_cast<int>(std::min<int64_t>(tiles.num_tiles, most));
  // Each rank decides for itself: the tiles and their announcements are the same.
  const bool aligned = reinterpret_cast<uintptr_t>(args.source) % 16 == 0;
  const bool bulk =
      aligned && (args.inner % 16 == 0 || (args.rows == 1 && args.from.rank_pitch % 16 == 0));
  // By elements a part goes whole, and the last of two shots would end past the operand.
  if (!bulk && args.algorithm == Algorithm::kTwoShot) return cudaErrorMisalignedAddress;
  by_push<T><<<blocks, kThreads, sizeof(Ring), stream>>>(comm, args, tile_bytes, bulk);
  return cudaGetLastError();
}

template <typename... T>
cudaError_t load() {
  if (cudaError_t error =
          load_kernels({kernel_pointer(by_push<T>)..., kernel_pointer(by_low_latency<T>)...})) {
    return error;
  }
  for (const void* kernel : {kernel_pointer(by_push<T>)...}) {
    if (cudaError_t error = cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Ring))) {
      return error;
    }
  }
  return cudaSuccess;
}

// In files of their own, which compile side by side: reduce_floats.cu, reduce_integers.cu.
cudaError_t launch_floats(const CommView&, const ReduceArgs&, Protocol, cudaStream_t);
cudaError_t launch_integers(const CommView&, const ReduceArgs&, Protocol, cudaStream_t);
cudaError_t load_floats();
cudaError_t load_integers();

}  // namespace pk::reduce

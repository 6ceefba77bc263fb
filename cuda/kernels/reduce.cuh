// The kernels behind reduce.h, for any element and reduction.
//
// Simple protocol: parts are pushed into the owners' scratch, tile by tile; each block announces a
// tile to the block of its own index on the owner, and combines the tiles that those have announced
// to it, a few tiles behind its own pushes.
//
//   block b of rank 0   push tile 0, announce | push 1, announce | push 2, announce | ...
//                                                    combine tile 0 of all ranks    | ...
//
// By push and not by pull: stores keep the link's speed in both directions, loads lose a tenth.
//
// Entry: as every push. Exit: a block has waited for every tile that a peer's block pushes to it,
// so with the last block all writes to this rank's scratch are complete. Two shots also write into
// the peers' results, and leave as every push does.
//
// Progress: a block waits for blocks of its own index alone, and pushes a tile before it waits for
// one: blocks start in order on every GPU, so the first resident ones always meet. For the same
// reason all ranks must run the same grid; it is checked at entry.
//
// Bytes over the link, each way: (n - 1) * part, and as much again by two shots. HBM: the operand
// read and read again (mostly from the L2), the scratch written and read, the result written.
#pragma once

#include <algorithm>

#include "kernels/reduce.h"
#include "mechanism/low_latency.cuh"
#include "mechanism/register.cuh"
#include "schedule/rendezvous.cuh"
#include "tile/combine.cuh"
#include "tile/launch.h"

namespace pk::reduce {

inline constexpr int kThreads = 256;
// While one block of an SM waits for its announcement to be released the other pushes.
inline constexpr int kBlocksPerSm = 2;
inline constexpr uint32_t kTileBytes = 32 << 10;
inline constexpr int kTilesBehind = 2;
inline constexpr int kLowLatencyThreads = 256;

// The slot of `source` in the scratch of `owner`, which needs none for itself.
__device__ __forceinline__ int slot_of(int source, int owner) {
  return source < owner ? source : source - 1;
}

// The tile as far as rank's part goes: by two shots the last parts may be cut short.
__device__ __forceinline__ RowTile clipped(const ReduceArgs& args, RowTile tile, int rank) {
  if (args.pattern != Pattern::kTwoShot) return tile;
  const int64_t left = args.bytes - (rank * args.inner + tile.col);
  tile.num_cols = left <= 0 ? 0 : static_cast<uint32_t>(min(left, int64_t{tile.num_cols}));
  return tile;
}

// Pushes one tile of each peer's part into that peer's scratch.
template <typename Vector>
__device__ __forceinline__ void push_tile(const CommView& comm, const ReduceArgs& args,
                                          const Guests& guests, const RowTile& tile) {
  const PeerTensor scratch{guests.address[0], comm.num_ranks, PartLayout::packed(args.inner), 0};
  for (int k = 1; k < comm.num_ranks; ++k) {
    const int peer = (comm.rank + k) % comm.num_ranks;
    reg::store_tile<Vector>(scratch,
                            {{args.source, args.from, peer}, clipped(args, tile, peer), peer, 1});
  }
}

// Combines one vector of all ranks' and stores the result. `col` counts from the tile's own.
template <typename T, typename Op, typename Vector>
__device__ __forceinline__ void combine_vector(const CommView& comm, const ReduceArgs& args,
                                               const Guests& guests, const RowTile& tile,
                                               uint32_t row, uint32_t col) {
  const Part own{args.source, args.from, comm.rank};
  const char* mine = own.at(tile.row + row, tile.col + col);
  const int64_t at = (tile.row + row) * args.inner + tile.col + col;  // in a packed part
  const int64_t slot_bytes = scratch_slot(args.rows * args.inner);
  const auto vector_of = [&](int rank) {
    const char* staged = args.scratch.address + slot_of(rank, comm.rank) * slot_bytes + at;
    return *reinterpret_cast<const Vector*>(rank == comm.rank ? mine : staged);
  };
  Combined<T, Op, Vector> total;
  total.start(vector_of(0));
  for (int rank = 1; rank < comm.num_ranks; ++rank) total.add(vector_of(rank));
  const Vector result = total.result();
  if (args.pattern != Pattern::kTwoShot) {
    *reinterpret_cast<Vector*>(args.result.address + at) = result;
    return;
  }
  for (int k = 0; k < comm.num_ranks; ++k) {
    char* to = guests.address[1][(comm.rank + k) % comm.num_ranks] + comm.rank * args.inner;
    *reinterpret_cast<Vector*>(to + at) = result;
  }
}

// One tile of this rank's part. Enough threads have loads in flight that none needs several.
template <typename T, typename Op, typename Vector>
__device__ __forceinline__ void combine_tile(const CommView& comm, const ReduceArgs& args,
                                             const Guests& guests, const RowTile& tile) {
  const uint32_t per_row = tile.num_cols / sizeof(Vector);
  for (uint32_t i = threadIdx.x; i < tile.num_rows * per_row; i += blockDim.x) {
    const uint32_t row = tile.num_rows == 1 ? 0 : i / per_row;
    combine_vector<T, Op, Vector>(comm, args, guests, tile, row,
                                  (i - row * per_row) * sizeof(Vector));
  }
  // A part of a single row may end with less than a vector.
  const uint32_t tail = per_row * sizeof(Vector) + threadIdx.x * sizeof(T);
  if (sizeof(Vector) > sizeof(T) && tile.num_rows == 1 && tail < tile.num_cols) {
    combine_vector<T, Op, T>(comm, args, guests, tile, 0, tail);
  }
}

template <typename T, typename Vector>
__device__ __forceinline__ void combine_tile(const CommView& comm, const ReduceArgs& args,
                                             const Guests& guests, RowTile tile) {
  tile = clipped(args, tile, comm.rank);
  switch (args.reduction) {
    case Reduction::kSum:
      return combine_tile<T, Sum, Vector>(comm, args, guests, tile);
    case Reduction::kMax:
      return combine_tile<T, Max, Vector>(comm, args, guests, tile);
    case Reduction::kMin:
      return combine_tile<T, Min, Vector>(comm, args, guests, tile);
  }
}

template <typename T, typename Vector>
__device__ __forceinline__ void run_tiles(const Waiter& waiter, const ReduceArgs& args,
                                          const Guests& guests) {
  const CommView& comm = waiter.comm;
  Channel& channel = signal_page(comm, comm.rank).channels[args.channel];
  const RowTiles tiles = RowTiles::make(args.rows, args.inner, kTileBytes);
  const int64_t count = (tiles.num_tiles - blockIdx.x + gridDim.x - 1) / gridDim.x;
  const uint32_t before = channel.staged_before[blockIdx.x];
  const auto tile = [&](int64_t i) { return tiles.tile(blockIdx.x + i * gridDim.x); };
  for (int64_t i = 0; i < count + kTilesBehind; ++i) {
    if (i < count) {
      push_tile<Vector>(comm, args, guests, tile(i));
      __syncthreads();
      for (int peer = threadIdx.x; peer < comm.num_ranks; peer += blockDim.x) {
        if (peer == comm.rank) continue;
        // Release of this block's pushes to the peer (gathered by the barrier above); pairs with
        // the acquire in the peer's wait below.
        ptx::red_add_release_sys(
            &signal_page(comm, peer).channels[args.channel].staged[comm.rank][blockIdx.x], 1);
      }
    }
    if (i < kTilesBehind) continue;
    const int64_t ready = i - kTilesBehind;
    if (ready >= count) break;
    for (int peer = threadIdx.x; peer < comm.num_ranks; peer += blockDim.x) {
      if (peer == comm.rank) continue;
      wait_signal(waiter, Slot::kStaged, peer, &channel.staged[peer][blockIdx.x],
                  before + static_cast<uint32_t>(ready) + 1);
    }
    __syncthreads();
    combine_tile<T, Vector>(comm, args, guests, tile(ready));
  }
  // Read again by this block of a later call only.
  __syncthreads();
  if (threadIdx.x == 0) channel.staged_before[blockIdx.x] = before + static_cast<uint32_t>(count);
}

// All threads: stops the op if a peer runs another grid, for its blocks would wait for ever.
__device__ __forceinline__ void check_grids(const Waiter& waiter, const Guests& guests) {
  const CommView& comm = waiter.comm;
  for (int peer = threadIdx.x; peer < comm.num_ranks; peer += blockDim.x) {
    if (peer == comm.rank || guests.num_blocks[peer] == gridDim.x) continue;
    fail(comm.error, {1, 0, waiter.op, Slot::kGrid, comm.rank, comm.num_ranks, peer, waiter.channel,
                      gridDim.x, guests.num_blocks[peer], 0});
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    by_push(const __grid_constant__ CommView comm, const __grid_constant__ ReduceArgs args,
            const bool vectors) {
  __shared__ Guests guests;
  const Waiter waiter{comm, args.op, args.channel};
  const Published mine[] = {args.scratch, args.result};
  const uint32_t epoch = enter(waiter, mine, guests);
  check_grids(waiter, guests);
  for (int peer = threadIdx.x; peer < comm.num_ranks; peer += blockDim.x) {
    if (peer != comm.rank)
      guests.address[0][peer] += slot_of(comm.rank, peer) * scratch_slot(args.rows * args.inner);
  }
  __syncthreads();
  if (vectors) {
    run_tiles<T, uint4>(waiter, args, guests);
  } else {
    run_tiles<T, T>(waiter, args, guests);
  }
  if (args.pattern == Pattern::kTwoShot) {
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

template <typename T>
cudaError_t launch(const CommView& comm, const ReduceArgs& args, Protocol protocol,
                   cudaStream_t stream) {
  if (protocol == Protocol::kLowLatency) {
    // Pieces of no less than an element: a word that the part does not fill holds whole ones.
    const int64_t all = args.inner | 8;
    const int granule = static_cast<int>(all & -all);
    const int64_t words = (args.rows * args.inner + 7) / 8;
    const int64_t work = (words + kLowLatencyThreads - 1) / kLowLatencyThreads;
    const int most = args.num_blocks > 0 ? args.num_blocks : args.num_sms;
    const int blocks = static_cast<int>(std::min<int64_t>({work, most, kMaxBlocks}));
    by_low_latency<T><<<blocks, kLowLatencyThreads, 0, stream>>>(comm, args, granule);
    return cudaGetLastError();
  }
  const RowTiles tiles = RowTiles::make(args.rows, args.inner, kTileBytes);
  const int most = args.num_blocks > 0 ? args.num_blocks : kBlocksPerSm * args.num_sms;
  const int blocks = static_cast<int>(std::min<int64_t>({tiles.num_tiles, most, kMaxBlocks}));
  const bool vectors = args.inner % 16 == 0 || (args.rows == 1 && args.from.rank_pitch % 16 == 0);
  by_push<T><<<blocks, kThreads, 0, stream>>>(comm, args, vectors);
  return cudaGetLastError();
}

template <typename... T>
cudaError_t load() {
  return load_kernels({kernel_pointer(by_push<T>)..., kernel_pointer(by_low_latency<T>)...});
}

// In files of their own, which compile side by side: reduce_floats.cu, reduce_integers.cu.
cudaError_t launch_floats(const CommView&, const ReduceArgs&, Protocol, cudaStream_t);
cudaError_t launch_integers(const CommView&, const ReduceArgs&, Protocol, cudaStream_t);
cudaError_t load_floats();
cudaError_t load_integers();

}  // namespace pk::reduce

// The part goes to every peer's landing buffer by DMA; kDrainBlocks blocks take arrived chunks to
// their place in the result, and copy the own part there while they wait.
//
//   stream            ──fork──┬─ drain: own chunk 0, chunk 0 of each peer, own chunk 1, ... ─┬─join
//   copies and flags        ──┴─ push chunk 0, 1, ... (mechanism/copy_engine.h) ─────────────┘
//
// Entry: a chunk is pushed only into a slot that the peer has emptied, so into memory the peer is
// not using. Exit: the drain has read every chunk of every peer, and the join has waited for every
// push of this rank; nobody but this rank touches the result.
#include "kernels/all_gather_copy_engine.h"
#include "mechanism/copy_engine.cuh"
#include "mechanism/granule.h"
#include "mechanism/register.cuh"

namespace pk {
namespace {

constexpr int kDrainThreads = 512;
constexpr uint32_t kDrainTileBytes = 32 << 10;

// This block's share of a chunk of `source_rank`'s part, to its place in the result.
template <typename Vector>
__device__ __forceinline__ void place_chunk(const AllGatherArgs& args, const CommView& comm,
                                            char* const* address, int source_rank, const char* from,
                                            const RowTile& chunk) {
  const PeerTensor result{address, comm.num_ranks, comm.num_ranks * args.inner,
                          source_rank * args.inner};
  const RowTiles tiles = RowTiles::make(chunk.num_rows, chunk.num_cols, kDrainTileBytes);
  for (int64_t t = blockIdx.x; t < tiles.num_tiles; t += gridDim.x) {
    RowTile tile = tiles.tile(t);
    const char* source = from + tile.row * tiles.inner + tile.col;
    tile.row += chunk.row;
    tile.col += chunk.col;
    reg::store_tile<Vector>(result, source, tile, comm.rank, 1);
  }
}

template <typename Vector>
__global__ void __launch_bounds__(kDrainThreads, 1)
    drain(const __grid_constant__ CommView comm, const __grid_constant__ AllGatherArgs args,
          const __grid_constant__ Landing landing) {
  __shared__ char* address[kMaxRanks];
  if (threadIdx.x == 0) address[comm.rank] = args.result;
  __syncthreads();
  const Waiter waiter{comm, Op::kAllGather, args.channel};
  const uint32_t first_chunk = signal_page(comm, comm.rank).channels[args.channel].chunks;
  const RowTiles chunks = chunk_walk(args.rows, args.inner);
  for (int64_t c = 0; c < chunks.num_tiles; ++c) {
    const RowTile chunk = chunks.tile(c);
    const char* own = args.source + chunk.row * args.inner + chunk.col;
    place_chunk<Vector>(args, comm, address, comm.rank, own, chunk);  // while chunk c is under way
    for (int k = 1; k < comm.num_ranks; ++k) {
      const int peer = (comm.rank + k) % comm.num_ranks;
      wait_landed(waiter, peer, first_chunk, c);
      place_chunk<Vector>(args, comm, address, peer, landing.slot(comm.rank, peer, c), chunk);
      report_taken(waiter, peer, c);
    }
  }
  // Every call accounts for whole rounds of the ring, so that a chunk's slot is known beforehand.
  for (int64_t c = chunks.num_tiles; c < padded_chunks(chunks.num_tiles); ++c) {
    for (int k = 1; k < comm.num_ranks; ++k) {
      report_taken(waiter, (comm.rank + k) % comm.num_ranks, c);
    }
  }
}

}  // namespace

cudaError_t launch_all_gather_copy_engine(const CommView& comm, const AllGatherArgs& args,
                                          CopyEngine& engine, const Landing& landing,
                                          cudaStream_t stream) {
  if (args.rows <= 0 || args.inner <= 0) return cudaErrorInvalidValue;
  const RowTiles chunks = chunk_walk(args.rows, args.inner);
  if (cudaError_t error = fork_streams(engine, stream)) return error;
  if (cudaError_t error =
          push_chunks(comm, Op::kAllGather, args.channel, engine, landing, args.source, chunks))
    return error;
  const cudaError_t drained =
      by_granule(granule(args.source, args.result, args.inner, 16), [&](auto vector) {
        drain<decltype(vector)><<<kDrainBlocks, kDrainThreads, 0, stream>>>(comm, args, landing);
        return cudaGetLastError();
      });
  if (drained != cudaSuccess) return drained;
  if (cudaError_t error = join_streams(engine, stream)) return error;
  return launch_end_chunks(comm, args.channel, chunks.num_tiles, stream);
}

cudaError_t load_all_gather_copy_engine() {
  const void* kernels[] = {
      reinterpret_cast<const void*>(drain<uint8_t>), reinterpret_cast<const void*>(drain<uint16_t>),
      reinterpret_cast<const void*>(drain<uint32_t>),
      reinterpret_cast<const void*>(drain<uint64_t>), reinterpret_cast<const void*>(drain<uint4>)};
  for (const void* kernel : kernels) {
    cudaFuncAttributes attributes;
    if (cudaError_t error = cudaFuncGetAttributes(&attributes, kernel)) return error;
  }
  return load_copy_engine();
}

}  // namespace pk

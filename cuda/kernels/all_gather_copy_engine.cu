// The part goes to every peer's landing buffer by DMA; a few blocks take arrived chunks to their
// place in the result, and copy the own part there while they wait.
//
//   stream            ──fork──┬─ drain: own chunk 0, chunk 0 of each peer, own chunk 1, ... ─┬─join
//   copies and flags        ──┴─ push chunk 0, 1, ... (mechanism/copy_engine.h) ─────────────┘
//
// Entry: a chunk is pushed only into a slot that the peer has emptied, so into memory the peer is
// not using. Exit: the drain has moved every chunk of every peer, and the join has waited for every
// push of this rank; nobody but this rank touches the result.
#include <algorithm>

#include "kernels/all_gather_copy_engine.h"
#include "mechanism/copy_engine.cuh"
#include "mechanism/granule.h"
#include "mechanism/register.cuh"
#include "tile/launch.h"

namespace pk {
namespace {

constexpr int kDrainThreads = 512;
constexpr int kDrainBlocks = 32;  // about twice the link's rate
constexpr uint32_t kDrainTileBytes = 32 << 10;

// One stripe of a chunk, tiles stripe, stripe + num_stripes, ..., to its place in the result.
template <typename Vector>
__device__ __forceinline__ void place_stripe(const PeerTensor& result, int rank, const char* from,
                                             const RowTile& chunk, uint32_t stripe,
                                             uint32_t num_stripes) {
  const RowTiles tiles = RowTiles::make(chunk.num_rows, chunk.num_cols, kDrainTileBytes);
  // The chunk as if it were the part: its first byte at the chunk's own place.
  const PartLayout packed = PartLayout::packed(tiles.inner);
  const Part source{from - packed.at(0, chunk.row) - chunk.col, packed, 0};
  for (int64_t t = stripe; t < tiles.num_tiles; t += num_stripes) {
    RowTile tile = tiles.tile(t);
    tile.row += chunk.row;
    tile.col += chunk.col;
    reg::store_tile<Vector>(result, {source, tile, rank, 1});
  }
}

// A piece of work is a stripe of a chunk: of the own part, then of each peer's. Pieces are handed
// out in order of chunks, so with one block resident or all of them, what a block waits for needs
// no piece that nobody holds. (It does need the kernels that keep the flags, one warp's room each.)
// A block asks for its next piece before it does the present one, to hide the trip of the atomic.
template <typename Vector>
__global__ void __launch_bounds__(kDrainThreads, 1)
    drain(const __grid_constant__ CommView comm, const __grid_constant__ PushArgs args,
          const __grid_constant__ Landing landing) {
  __shared__ char* address[kMaxRanks];
  __shared__ uint32_t piece;
  Channel& channel = signal_page(comm, comm.rank).channels[args.channel];
  const Waiter waiter{comm, Op::kAllGather, args.channel};
  const uint32_t before = channel.rounds;
  const RowTiles chunks = chunk_walk(args.rows, args.inner);
  const uint32_t num_stripes = gridDim.x;
  const uint32_t num_pieces = static_cast<uint32_t>(chunks.num_tiles) * num_stripes;
  const auto part = [&](int source) {
    return PeerTensor{address, comm.num_ranks, PartLayout::inside(comm.num_ranks, args.inner),
                      source};
  };
  if (threadIdx.x == 0) {
    address[comm.rank] = args.result.address;
    piece = ptx::atom_add_relaxed_gpu(&channel.work, 1);
  }
  __syncthreads();
  for (uint32_t now = piece; now < num_pieces; now = piece) {
    __syncthreads();
    uint32_t next = 0;
    if (threadIdx.x == 0) next = ptx::atom_add_relaxed_gpu(&channel.work, 1);
    const int64_t c = now / num_stripes;
    const uint32_t stripe = now % num_stripes;
    const RowTile chunk = chunks.tile(c);
    const char* own = args.source + chunk.row * args.inner + chunk.col;
    place_stripe<Vector>(part(comm.rank), comm.rank, own, chunk, stripe, num_stripes);
    for (int k = 1; k < comm.num_ranks; ++k) {
      const int peer = (comm.rank + k) % comm.num_ranks;
      wait_landed(waiter, peer, before, c);
      place_stripe<Vector>(part(peer), comm.rank, landing.slot(comm.rank, peer, c), chunk, stripe,
                           num_stripes);
      report_stripe(waiter, peer, c, num_stripes);
    }
    if (threadIdx.x == 0) piece = next;
    __syncthreads();
  }
}

}  // namespace

cudaError_t launch_all_gather_copy_engine(const CommView& comm, const PushArgs& args,
                                          CopyEngine& engine, const Landing& landing,
                                          cudaStream_t stream) {
  if (args.rows <= 0 || args.inner <= 0) return cudaErrorInvalidValue;
  const RowTiles chunks = chunk_walk(args.rows, args.inner);
  const auto push = [&](int64_t begin, int64_t end) {
    return push_chunks(comm, Op::kAllGather, args.channel, engine, landing, args.source, chunks,
                       begin, end);
  };
  // This order is what lets every stream make progress (mechanism/copy_engine.h).
  const int64_t ahead = std::min<int64_t>(chunks.num_tiles, kLandingSlots);
  if (cudaError_t error = fork_streams(engine, stream)) return error;
  if (cudaError_t error = push(0, ahead)) return error;
  // Never more, so that the kernels that keep the flags find SMs without such a block: with one on
  // every SM the op never ended.
  const int wanted = args.num_blocks > 0 ? args.num_blocks : kDrainBlocks;
  const int blocks = std::min({wanted, args.num_sms, kDrainBlocks});
  const cudaError_t drained =
      by_granule(granule(args.source, args.result.address, args.inner, 16), [&](auto vector) {
        drain<decltype(vector)><<<blocks, kDrainThreads, 0, stream>>>(comm, args, landing);
        return cudaGetLastError();
      });
  if (drained != cudaSuccess) return drained;
  if (cudaError_t error = push(ahead, chunks.num_tiles)) return error;
  if (cudaError_t error = join_streams(engine, stream)) return error;
  return launch_end_chunks(comm, args.channel, chunks.num_tiles, stream);
}

cudaError_t load_all_gather_copy_engine() {
  if (cudaError_t error =
          load_kernels({kernel_pointer(drain<uint8_t>), kernel_pointer(drain<uint16_t>),
                        kernel_pointer(drain<uint32_t>), kernel_pointer(drain<uint64_t>),
                        kernel_pointer(drain<uint4>)})) {
    return error;
  }
  return load_copy_engine();
}

}  // namespace pk

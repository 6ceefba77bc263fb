// Bytes over the link, each way: the rows for other ranks. The bound is the link of the rank that
// sends or receives most.
#include "kernels/ragged_all_to_all.h"
#include "schedule/push.cuh"

namespace pk {
namespace {

// So many updates are looked at together.
constexpr int kBatch = 256;
constexpr int64_t kFar = int64_t{1} << 40;  // rows: more than any buffer has

// A slice after clipping, in bytes.
struct Slice {
  int64_t from;
  int64_t to;
  int64_t bytes;
  int64_t first_tile;  // tiles of the slices before it in the batch
};

__device__ __forceinline__ int64_t index(const RaggedArgs& args, const void* array, int i) {
  return args.wide_indices ? static_cast<const int64_t*>(array)[i]
                           : static_cast<const int32_t*>(array)[i];
}

__device__ __forceinline__ void refuse(const Waiter& waiter, Slot slot, int peer, int64_t rows,
                                       int64_t row) {
  const CommView& comm = waiter.comm;
  fail(comm.error, {1, 0, waiter.op, slot, comm.rank, comm.num_ranks, peer, waiter.channel,
                    static_cast<uint32_t>(rows), static_cast<uint32_t>(row), 0});
}

// The slice of an update without the rows that lie outside of either buffer.
__device__ __forceinline__ Slice slice_of(const Waiter& waiter, const RaggedArgs& args,
                                          int update) {
  const int64_t size = min(max(index(args, args.send_sizes, update), -kFar), kFar);
  if (size <= 0 && !(args.checks && size < 0)) return {0, 0, 0, 0};
  // Wild values must not overflow below; what is far outside stays outside.
  const auto near = [](int64_t i) { return min(max(i, -kFar), kFar); };
  const int64_t from = near(index(args, args.input_offsets, update));
  const int64_t to = near(index(args, args.output_offsets, update));
  const int64_t begin = max(int64_t{0}, max(-from, -to));
  const int64_t end = min(size, min(args.source_rows - from, args.result_rows - to));
  if (args.checks && (begin > 0 || end < size || size < 0)) {
    const int peer = update / (args.num_updates / waiter.comm.num_ranks);
    const bool source = from < 0 || size < 0 || from + size > args.source_rows;
    const int64_t start = source ? from : to;
    refuse(waiter, source ? Slot::kSourceRow : Slot::kTargetRow, peer,
           source ? args.source_rows : args.result_rows, start < 0 ? start : start + size - 1);
  }
  if (begin >= end) return {0, 0, 0, 0};
  return {(from + begin) * args.row_bytes, (to + begin) * args.row_bytes,
          (end - begin) * args.row_bytes, 0};
}

// Tiles of all slices of a batch are dealt out to the blocks in turn. Blocks begin with the slices
// of different ranks, so that all links, and the copies inside this GPU, are busy from the start.
template <typename Vector>
__global__ void __launch_bounds__(push::kRegisterThreads, 1)
    ragged(const __grid_constant__ CommView comm, const __grid_constant__ RaggedArgs args) {
  constexpr int64_t kTile = push::kRegisterTileBytes;
  __shared__ Guests guests;
  __shared__ Slice slices[kBatch];
  const Waiter waiter{comm, Op::kRaggedAllToAll, args.channel};
  const Published mine[] = {args.result};
  const uint32_t epoch = enter(waiter, mine, guests);
  const int per_peer = args.num_updates / comm.num_ranks;
  for (int batch = 0; batch < args.num_updates; batch += kBatch) {
    const int count = min(kBatch, args.num_updates - batch);
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
      slices[i] = slice_of(waiter, args, batch + i);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int64_t tiles = 0;
      for (int i = 0; i < count; ++i) {
        slices[i].first_tile = tiles;
        tiles += (slices[i].bytes + kTile - 1) / kTile;
      }
    }
    __syncthreads();
    const int start = static_cast<int>(static_cast<int64_t>(blockIdx.x % comm.num_ranks) * count /
                                       comm.num_ranks);
    for (int k = 0; k < count; ++k) {
      const int i = start + k < count ? start + k : start + k - count;
      const Slice slice = slices[i];
      if (slice.bytes == 0) continue;
      const int to = (batch + i) / per_peer;
      // One long row on both sides, wherever it starts.
      const PeerTensor results{guests.address[0], comm.num_ranks, {slice.to, 0, 1, 0}, 1};
      const Part source{args.source + slice.from, PartLayout::packed(0), 0};
      const RowTiles tiles = RowTiles::make(1, slice.bytes, kTile);
      const int64_t skew = (blockIdx.x + gridDim.x - slice.first_tile % gridDim.x) % gridDim.x;
      for (int64_t t = skew; t < tiles.num_tiles; t += gridDim.x) {
        reg::store_tile<Vector>(results, {source, tiles.tile(t), to, 1});
      }
    }
  }
  leave(waiter, epoch, guests);
}

}  // namespace

cudaError_t launch_ragged_all_to_all(const CommView& comm, const RaggedArgs& args,
                                     cudaStream_t stream) {
  if (args.row_bytes <= 0 || args.num_updates <= 0 || args.num_updates % comm.num_ranks != 0)
    return cudaErrorInvalidValue;
  const int64_t tiles =
      args.source_rows * args.row_bytes / push::kRegisterTileBytes + args.num_updates;
  const int blocks = push::grid_size(args.num_blocks, tiles, args.num_sms);
  return by_granule(
      granule(args.source, args.result.address, args.row_bytes, 16), [&](auto vector) {
        ragged<decltype(vector)><<<blocks, push::kRegisterThreads, 0, stream>>>(comm, args);
        return cudaGetLastError();
      });
}

cudaError_t load_ragged_all_to_all() {
  return load_kernels({kernel_pointer(ragged<uint8_t>), kernel_pointer(ragged<uint16_t>),
                       kernel_pointer(ragged<uint32_t>), kernel_pointer(ragged<uint64_t>),
                       kernel_pointer(ragged<uint4>)});
}

}  // namespace pk

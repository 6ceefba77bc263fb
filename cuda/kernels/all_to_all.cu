// Bytes over the link, each way: (n - 1) / n * operand. Bytes of HBM: operand read, result written.
// The link is the bound.
#include "kernels/all_to_all.h"
#include "schedule/push.cuh"

namespace pk {
namespace {

// A tile of the part for each rank in turn: neighbouring blocks load different links, and one in n
// copies inside this GPU.
struct ToEach {
  static constexpr Op kOp = Op::kAllToAll;

  PK_HOST_DEVICE int64_t num_moves(const RowTiles& tiles, int num_ranks, int) const {
    return tiles.num_tiles * num_ranks;
  }
  __device__ Move move(const PushArgs& args, const RowTiles& tiles, const CommView& comm,
                       int64_t i) const {
    const int64_t tile = i / comm.num_ranks;
    int to = push::next_rank(comm) + static_cast<int>(i - tile * comm.num_ranks);
    if (to >= comm.num_ranks) to -= comm.num_ranks;
    return {{args.source, args.from, to}, tiles.tile(tile), to, 1};
  }
  __device__ bool sends(int, int) const { return true; }
  PK_HOST_DEVICE bool receives(int, int) const { return true; }
};

}  // namespace

cudaError_t launch_all_to_all(const CommView& comm, PushArgs args, int64_t batch, bool split_first,
                              Mechanism mechanism, Protocol protocol, cudaStream_t stream) {
  if (batch <= 0 || args.rows % batch != 0) return cudaErrorInvalidValue;
  const PartLayout before =
      batch == args.rows ? PartLayout::inside(comm.num_ranks, args.inner)
                         : PartLayout::outside(comm.num_ranks, args.rows / batch, args.inner);
  const PartLayout after = PartLayout::inside(comm.num_ranks, args.inner);
  args.from = split_first ? before : after;
  args.to = split_first ? after : before;
  return push::launch(comm, args, ToEach{}, mechanism, protocol, stream);
}

cudaError_t load_all_to_all() { return push::load<ToEach>(); }

}  // namespace pk

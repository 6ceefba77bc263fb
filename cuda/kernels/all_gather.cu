// Bytes over the link, each way: (n - 1) * part. Bytes of HBM: part read, n * part written. The
// link is the bound: part * (n - 1) / 370 GB/s.
#include "kernels/all_gather.h"
#include "schedule/push.cuh"

namespace pk {
namespace {

// Every tile to every rank.
struct ToAll {
  static constexpr Op kOp = Op::kAllGather;

  PK_HOST_DEVICE int64_t num_moves(const RowTiles& tiles, int, int) const {
    return tiles.num_tiles;
  }
  __device__ Move move(const PushArgs& args, const RowTiles& tiles, const CommView& comm,
                       int64_t i) const {
    return {{args.source, args.from, 0}, tiles.tile(i), push::next_rank(comm), comm.num_ranks};
  }
  __device__ bool sends(int, int) const { return true; }
  PK_HOST_DEVICE bool receives(int, int) const { return true; }
};

}  // namespace

cudaError_t launch_all_gather(const CommView& comm, PushArgs args, Mechanism mechanism,
                              Protocol protocol, cudaStream_t stream) {
  args.from = PartLayout::packed(args.inner);
  args.to = PartLayout::inside(comm.num_ranks, args.inner);
  return push::launch(comm, args, ToAll{}, mechanism, protocol, stream);
}

cudaError_t load_all_gather() { return push::load<ToAll>(); }

}  // namespace pk

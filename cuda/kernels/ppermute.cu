// Bytes over the link, each way: the operand, for a permutation without fixed points. All ranks
// shake hands, also those that move nothing: a rank may then not be a call ahead of another.
#include "kernels/ppermute.h"
#include "schedule/push.cuh"

namespace pk {
namespace {

struct AlongPermutation {
  static constexpr Op kOp = Op::kPpermute;
  Destinations destinations;

  PK_HOST_DEVICE int64_t num_moves(const RowTiles& tiles, int, int rank) const {
    return destinations.rank[rank] < 0 ? 0 : tiles.num_tiles;
  }
  __device__ Move move(const PushArgs& args, const RowTiles& tiles, const CommView& comm,
                       int64_t i) const {
    return {{args.source, args.from, 0}, tiles.tile(i), destinations.rank[comm.rank], 1};
  }
  __device__ bool sends(int from, int to) const { return destinations.rank[from] == to; }
  PK_HOST_DEVICE bool receives(int num_ranks, int rank) const {
    for (int source = 0; source < num_ranks; ++source) {
      if (destinations.rank[source] == rank) return true;
    }
    return false;
  }
};

}  // namespace

cudaError_t launch_ppermute(const CommView& comm, PushArgs args, const Destinations& destinations,
                            Mechanism mechanism, Protocol protocol, cudaStream_t stream) {
  args.from = args.to = PartLayout::packed(args.inner);
  return push::launch(comm, args, AlongPermutation{destinations}, mechanism, protocol, stream);
}

cudaError_t load_ppermute() { return push::load<AlongPermutation>(); }

}  // namespace pk

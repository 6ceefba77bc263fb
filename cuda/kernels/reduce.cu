#include "kernels/reduce.cuh"
#include "kernels/reduce.h"

namespace pk {

void shape_psum(ReduceArgs& args, Algorithm algorithm, int64_t bytes, int num_ranks) {
  args.op = Op::kPsum;
  args.algorithm = algorithm;
  args.bytes = bytes;
  args.rows = 1;
  args.inner = algorithm == Algorithm::kTwoShot ? two_shot_share(bytes, num_ranks) : bytes;
  args.from = algorithm == Algorithm::kTwoShot ? PartLayout::inside(num_ranks, args.inner)
                                               : PartLayout::packed(args.inner);
}

void shape_scatter(ReduceArgs& args, int64_t rows, int64_t inner, int num_ranks) {
  args.op = Op::kPsumScatter;
  args.algorithm = Algorithm::kScatter;
  args.rows = rows;
  args.inner = inner;
  args.from = PartLayout::inside(num_ranks, inner);
}

cudaError_t launch_reduce(const CommView& comm, const ReduceArgs& args, Protocol protocol,
                          cudaStream_t stream) {
  if (args.rows <= 0 || args.inner <= 0 || comm.num_ranks < 2) return cudaErrorInvalidValue;
  if (protocol == Protocol::kLowLatency &&
      (args.algorithm == Algorithm::kTwoShot ||
       args.rows * args.inner > static_cast<int64_t>(low_latency_bytes(comm.num_ranks)))) {
    return cudaErrorInvalidValue;
  }
  switch (args.element) {
    case Element::kF32:
    case Element::kF64:
    case Element::kBF16:
    case Element::kF16:
      return reduce::launch_floats(comm, args, protocol, stream);
    default:
      return reduce::launch_integers(comm, args, protocol, stream);
  }
}

cudaError_t load_reduce() {
  if (cudaError_t error = reduce::load_floats()) return error;
  return reduce::load_integers();
}

}  // namespace pk

#include "kernels/reduce.cuh"

namespace pk::reduce {

cudaError_t launch_floats(const CommView& comm, const ReduceArgs& args, Protocol protocol,
                          cudaStream_t stream) {
  switch (args.element) {
    case Element::kF32:
      return launch<float>(comm, args, protocol, stream);
    case Element::kF64:
      return launch<double>(comm, args, protocol, stream);
    case Element::kBF16:
      return launch<__nv_bfloat16>(comm, args, protocol, stream);
    case Element::kF16:
      return launch<__half>(comm, args, protocol, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t load_floats() { return load<float, double, __nv_bfloat16, __half>(); }

}  // namespace pk::reduce

#include "kernels/reduce.cuh"

namespace pk::reduce {

cudaError_t launch_integers(const CommView& comm, const ReduceArgs& args, Protocol protocol,
                            cudaStream_t stream) {
  switch (args.element) {
    case Element::kS8:
      return launch<int8_t>(comm, args, protocol, stream);
    case Element::kS16:
      return launch<int16_t>(comm, args, protocol, stream);
    case Element::kS32:
      return launch<int32_t>(comm, args, protocol, stream);
    case Element::kS64:
      return launch<int64_t>(comm, args, protocol, stream);
    case Element::kU8:
      return launch<uint8_t>(comm, args, protocol, stream);
    case Element::kU16:
      return launch<uint16_t>(comm, args, protocol, stream);
    case Element::kU32:
      return launch<uint32_t>(comm, args, protocol, stream);
    case Element::kU64:
      return launch<uint64_t>(comm, args, protocol, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t load_integers() {
  return load<int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t>();
}

}  // namespace pk::reduce

// Bytes over the link, each way: (n - 1) * part. Bytes of HBM: part read, n * part written; two
// kernels, one for the norm and one to gather, would also write and read the normalised part.
#include <cuda_bf16.h>

#include <algorithm>
#include <type_traits>

#include "mechanism/granule.h"
#include "rms_norm_gather.h"
#include "schedule/rendezvous.cuh"
#include "tile/launch.h"
#include "tile/part_layout.h"
#include "tile/peer_tensor.cuh"

namespace {

constexpr int kWarps = 16;

// As many elements as one load or store of a thread moves.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T at[kCount];
};

template <typename T, int kCount>
__device__ float sum_of_squares(const Pack<T, kCount>* row, int64_t num_packs) {
  float sum = 0;
  for (int64_t i = threadIdx.x % 32; i < num_packs; i += 32) {
    const Pack<T, kCount> pack = row[i];
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const float value = static_cast<float>(pack.at[k]);
      sum += value * value;
    }
  }
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  return sum;
}

template <typename T, int kCount>
__global__ void __launch_bounds__(32 * kWarps, 1)
    rms_norm_gather(const __grid_constant__ pk::CommView comm,
                    const __grid_constant__ RmsNormGatherArgs args) {
  using Vector = Pack<T, kCount>;
  __shared__ pk::Guests guests;
  const pk::Waiter waiter{comm, args.op, args.channel};
  const pk::Published mine[] = {args.y};
  const uint32_t epoch = pk::enter(waiter, mine, guests);

  const int64_t row_bytes = args.cols * sizeof(T);
  const auto layout = pk::PartLayout::outside(comm.num_ranks, args.rows, row_bytes);
  const pk::PeerTensor y{guests.address[0], comm.num_ranks, layout, comm.rank};
  const auto* weight = static_cast<const Vector*>(args.weight);
  const int64_t num_packs = args.cols / kCount;
  const int64_t first = blockIdx.x * kWarps + threadIdx.x / 32;
  for (int64_t row = first; row < args.rows; row += gridDim.x * kWarps) {
    const auto* x = static_cast<const Vector*>(args.x) + row * num_packs;
    const float scale = rsqrtf(sum_of_squares(x, num_packs) / args.cols + args.eps);
    for (int64_t i = threadIdx.x % 32; i < num_packs; i += 32) {
      Vector pack = x[i];  // the second time, out of L1 or L2
      const Vector w = weight[i];
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const float value = static_cast<float>(pack.at[k]) * scale;
        pack.at[k] = static_cast<T>(value * static_cast<float>(w.at[k]));
      }
      for (int k = 1; k <= comm.num_ranks; ++k) {  // each rank begins with another one
        const int rank = (comm.rank + k) % comm.num_ranks;
        *reinterpret_cast<Vector*>(y.at(rank, row, i * sizeof(Vector))) = pack;
      }
    }
  }
  pk::leave(waiter, epoch, guests);
}

// use(kernel), with the kernel for an element type and vectors of so many bytes.
template <typename T, typename Use>
cudaError_t with_kernel(uint32_t vector_bytes, Use use) {
  return pk::by_granule(vector_bytes, [&](auto vector) {
    if constexpr (sizeof(vector) < sizeof(T)) {
      return cudaErrorMisalignedAddress;  // XLA aligns its buffers, and rows are whole elements
    } else {
      return use(rms_norm_gather<T, sizeof(vector) / sizeof(T)>);
    }
  });
}

template <typename T>
cudaError_t launch(const pk::CommView& comm, const RmsNormGatherArgs& args, int num_sms,
                   cudaStream_t stream) {
  const auto inner = static_cast<int64_t>(args.cols * sizeof(T));
  // Every rank finds the same: all of XLA's buffers are aligned alike.
  const uint32_t vector_bytes = std::min(pk::granule(args.x, args.y.address, inner, 16),
                                         pk::granule(args.weight, args.weight, inner, 16));
  const int64_t work = (args.rows + kWarps - 1) / kWarps;
  const auto blocks = static_cast<int>(std::min<int64_t>({work, num_sms, pk::kMaxBlocks}));
  return with_kernel<T>(vector_bytes, [&](auto* kernel) {
    kernel<<<blocks, 32 * kWarps, 0, stream>>>(comm, args);
    return cudaGetLastError();
  });
}

template <typename T>
cudaError_t load() {
  for (uint32_t vector_bytes = sizeof(T); vector_bytes <= 16; vector_bytes *= 2) {
    const cudaError_t error = with_kernel<T>(
        vector_bytes, [](auto* kernel) { return pk::load_kernels({pk::kernel_pointer(kernel)}); });
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t launch_rms_norm_gather(const pk::CommView& comm, const RmsNormGatherArgs& args,
                                   Element element, int num_sms, cudaStream_t stream) {
  return element == Element::kBfloat16 ? launch<__nv_bfloat16>(comm, args, num_sms, stream)
                                       : launch<float>(comm, args, num_sms, stream);
}

cudaError_t load_rms_norm_gather() {
  const cudaError_t error = load<float>();
  return error != cudaSuccess ? error : load<__nv_bfloat16>();
}

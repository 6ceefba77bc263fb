// See round_trip.h. The host puts a stream synchronisation and an exchange between the two steps,
// so no kernel here waits for anything.
#include "kernels/round_trip.h"
#include "tile/signal.cuh"

namespace pk {
namespace {

__global__ void leave_tokens(const __grid_constant__ CommView comm, uint64_t seed) {
  for (int peer = threadIdx.x; peer < comm.num_ranks; peer += blockDim.x) {
    ptx::st_relaxed_sys(&signal_page(comm, peer).check[comm.rank],
                        round_trip_token(seed, comm.rank, peer));
  }
}

__global__ void read_tokens(const __grid_constant__ CommView comm, uint64_t* observed) {
  for (int peer = threadIdx.x; peer < comm.num_ranks; peer += blockDim.x) {
    observed[2 * peer] = ptx::ld_relaxed_sys(&signal_page(comm, comm.rank).check[peer]);
    observed[2 * peer + 1] = ptx::ld_relaxed_sys(&signal_page(comm, peer).check[comm.rank]);
  }
}

__global__ void swap_word(uint64_t* word, uint64_t value, uint64_t* old) {
  *old = ptx::ld_relaxed_sys(word);
  ptx::st_relaxed_sys(word, value);
}

__global__ void read_word(const uint64_t* word, uint64_t* value) {
  *value = ptx::ld_relaxed_sys(word);
}

}  // namespace

cudaError_t launch_leave_tokens(const CommView& comm, uint64_t seed, cudaStream_t stream) {
  leave_tokens<<<1, 128, 0, stream>>>(comm, seed);
  return cudaGetLastError();
}

cudaError_t launch_read_tokens(const CommView& comm, uint64_t* observed, cudaStream_t stream) {
  read_tokens<<<1, 128, 0, stream>>>(comm, observed);
  return cudaGetLastError();
}

cudaError_t launch_swap_word(uint64_t* word, uint64_t value, uint64_t* old, cudaStream_t stream) {
  swap_word<<<1, 1, 0, stream>>>(word, value, old);
  return cudaGetLastError();
}

cudaError_t launch_read_word(const uint64_t* word, uint64_t* value, cudaStream_t stream) {
  read_word<<<1, 1, 0, stream>>>(word, value);
  return cudaGetLastError();
}

cudaError_t load_round_trip() {
  const void* kernels[] = {
      reinterpret_cast<const void*>(leave_tokens), reinterpret_cast<const void*>(read_tokens),
      reinterpret_cast<const void*>(swap_word), reinterpret_cast<const void*>(read_word)};
  for (const void* kernel : kernels) {
    cudaFuncAttributes attributes;
    if (cudaError_t error = cudaFuncGetAttributes(&attributes, kernel)) return error;
  }
  return cudaSuccess;
}

}  // namespace pk

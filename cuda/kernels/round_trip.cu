// See round_trip.h. The host puts a stream synchronisation and an exchange between the two steps,
// so no kernel here waits for anything.
#include "kernels/round_trip.h"
#include "tile/launch.h"
#include "tile/signal.cuh"

namespace pk {
namespace {

__global__ void leave_tokens(const __grid_constant__ CommView comm, uint64_t seed) {
  for (int peer = threadIdx.x; peer < comm.num_ranks; peer += blockDim.x) {
    ptx::st_relaxed_sys(&signal_page(comm, peer).check[comm.rank],
                        round_trip_token(seed, comm.rank, peer));
    ptx::red_add_release_sys(&signal_page(comm, peer).check_count[comm.rank], 1);
  }
}

__global__ void read_tokens(const __grid_constant__ CommView comm, uint64_t* observed) {
  for (int peer = threadIdx.x; peer < comm.num_ranks; peer += blockDim.x) {
    observed[kObservedPerPeer * peer] =
        ptx::ld_relaxed_sys(&signal_page(comm, comm.rank).check[peer]);
    observed[kObservedPerPeer * peer + 1] =
        ptx::ld_relaxed_sys(&signal_page(comm, peer).check[comm.rank]);
    observed[kObservedPerPeer * peer + 2] =
        ptx::ld_acquire_sys(&signal_page(comm, comm.rank).check_count[peer]);
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
  return load_kernels({kernel_pointer(leave_tokens), kernel_pointer(read_tokens),
                       kernel_pointer(swap_word), kernel_pointer(read_word)});
}

}  // namespace pk

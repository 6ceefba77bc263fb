// The SMs of a GPU split between two kinds of thread blocks of one kernel: communicators, who move
// data between GPUs, and those that compute with it.
//
//   arrival   0  1  2  3 | 4  5  6  7  8 ...          num_communicators = 4
//   role      communicate | compute
//   number    0  1  2  3 | 0  1  2  3  4 ...
//
// Roles go by arrival, communicators first, and not by block index: blocks of which kind are
// resident then depends on nothing but how many are.
//
// Progress, if communicators wait for peers' communicators alone, and for each of them no longer
// than until it has begun. With one resident block a rank, the communicators run one after another
// on every GPU, end, and make room for those that compute, for which all data then comes. With more
// the same happens sooner.
#pragma once

#include <cstdint>

#include "tile/comm_view.h"
#include "tile/ptx.cuh"

namespace pk {

// All threads of every block of the kernel: the block's place in the order in which they begin, so
// that those that are resident have the first numbers. Once a call.
__device__ __forceinline__ int number_by_arrival(Channel& channel) {
  __shared__ uint32_t arrival;
  // The count orders nothing. The last block to arrive puts it back to zero.
  if (threadIdx.x == 0) arrival = ptx::atom_inc_relaxed_gpu(&channel.begun, gridDim.x - 1);
  __syncthreads();
  // From lane 0, so that the compiler knows that a warp has one number.
  return __shfl_sync(0xFFFFFFFF, static_cast<int>(arrival), 0);
}

// All threads of every block of the kernel: communicate(number) or compute(number).
template <typename Communicate, typename Compute>
__device__ __forceinline__ void split_by_arrival(Channel& channel, int num_communicators,
                                                 Communicate communicate, Compute compute) {
  const int number = number_by_arrival(channel) - num_communicators;
  if (number < 0) {
    communicate(number + num_communicators);
  } else {
    compute(number);
  }
}

}  // namespace pk

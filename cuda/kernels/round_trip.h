// The check of a new communicator: data really goes from every rank to every other and back.
//
// canAccessPeer and a successful mapping have both been wrong in the field. Each rank leaves a
// token in every peer's page, and after all ranks have done so reads its own page and, across the
// link, every peer's.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "tile/comm_view.h"

namespace pk {

// What rank `from` leaves with rank `to`; never 0.
PK_HOST_DEVICE inline uint64_t round_trip_token(uint64_t seed, int from, int to) {
  uint64_t x = seed ^ (0x9e3779b97f4a7c15ull * (static_cast<uint64_t>(from) * kMaxRanks + to + 1));
  x = (x ^ (x >> 31)) * 0xbf58476d1ce4e5b9ull;
  return (x ^ (x >> 29)) | 1;
}

// Writes this rank's tokens into the pages of all peers, and counts itself there by an atomic add:
// not every link that carries loads and stores carries atomics.
cudaError_t launch_leave_tokens(const CommView& comm, uint64_t seed, cudaStream_t stream);

// observed[3 * peer]: what the peer left here; + 1: what this rank left there, read back over the
// link; + 2: how often the peer counted itself here.
inline constexpr int kObservedPerPeer = 3;
cudaError_t launch_read_tokens(const CommView& comm, uint64_t* observed, cudaStream_t stream);

// Exchanges one 8-byte word, so that a mapping can be proved without losing what the memory held.
cudaError_t launch_swap_word(uint64_t* word, uint64_t value, uint64_t* old, cudaStream_t stream);
cudaError_t launch_read_word(const uint64_t* word, uint64_t* value, cudaStream_t stream);

cudaError_t load_round_trip();

}  // namespace pk

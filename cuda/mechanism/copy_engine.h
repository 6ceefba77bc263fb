// Copy-engine mechanism: the DMA engines push chunks into a ring of slots in the receivers' landing buffers. No SM moves data to a peer; one thread a
// lane keeps the flags.
//
//   lane 0   step: wait(slot free) | copy | step: announce, wait(next slot free) | copy | ...
//   lane 1   step: wait(slot free) | copy | ...
//
// The pushes (chunk 0 to each peer, chunk 1 to each peer, ...) are dealt out to the lanes in turn, so that one lane's flag handling hides under
// another's copy. The copies need addresses that the host knows and that never change, since they are captured into CUDA graphs: hence the landing
// buffer, and not the peer's result.
//
// Progress: a push of chunk c waits for chunk c - kLandingSlots to be taken, and every rank's lanes hold the pushes in order of c: the smallest c
// still to do never waits for a larger one. The lanes and the two other streams of an op are fewer than the 8 hardware queues a device has by default,
// so no stream waits behind another by accident either.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>

#include "schedule/row_tiles.h"
#include "tile/comm_view.h"
#include "tile/error_record.h"

namespace pk {

// Streams and events of one device; made once, outside any execution.
class CopyEngine {
 public:
  CopyEngine();
  ~CopyEngine();
  CopyEngine(const CopyEngine&) = delete;
  CopyEngine& operator=(const CopyEngine&) = delete;
  // False if a stream or an event could not be made.
  bool ok() const { return ok_; }

  static constexpr int kLanes = 4;
  std::array<cudaStream_t, kLanes> lane{};
  cudaStream_t own = nullptr;  // for the copy within this GPU
  cudaEvent_t fork = nullptr;
  std::array<cudaEvent_t, kLanes + 1> join{};

 private:
  bool ok_ = true;
};

struct Landing {
  char* base[kMaxRanks];  // [owner], seen from this rank

  PK_HOST_DEVICE char* slot(int owner, int source, int64_t chunk) const {
    return base[owner] + (static_cast<size_t>(source) * kLandingSlots + chunk % kLandingSlots) * kChunkBytes;
  }
};

// Chunks that a call accounts for: rounded up, so that a chunk's slot does not depend on the calls before.
PK_HOST_DEVICE inline int64_t padded_chunks(int64_t chunks) {
  return (chunks + kLandingSlots - 1) / kLandingSlots * kLandingSlots;
}

// Makes the lanes and the own stream start when `stream` gets here; and `stream` continue when all of them are done.
cudaError_t fork_lanes(CopyEngine& engine, cudaStream_t stream);
cudaError_t join_lanes(CopyEngine& engine, cudaStream_t stream);

// Pushes the tiles of `chunks` (a walk with tile_bytes kChunkBytes) of a packed source into the landing buffer of every peer, flags included.
cudaError_t push_chunks(const CommView& comm, Op op, int channel, CopyEngine& engine, const Landing& landing, const char* source,
                        const RowTiles& chunks);

// After join_lanes: the next call on the channel may begin. One tiny kernel.
cudaError_t launch_end_chunks(const CommView& comm, int channel, int64_t chunks, cudaStream_t stream);

cudaError_t load_copy_engine();

}  // namespace pk

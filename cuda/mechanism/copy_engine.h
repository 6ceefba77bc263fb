// Copy-engine mechanism: the DMA engines push chunks into a ring of slots in the receiver's landing buffer. No SM moves data to the peer; one
// thread a lane keeps the flags.
//
//   lane 0 to a peer   step: wait(slot 0 free) | copy 0 | step: landed(0), wait(slot 2 free) | copy 2 | step: landed(2), ...
//   lane 1 to a peer   step: wait(slot 1 free) | copy 1 | step: landed(1), wait(slot 3 free) | copy 3 | ...
//
// Two lanes a peer, so that one lane's flag handling hides under the other's copy. The copies need addresses that the host knows and that never
// change, since they are captured into CUDA graphs: hence the landing buffer, and not the peer's result.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <vector>

#include "schedule/row_tiles.h"
#include "tile/comm_view.h"
#include "tile/error_record.h"

namespace pk {

// Streams and events for pushing to every peer from one device; made once, outside any execution.
class CopyEngine {
 public:
  explicit CopyEngine(int num_ranks);
  ~CopyEngine();
  CopyEngine(const CopyEngine&) = delete;
  CopyEngine& operator=(const CopyEngine&) = delete;
  // False if a stream or an event could not be made.
  bool ok() const { return ok_; }

  static constexpr int kLanes = 2;
  std::vector<std::array<cudaStream_t, kLanes>> lane;  // [peer]
  cudaStream_t own = nullptr;                          // for the copy within this GPU
  cudaEvent_t fork = nullptr;
  std::vector<cudaEvent_t> join;  // one a stream above

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
PK_HOST_DEVICE inline int64_t padded_chunks(int64_t chunks) { return (chunks + kLandingSlots - 1) / kLandingSlots * kLandingSlots; }

// Makes every lane, and the own stream, start when `stream` gets here; and `stream` continue when all of them are done.
cudaError_t fork_lanes(CopyEngine& engine, int rank, cudaStream_t stream);
cudaError_t join_lanes(CopyEngine& engine, int rank, cudaStream_t stream);

// Pushes the tiles of `chunks` (a walk with tile_bytes kChunkBytes) of a packed source into `peer`'s landing buffer, flags included, on the
// peer's lanes.
cudaError_t push_chunks(const CommView& comm, Op op, int channel, CopyEngine& engine, const Landing& landing, int peer,
                        const char* source, const RowTiles& chunks);

// After join_lanes: the next call on the channel may begin. One tiny kernel.
cudaError_t launch_end_chunks(const CommView& comm, int channel, int64_t chunks, cudaStream_t stream);

cudaError_t load_copy_engine();

}  // namespace pk

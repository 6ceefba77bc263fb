// Copy-engine mechanism: the DMA engines push chunks into a ring of slots in the receivers' landing
// buffers, and a few blocks of the receiver empty it. No SM drives the link; single threads keep
// the flags.
//
//   credit      wait: slot 0 free | wait: slot 1 free | ...             one push ahead or more
//   copies             └─ copy 0 ─────────└─ copy 1 ─────── ...         back to back, in order
//   announce                      └─ flag 0          └─ flag 1          as each copy ends
//
// The pushes are chunk 0 to each peer, chunk 1 to each peer, and so on. Flags have streams of their
// own, so that the copies never wait for a kernel launch; the copies share one stream, so that
// chunks land one after another and the receiver can empty one while the next is under way. The
// copies need addresses that the host knows and that never change, since they are captured into
// CUDA graphs: hence the landing buffer, and not the peer's result.
//
// Progress. A push of chunk c waits for chunk c - kLandingSlots to be taken, and every rank pushes
// in order of c: the smallest c still to do never waits for a larger one. The host enqueues the
// first kLandingSlots chunks, which wait for earlier calls at most, then the kernel that empties
// slots, then the rest: whatever hardware queue the streams share, nothing in it stands before what
// it waits for. The flags' kernels need SMs beside those that empty slots, so these are few, and
// the flags' streams have the higher priority.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>

#include "tile/comm_view.h"
#include "tile/error_record.h"
#include "tile/row_tiles.h"

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

  enum Stream { kCopies, kCredit, kAnnounce, kNumStreams };
  std::array<cudaStream_t, kNumStreams> stream{};
  std::array<cudaEvent_t, kNumStreams> event{};  // the last thing recorded on each stream
  cudaEvent_t fork = nullptr;

 private:
  bool ok_ = true;
};

struct Landing {
  char* base[kMaxRanks];  // [owner], seen from this rank

  // Slots for every source but the owner.
  PK_HOST_DEVICE static size_t bytes(int num_ranks) {
    return (num_ranks - 1) * kLandingSlots * kMostChunkBytes;
  }
  PK_HOST_DEVICE char* slot(int owner, int source, int64_t chunk) const {
    const int row = peer_index(source, owner);
    return base[owner] +
           (static_cast<size_t>(row) * kLandingSlots + chunk % kLandingSlots) * kMostChunkBytes;
  }
};

// Chunks that a call accounts for: rounded up, so that a chunk's slot does not depend on the calls
// before.
PK_HOST_DEVICE inline int64_t padded_chunks(int64_t chunks) {
  return (chunks + kLandingSlots - 1) / kLandingSlots * kLandingSlots;
}

// The chunks of a packed source: about kChunks, so that emptying the last one shows little; never
// so small that the DMA engines are slow. pk_jax/_tuning/cost_model.py predicts with the same
// numbers.
PK_HOST_DEVICE inline RowTiles chunk_walk(int64_t rows, int64_t inner) {
  constexpr int64_t kGrain = 64 << 10;
  const int64_t share = (rows * inner / kChunks + kGrain - 1) / kGrain * kGrain;
  const int64_t most = kMostChunkBytes, least = kLeastChunkBytes;
  const int64_t bytes = share < least ? least : share > most ? most : share;
  return RowTiles::make(rows, inner, static_cast<uint32_t>(bytes));
}

// Makes the engine's streams start when `stream` gets here; and `stream` continue when all of them
// are done.
cudaError_t fork_streams(CopyEngine& engine, cudaStream_t stream);
cudaError_t join_streams(CopyEngine& engine, cudaStream_t stream);

// Pushes chunks [begin, end) of a packed source into the landing buffer of every peer, flags
// included.
cudaError_t push_chunks(const CommView& comm, Op op, int channel, CopyEngine& engine,
                        const Landing& landing, const char* source, const RowTiles& chunks,
                        int64_t begin, int64_t end);

// After join_streams: the next call on the channel may begin. One tiny kernel.
cudaError_t launch_end_chunks(const CommView& comm, int channel, int64_t chunks,
                              cudaStream_t stream);

cudaError_t load_copy_engine();

}  // namespace pk

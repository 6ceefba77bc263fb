#include "mechanism/copy_engine.cuh"
#include "tile/launch.h"

namespace pk {
namespace {

// Tells `peer` that `chunk` is in its landing buffer: the copy is complete, by stream order.
__global__ void announce(const __grid_constant__ CommView comm, int channel_index, int peer,
                         int64_t chunk) {
  const uint32_t before = signal_page(comm, comm.rank).channels[channel_index].rounds;
  // Release of the copy; pairs with wait_landed on the peer.
  uint32_t* landed =
      &signal_page(comm, peer).channels[channel_index].landed[comm.rank][chunk % kLandingSlots];
  ptx::st_release_sys(landed, before + static_cast<uint32_t>(chunk / kLandingSlots) + 1);
}

// Waits until the slot of `chunk` is free: the peer has taken what the slot held before, one chunk
// a round of the ring, in this call or earlier ones.
__global__ void await_credit(const __grid_constant__ CommView comm, Op op, int channel_index,
                             int peer, int64_t chunk) {
  const Channel& channel = signal_page(comm, comm.rank).channels[channel_index];
  const uint32_t rounds = channel.rounds + static_cast<uint32_t>(chunk / kLandingSlots);
  wait_signal({comm, op, channel_index}, Slot::kTaken, peer,
              &channel.taken[peer][chunk % kLandingSlots], rounds);
}

// A call accounts for whole rounds of the ring, so that a chunk's slot is known beforehand: the
// slots that the last round left empty count as taken.
__global__ void end_chunks(const __grid_constant__ CommView comm, int channel_index,
                           int64_t chunks) {
  Channel& channel = signal_page(comm, comm.rank).channels[channel_index];
  for (int peer = threadIdx.x; peer < comm.num_ranks; peer += blockDim.x) {
    if (peer == comm.rank) continue;
    for (int64_t chunk = chunks; chunk < padded_chunks(chunks); ++chunk) {
      auto& taken = signal_page(comm, peer).channels[channel_index].taken[comm.rank];
      ptx::red_add_release_sys(&taken[chunk % kLandingSlots], 1);
    }
  }
  if (threadIdx.x == 0) {
    channel.rounds += static_cast<uint32_t>(padded_chunks(chunks) / kLandingSlots);
    channel.work = 0;
  }
}

// `stream` continues only after what has been enqueued on one of the engine's streams so far.
cudaError_t follow(CopyEngine& engine, CopyEngine::Stream which, cudaStream_t stream) {
  if (cudaError_t error = cudaEventRecord(engine.event[which], engine.stream[which])) return error;
  return cudaStreamWaitEvent(stream, engine.event[which], 0);
}

}  // namespace

CopyEngine::CopyEngine() {
  // The kernels that keep the flags are one thread each and others wait for them: they go first.
  int low = 0, high = 0;
  ok_ &= cudaDeviceGetStreamPriorityRange(&low, &high) == cudaSuccess;
  for (int i = 0; i < kNumStreams; ++i) {
    const int priority = i == kCopies ? low : high;
    ok_ &= cudaStreamCreateWithPriority(&stream[i], cudaStreamNonBlocking, priority) == cudaSuccess;
  }
  for (cudaEvent_t& e : event)
    ok_ &= cudaEventCreateWithFlags(&e, cudaEventDisableTiming) == cudaSuccess;
  ok_ &= cudaEventCreateWithFlags(&fork, cudaEventDisableTiming) == cudaSuccess;
}

CopyEngine::~CopyEngine() {
  for (cudaStream_t s : stream) cudaStreamDestroy(s);
  for (cudaEvent_t e : event) cudaEventDestroy(e);
  cudaEventDestroy(fork);
}

cudaError_t fork_streams(CopyEngine& engine, cudaStream_t stream) {
  if (cudaError_t error = cudaEventRecord(engine.fork, stream)) return error;
  for (cudaStream_t s : engine.stream) {
    if (cudaError_t error = cudaStreamWaitEvent(s, engine.fork, 0)) return error;
  }
  return cudaSuccess;
}

cudaError_t join_streams(CopyEngine& engine, cudaStream_t stream) {
  for (int i = 0; i < CopyEngine::kNumStreams; ++i) {
    if (cudaError_t error = follow(engine, static_cast<CopyEngine::Stream>(i), stream))
      return error;
  }
  return cudaSuccess;
}

cudaError_t push_chunks(const CommView& comm, Op op, int channel, CopyEngine& engine,
                        const Landing& landing, const char* source, const RowTiles& chunks,
                        int64_t begin, int64_t end) {
  cudaStream_t copies = engine.stream[CopyEngine::kCopies];
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const RowTile tile = chunks.tile(chunk);
    const char* from = source + tile.row * chunks.inner + tile.col;
    for (int k = 1; k < comm.num_ranks; ++k) {
      const int peer = (comm.rank + k) % comm.num_ranks;
      await_credit<<<1, 1, 0, engine.stream[CopyEngine::kCredit]>>>(comm, op, channel, peer, chunk);
      if (cudaError_t error = cudaGetLastError()) return error;
      if (cudaError_t error = follow(engine, CopyEngine::kCredit, copies)) return error;
      if (cudaError_t error = cudaMemcpyAsync(landing.slot(peer, comm.rank, chunk), from,
                                              tile.bytes(), cudaMemcpyDeviceToDevice, copies)) {
        return error;
      }
      if (cudaError_t error =
              follow(engine, CopyEngine::kCopies, engine.stream[CopyEngine::kAnnounce]))
        return error;
      announce<<<1, 1, 0, engine.stream[CopyEngine::kAnnounce]>>>(comm, channel, peer, chunk);
      if (cudaError_t error = cudaGetLastError()) return error;
    }
  }
  return cudaSuccess;
}

cudaError_t launch_end_chunks(const CommView& comm, int channel, int64_t chunks,
                              cudaStream_t stream) {
  end_chunks<<<1, 32, 0, stream>>>(comm, channel, chunks);
  return cudaGetLastError();
}

cudaError_t load_copy_engine() {
  return load_kernels(
      {kernel_pointer(announce), kernel_pointer(await_credit), kernel_pointer(end_chunks)});
}

}  // namespace pk

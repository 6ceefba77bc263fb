#include <algorithm>

#include "mechanism/copy_engine.cuh"

namespace pk {
namespace {

constexpr int64_t kNone = -1;

// One lane step: announces chunk `sent` (its copy is complete: stream order), then waits until the slot of chunk `next` is free.
__global__ void lane_step(const __grid_constant__ CommView comm, Op op, int channel_index, int peer, int64_t sent,
                          int64_t next) {
  const Waiter waiter{comm, op, channel_index};
  const Channel& channel = signal_page(comm, comm.rank).channels[channel_index];
  const uint32_t first = channel.chunks;
  if (sent != kNone) {
    // Release of the copy; pairs with wait_landed on the peer.
    uint32_t* landed = &signal_page(comm, peer).channels[channel_index].landed[comm.rank][sent % kLandingSlots];
    ptx::st_release_sys(landed, first + static_cast<uint32_t>(sent) + 1);
  }
  if (next != kNone) {
    // The slot held chunk next - kLandingSlots of this call or of an earlier one; all drain blocks of the peer have left it.
    const uint32_t expected = (first + static_cast<uint32_t>(next) + 1 - kLandingSlots) * kDrainBlocks;
    wait_signal(waiter, Slot::kTaken, peer, &channel.taken[peer], expected);
  }
}

__global__ void end_chunks(const __grid_constant__ CommView comm, int channel_index, uint32_t chunks) {
  Channel& channel = signal_page(comm, comm.rank).channels[channel_index];
  channel.chunks += chunks;
}

template <typename Visit>
cudaError_t each_stream(CopyEngine& engine, int rank, Visit visit) {
  int event = 0;
  for (int peer = 0; peer < static_cast<int>(engine.lane.size()); ++peer) {
    if (peer == rank) continue;
    for (cudaStream_t lane : engine.lane[peer]) {
      if (cudaError_t error = visit(lane, engine.join[event++])) return error;
    }
  }
  return visit(engine.own, engine.join[event]);
}

}  // namespace

CopyEngine::CopyEngine(int num_ranks) : lane(num_ranks), join(kLanes * num_ranks + 1) {
  const auto stream = [&](cudaStream_t& s) { ok_ &= cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) == cudaSuccess; };
  const auto event = [&](cudaEvent_t& e) { ok_ &= cudaEventCreateWithFlags(&e, cudaEventDisableTiming) == cudaSuccess; };
  for (auto& lanes : lane) std::for_each(lanes.begin(), lanes.end(), stream);
  stream(own);
  event(fork);
  std::for_each(join.begin(), join.end(), event);
}

CopyEngine::~CopyEngine() {
  for (auto& lanes : lane) {
    for (cudaStream_t s : lanes) cudaStreamDestroy(s);
  }
  cudaStreamDestroy(own);
  cudaEventDestroy(fork);
  for (cudaEvent_t e : join) cudaEventDestroy(e);
}

cudaError_t fork_lanes(CopyEngine& engine, int rank, cudaStream_t stream) {
  if (cudaError_t error = cudaEventRecord(engine.fork, stream)) return error;
  return each_stream(engine, rank, [&](cudaStream_t s, cudaEvent_t) { return cudaStreamWaitEvent(s, engine.fork, 0); });
}

cudaError_t join_lanes(CopyEngine& engine, int rank, cudaStream_t stream) {
  return each_stream(engine, rank, [&](cudaStream_t s, cudaEvent_t done) {
    if (cudaError_t error = cudaEventRecord(done, s)) return error;
    return cudaStreamWaitEvent(stream, done, 0);
  });
}

cudaError_t push_chunks(const CommView& comm, Op op, int channel, CopyEngine& engine, const Landing& landing, int peer,
                        const char* source, const RowTiles& chunks) {
  for (int64_t chunk = 0; chunk < chunks.num_tiles; ++chunk) {
    cudaStream_t lane = engine.lane[peer][chunk % CopyEngine::kLanes];
    if (chunk < CopyEngine::kLanes) lane_step<<<1, 1, 0, lane>>>(comm, op, channel, peer, kNone, chunk);
    const RowTile tile = chunks.tile(chunk);
    if (cudaError_t error = cudaMemcpyAsync(landing.slot(peer, comm.rank, chunk), source + tile.row * chunks.inner + tile.col,
                                            tile.bytes(), cudaMemcpyDeviceToDevice, lane)) {
      return error;
    }
    const int64_t next = chunk + CopyEngine::kLanes;
    lane_step<<<1, 1, 0, lane>>>(comm, op, channel, peer, chunk, next < chunks.num_tiles ? next : kNone);
    if (cudaError_t error = cudaGetLastError()) return error;
  }
  return cudaSuccess;
}

cudaError_t launch_end_chunks(const CommView& comm, int channel, int64_t chunks, cudaStream_t stream) {
  end_chunks<<<1, 1, 0, stream>>>(comm, channel, static_cast<uint32_t>(padded_chunks(chunks)));
  return cudaGetLastError();
}

cudaError_t load_copy_engine() {
  cudaFuncAttributes attributes;
  if (cudaError_t error = cudaFuncGetAttributes(&attributes, lane_step)) return error;
  return cudaFuncGetAttributes(&attributes, end_chunks);
}

}  // namespace pk

#include <algorithm>

#include "mechanism/copy_engine.cuh"

namespace pk {
namespace {

// One push: a chunk and whom it goes to; peer -1 is none.
struct Push {
  int peer;
  int64_t chunk;
};

// Between two pushes of a lane: announces the first (its copy is complete: stream order), then waits until the slot of the second is free.
__global__ void lane_step(const __grid_constant__ CommView comm, Op op, int channel_index, Push sent, Push next) {
  const Waiter waiter{comm, op, channel_index};
  const Channel& channel = signal_page(comm, comm.rank).channels[channel_index];
  const uint32_t first = channel.chunks;
  if (sent.peer >= 0) {
    // Release of the copy; pairs with wait_landed on the peer.
    auto& landed = signal_page(comm, sent.peer).channels[channel_index].landed[comm.rank];
    ptx::st_release_sys(&landed[sent.chunk % kLandingSlots], first + static_cast<uint32_t>(sent.chunk) + 1);
  }
  if (next.peer >= 0) {
    // The slot held chunk next - kLandingSlots of this call or of an earlier one; all drain blocks of the peer have left it.
    const uint32_t expected = (first + static_cast<uint32_t>(next.chunk) + 1 - kLandingSlots) * kDrainBlocks;
    wait_signal(waiter, Slot::kTaken, next.peer, &channel.taken[next.peer], expected);
  }
}

__global__ void end_chunks(const __grid_constant__ CommView comm, int channel_index, uint32_t chunks) {
  Channel& channel = signal_page(comm, comm.rank).channels[channel_index];
  channel.chunks += chunks;
}

}  // namespace

CopyEngine::CopyEngine() {
  const auto stream = [&](cudaStream_t& s) { ok_ &= cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking) == cudaSuccess; };
  const auto event = [&](cudaEvent_t& e) { ok_ &= cudaEventCreateWithFlags(&e, cudaEventDisableTiming) == cudaSuccess; };
  std::for_each(lane.begin(), lane.end(), stream);
  stream(own);
  event(fork);
  std::for_each(join.begin(), join.end(), event);
}

CopyEngine::~CopyEngine() {
  for (cudaStream_t s : lane) cudaStreamDestroy(s);
  cudaStreamDestroy(own);
  cudaEventDestroy(fork);
  for (cudaEvent_t e : join) cudaEventDestroy(e);
}

cudaError_t fork_lanes(CopyEngine& engine, cudaStream_t stream) {
  if (cudaError_t error = cudaEventRecord(engine.fork, stream)) return error;
  for (cudaStream_t lane : engine.lane) {
    if (cudaError_t error = cudaStreamWaitEvent(lane, engine.fork, 0)) return error;
  }
  return cudaStreamWaitEvent(engine.own, engine.fork, 0);
}

cudaError_t join_lanes(CopyEngine& engine, cudaStream_t stream) {
  for (int i = 0; i <= CopyEngine::kLanes; ++i) {
    cudaStream_t from = i < CopyEngine::kLanes ? engine.lane[i] : engine.own;
    if (cudaError_t error = cudaEventRecord(engine.join[i], from)) return error;
    if (cudaError_t error = cudaStreamWaitEvent(stream, engine.join[i], 0)) return error;
  }
  return cudaSuccess;
}

cudaError_t push_chunks(const CommView& comm, Op op, int channel, CopyEngine& engine, const Landing& landing, const char* source,
                        const RowTiles& chunks) {
  const int num_peers = comm.num_ranks - 1;
  const int64_t num_pushes = chunks.num_tiles * num_peers;
  const auto push = [&](int64_t i) -> Push {
    if (i < 0 || i >= num_pushes) return {-1, 0};
    return {static_cast<int>((comm.rank + 1 + i % num_peers) % comm.num_ranks), i / num_peers};
  };
  for (int64_t i = 0; i < num_pushes; ++i) {
    cudaStream_t lane = engine.lane[i % CopyEngine::kLanes];
    lane_step<<<1, 1, 0, lane>>>(comm, op, channel, push(i - CopyEngine::kLanes), push(i));
    if (cudaError_t error = cudaGetLastError()) return error;
    const Push now = push(i);
    const RowTile tile = chunks.tile(now.chunk);
    if (cudaError_t error =
            cudaMemcpyAsync(landing.slot(now.peer, comm.rank, now.chunk), source + tile.row * chunks.inner + tile.col, tile.bytes(),
                            cudaMemcpyDeviceToDevice, lane)) {
      return error;
    }
  }
  for (int64_t i = std::max<int64_t>(num_pushes - CopyEngine::kLanes, 0); i < num_pushes; ++i) {
    lane_step<<<1, 1, 0, engine.lane[i % CopyEngine::kLanes]>>>(comm, op, channel, push(i), {-1, 0});
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

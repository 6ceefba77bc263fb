// Tiles that several blocks make, each a part of k: all but the last leave theirs in fp32 for the
// last, which adds them up. Between the blocks of one GPU.
#pragma once

#include <cstdint>

#include "schedule/roles.cuh"
#include "tile/ptx_tensor.cuh"
#include "tile/register_tile.cuh"

namespace pk {

template <int kConsumers, int kCols>
struct PartialTiles {
  using Tile = Accumulator<kCols>;

  uint32_t* flags;  // a block: how many of its consumers have left their tile; zero at the start
  float* tiles;     // [blocks, kConsumers, 64, kCols], in an order of its own

  __device__ __forceinline__ void leave(const Tile& tile, int block, int consumer) const {
    float4* to = place(block, consumer);
#pragma unroll
    for (int i = 0; i < Tile::kCount / 4; ++i) {
      __stcg(to + i * 128, make_float4(tile.value[4 * i], tile.value[4 * i + 1],
                                       tile.value[4 * i + 2], tile.value[4 * i + 3]));
    }
    sync_consumer(consumer);
    // Release of all this consumer's stores; pairs with the acquire in add().
    if (is_first_thread()) ptx::red_add_release_gpu(flags + block, 1);
  }

  // Adds what `block` has left, or will. It must have a lower number than the caller's, so that it
  // started earlier, and must not wait for anybody before it leaves its tile.
  __device__ __forceinline__ void add(Tile& tile, int block, int consumer) const {
    if (is_first_thread()) {
      const uint64_t start = ptx::globaltimer_ns();
      while (ptx::ld_acquire_gpu(flags + block) < kConsumers) {
        if (ptx::globaltimer_ns() - start > kLimitNs) ptx::trap();
      }
    }
    sync_consumer(consumer);
    const float4* from = place(block, consumer);
#pragma unroll
    for (int i = 0; i < Tile::kCount / 4; ++i) {
      const float4 left = __ldcg(from + i * 128);
      tile.value[4 * i] += left.x;
      tile.value[4 * i + 1] += left.y;
      tile.value[4 * i + 2] += left.z;
      tile.value[4 * i + 3] += left.w;
    }
  }

 private:
  // Longer than any launch takes: past it something is wrong.
  static constexpr uint64_t kLimitNs = 300'000'000'000;

  // A thread's values four by four, so that a warp writes 512 bytes together.
  __device__ __forceinline__ float4* place(int block, int consumer) const {
    constexpr int kValues = Tile::kCount * 128;
    return reinterpret_cast<float4*>(tiles) +
           (static_cast<int64_t>(block) * kConsumers + consumer) * (kValues / 4) +
           threadIdx.x % 128;
  }
};

}  // namespace pk

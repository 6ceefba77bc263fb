// A tile that the blocks of a cluster have made together, each a part of k: added up through their
// shared memory, each block its share of the rows, always in the order of the parts.
//
//   block 0's accumulators    rows 0-31 | rows 32-63         a cluster of two
//   block 1's accumulators    rows 0-31 | rows 32-63
//                                 |           |
//                             block 0     block 1            adds and stores
#pragma once

#include <cstdint>

#include "schedule/roles.cuh"
#include "tile/ptx_tensor.cuh"
#include "tile/register_tile.cuh"

namespace pk {

// For clusters of 1, 2, 4 or 8 blocks.
template <int kConsumers, int kCols>
struct ClusterSum {
  using Tile = Accumulator<kCols>;
  static constexpr int kGroups = Tile::kRows / 8;  // of 8 rows: a warp holds two
  static constexpr int kChunks = kCols / 16;       // of 16 columns
  static constexpr int kStrips = kCols / kPanel;   // of a group
  static constexpr int64_t kBytes = int64_t{kConsumers} * Tile::kRows * kCols * 4;

  float4* shared;  // kBytes, at the same place in every block

  // All threads of all consumers of the cluster; nobody uses `shared` for anything else any more.
  // Each warp calls store(row, col, strip) with what it has added up, of the first `num_rows` rows
  // at least.
  template <typename Store>
  __device__ __forceinline__ void run(const Tile& tile, int consumer, int num_rows,
                                      Store store) const {
    const int size = ptx::cluster_size(), rank = ptx::cluster_rank();
    const int share = kGroups / size;
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    // The pipelines, which lie in this memory, are at rest: wgmma's reads are complete, and the
    // copies' writes were waited for at their barriers.
    ptx::cluster_sync();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int group = 2 * warp + half;
      if (group * 8 >= num_rows) break;
      float4* to = place(rank, consumer, group % share, share) + lane;
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const float* from = tile.value + 8 * i + 2 * half;
        ptx::st_shared_cluster(to + 32 * i, group / share,
                               make_float4(from[0], from[1], from[4], from[5]));
      }
    }
    ptx::cluster_sync();
    for (int i = warp; i < share * kStrips; i += 4) {
      const int group = i / kStrips, row = (rank * share + group) * 8;
      if (row >= num_rows) break;
      Strip strip{};
      for (int block = 0; block < size; ++block) {
        const float4* part =
            place(block, consumer, group, share) + i % kStrips * (kPanel * 2) + lane;
#pragma unroll
        for (int j = 0; j < kPanel / 16; ++j) strip.add(j, ptx::ld_shared(part + 32 * j));
      }
      store(row, i % kStrips * kPanel, strip);
    }
  }

 private:
  // Where `group` of a share lies that `block` has sent: a warp's 512 bytes for each chunk.
  __device__ __forceinline__ float4* place(int block, int consumer, int group, int share) const {
    return shared + ((block * kConsumers + consumer) * share + group) * kChunks * 32;
  }
};

}  // namespace pk

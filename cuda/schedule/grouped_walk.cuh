// The walk of a grouped product: rows of A in groups of sizes that only the device knows, each
// group with a B of its own. Tiles are numbered group by group, in a group down its rows, then the
// next column, so that blocks that run together share a B. Block b takes tiles b, b + num_blocks,
// ...
//
// No table is made: a block's tiles come in order, so its warps find the groups they lie in 32 at a
// time as they go.
#pragma once

#include <cstdint>

namespace pk {

struct GroupedWalk {
  const int32_t* group_sizes;
  int num_groups;
  int num_rows;  // of A: rows past it are in no group
  int num_n;     // tiles of a group's columns
  int num_steps;
  int num_blocks;
  int tile_rows;

  struct Part {
    int n;
    int begin;      // the first step: 0
    int num_steps;  // 0 if there is no part
    int first_row, past_row;
    int index;

    __device__ int row(int /*tile_rows*/) const { return first_row; }
    __device__ int end_row() const { return past_row; }
    __device__ int group() const { return index; }
  };

  __device__ static constexpr bool is_whole(const Part&) { return true; }

  // All lanes of a warp together.
  class Parts {
   public:
    __device__ __forceinline__ Parts(const GroupedWalk& walk, int block)
        : walk_(walk), tile_(block) {}

    // The block's next part; one without steps if there is none.
    __device__ __forceinline__ Part next() {
      for (; group_ < walk_.num_groups; group_ += 32) {
        const int lane = threadIdx.x % 32, left = walk_.num_rows - first_row_;
        int size = size_of(group_ + lane);
        const int to = sum_to(size);
        size = max(0, min(size, left - (to - size)));  // rows that A does not have are in no group
        const int rows_to = first_row_ + min(to, left);
        const int num_m = (size + walk_.tile_rows - 1) / walk_.tile_rows;
        const int tiles = num_m * walk_.num_n;
        const int tiles_to = first_tile_ + sum_to(tiles);
        const uint32_t past = __ballot_sync(kAll, tile_ < tiles_to);
        if (past != 0) {
          const int found = __ffs(past) - 1;
          const int in_group = tile_ - __shfl_sync(kAll, tiles_to - tiles, found);
          const int rows_of_tiles = __shfl_sync(kAll, num_m, found);
          const int end_row = __shfl_sync(kAll, rows_to, found);
          const int row = end_row - __shfl_sync(kAll, size, found);
          tile_ += walk_.num_blocks;
          return {in_group / rows_of_tiles,
                  0,
                  walk_.num_steps,
                  row + in_group % rows_of_tiles * walk_.tile_rows,
                  end_row,
                  group_ + found};
        }
        first_tile_ = __shfl_sync(kAll, tiles_to, 31);
        first_row_ = __shfl_sync(kAll, rows_to, 31);
      }
      return {};
    }

    // Rows of all groups, once there is no next part.
    __device__ __forceinline__ int rows_in_groups() const { return first_row_; }

   private:
    static constexpr uint32_t kAll = 0xFFFFFFFF;

    // A size below zero is zero, and none is more than A's rows, so that 32 can be added up.
    __device__ __forceinline__ int size_of(int group) const {
      const int size = group < walk_.num_groups ? __ldg(walk_.group_sizes + group) : 0;
      return max(0, min(size, walk_.num_rows));
    }

    // Of this lane's value and those of the lanes before it.
    static __device__ __forceinline__ int sum_to(int value) {
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int before = __shfl_up_sync(kAll, value, distance);
        if (threadIdx.x % 32 >= distance) value += before;
      }
      return value;
    }

    const GroupedWalk& walk_;
    int tile_;  // the next one
    // The first of the 32 groups at hand, and what lies before it.
    int group_ = 0, first_tile_ = 0, first_row_ = 0;
  };
};

}  // namespace pk

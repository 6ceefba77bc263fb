// Which block does which part of a matrix product, and in which order. Host and device.
//
// Tiles are numbered so that blocks that run together share rows and columns in the L2: down a band
// of `band_rows` rows of tiles, then the next column. Block b takes tiles b, b + num_blocks, ...
//
//   band 0   0  4  8  12         A last wave that would leave most blocks idle is split instead:
//            1  5  9  13         each of its `split_tiles` tiles is cut along k into `split` parts,
//            2  6  10 14         one for each block of a cluster, which add them up
//            3  7  11 15         (cluster_sum.cuh). It is each block's last part.
//   band 1   16 18 20 ...
//            17 19 21
//
// All tiles of a part go through the same steps of k at the same time, and so share what they read;
// dealing out all steps evenly (stream-K, arXiv:2301.03598) fills the wave better and loses that.
// Blocks wait only for those of their cluster, which run together: any number of resident clusters
// will do.
#pragma once

#include <cstdint>

#include "tile/host_device.h"

namespace pk {

struct MatmulWalk {
  int num_m, num_n;  // tiles of the result in each dimension
  int num_steps;     // steps of k in a tile
  int num_blocks;
  int split_tiles;  // the last tiles; the others come in whole waves, unless this is 0
  int split;        // parts of each, and blocks of a cluster: split_tiles * split <= num_blocks
  int band_rows;

  struct Part {
    int m, n;       // the tile
    int begin;      // the first of its steps
    int num_steps;  // that are made of it: 0 if there is no part

    PK_HOST_DEVICE int row(int tile_rows) const { return m * tile_rows; }
    PK_HOST_DEVICE static constexpr int end_row() { return INT32_MAX; }  // the result's own end
    PK_HOST_DEVICE int group() const { return 0; }
  };

  PK_HOST_DEVICE int num_tiles() const { return num_m * num_n; }
  PK_HOST_DEVICE int whole_tiles() const { return num_tiles() - split_tiles; }
  PK_HOST_DEVICE bool is_whole(const Part& part) const { return part.num_steps == num_steps; }

  // Whether the blocks make each tile once: a plan comes from outside.
  bool is_valid() const {
    const bool known = split == 1 || split == 2 || split == 4 || split == 8;
    return known && num_blocks > 0 && num_blocks % split == 0 && split <= num_steps &&
           int64_t{num_m} * num_n <= INT32_MAX && split_tiles >= 0 && whole_tiles() >= 0 &&
           int64_t{split_tiles} * split <= num_blocks &&
           (split_tiles == 0 || whole_tiles() % num_blocks == 0);
  }

  // A tile by its number, with all of its steps.
  PK_HOST_DEVICE Part whole(int tile) const { return at(tile, 0, num_steps); }

  PK_HOST_DEVICE int num_whole(int block) const {
    const int left = whole_tiles() - block;
    return left > 0 ? (left - 1) / num_blocks + 1 : 0;
  }

  PK_HOST_DEVICE int num_parts(int block) const {
    return num_whole(block) + (block < split_tiles * split);
  }

  // Part i of a block: its whole tiles, then its part of a split one.
  PK_HOST_DEVICE Part part(int block, int i) const {
    if (i < num_whole(block)) return whole(block + i * num_blocks);
    const int p = block % split;
    const int begin = p * num_steps / split, end = (p + 1) * num_steps / split;
    return at(whole_tiles() + block / split, begin, end - begin);
  }

  // A block's way through its parts.
  class Parts {
   public:
    PK_HOST_DEVICE Parts(const MatmulWalk& walk, int block)
        : walk_(walk), block_(block), left_(walk.num_parts(block)) {}

    // The next part; one without steps if there is none.
    PK_HOST_DEVICE Part next() {
      if (left_ == 0) return {};
      return walk_.part(block_, walk_.num_parts(block_) - left_--);
    }

   private:
    const MatmulWalk& walk_;
    int block_, left_;
  };

 private:
  PK_HOST_DEVICE Part at(int tile, int begin, int steps) const {
    const int band = tile / (band_rows * num_n), in_band = tile - band * band_rows * num_n;
    const int left = num_m - band * band_rows;
    const int rows = left < band_rows ? left : band_rows;
    return {band * band_rows + in_band % rows, in_band / rows, begin, steps};
  }
};

}  // namespace pk

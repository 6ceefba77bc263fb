// Which block does which part of a matrix product, and in which order. Host and device.
//
// A worker is a thread block, or a cluster of them. Tiles are numbered so that workers that run
// together share rows and columns in the L2: down a band of `band_rows` rows of tiles, then the
// next column. Worker w takes tiles w, w + num_workers, ...
//
//   band 0   0  4  8  12         A last wave that would leave most workers idle is split instead:
//            1  5  9  13         each of its `split_tiles` tiles is cut along k into `split` parts,
//            2  6  10 14         and part p of tile t goes to worker p * split_tiles + t. The last
//            3  7  11 15         part's worker adds up what the others have left.
//   band 1   16 18 20 ...
//            17 19 21
//
// All tiles of a part go through the same steps of k at the same time, and so share what they read;
// dealing out all steps evenly (stream-K, arXiv:2301.03598) fills the wave better and loses that.
// A worker waits only for workers of a lower number, which the GPU starts earlier, and as its last
// act: any number of resident blocks will do.
#pragma once

#include <cstdint>

#include "tile/host_device.h"

namespace pk {

struct MatmulWalk {
  int num_m, num_n;  // tiles of the result in each dimension
  int num_steps;     // steps of k in a tile
  int num_workers;
  int split_tiles;  // the last tiles; the others come in whole waves, unless this is 0
  int split;        // parts of each: split_tiles * split <= num_workers
  int band_rows;
  int first_m;  // the row of tiles to begin with: ranks begin with their own

  struct Part {
    int m, n;        // the tile
    int begin, end;  // its steps
  };

  PK_HOST_DEVICE int num_tiles() const { return num_m * num_n; }
  PK_HOST_DEVICE int whole_tiles() const { return num_tiles() - split_tiles; }
  PK_HOST_DEVICE bool begins_tile(const Part& part) const { return part.begin == 0; }
  PK_HOST_DEVICE bool ends_tile(const Part& part) const { return part.end == num_steps; }

  PK_HOST_DEVICE int num_whole(int worker) const {
    const int left = whole_tiles() - worker;
    return left > 0 ? (left - 1) / num_workers + 1 : 0;
  }

  PK_HOST_DEVICE int num_parts(int worker) const {
    return num_whole(worker) + (worker < split_tiles * split);
  }

  // Part i of a worker: its whole tiles, then its part of a split one.
  PK_HOST_DEVICE Part part(int worker, int i) const {
    if (i < num_whole(worker)) return at(worker + i * num_workers, 0, num_steps);
    const int64_t p = worker / split_tiles;
    return at(whole_tiles() + worker % split_tiles, static_cast<int>(p * num_steps / split),
              static_cast<int>((p + 1) * num_steps / split));
  }

 private:
  PK_HOST_DEVICE Part at(int tile, int begin, int end) const {
    const int band = tile / (band_rows * num_n), in_band = tile - band * band_rows * num_n;
    const int left = num_m - band * band_rows;
    const int rows = left < band_rows ? left : band_rows;
    int m = band * band_rows + in_band % rows + first_m;
    if (m >= num_m) m -= num_m;
    return {m, in_band / rows, begin, end};
  }
};

}  // namespace pk

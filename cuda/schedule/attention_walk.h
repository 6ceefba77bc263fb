// Which block works on which tile of attention. A tile is some rows of one head: of the queries in
// the forward pass, of the keys in the backward pass.
//
// Heads are walked in bands, whose keys and values pass through the L2 at the same time: tile 0 of
// each head of the band, then tile 1, and so on.
//
//                  head 0  1  2   3  4  5
//   tile of rows 0      0  1  2   9 10 11
//                1      3  4  5  12 13 14
//                2      6  7  8  15 16 17
//
// Under a causal mask tiles differ in work: the walk can go from the last rows to the first, so
// that the long ones come first, and blocks take a ticket for each tile.
#pragma once

#include <cstdint>

#include "tile/host_device.h"

namespace pk {

inline constexpr int kBoundRows = 64;  // whose least and greatest segment are known

struct AttentionWalk {
  int num_rows;    // tiles along a head's rows
  int num_heads;   // of all the batch
  int band_heads;  // a whole number of groups that share keys
  bool from_last;

  struct Tile {
    int head, row;
  };

  PK_HOST_DEVICE int num_tiles() const { return num_rows * num_heads; }

  PK_HOST_DEVICE Tile tile(int number) const {
    const int band = number / (num_rows * band_heads);
    const int in_band = number - band * num_rows * band_heads;
    const int left = num_heads - band * band_heads;
    const int heads = left < band_heads ? left : band_heads;
    const int row = in_band / heads;
    return {band * band_heads + in_band % heads, from_last ? num_rows - 1 - row : row};
  }

  bool is_valid() const {
    return num_rows > 0 && num_heads > 0 && band_heads > 0 &&
           int64_t{num_rows} * num_heads <= INT32_MAX / 2;
  }
};

}  // namespace pk

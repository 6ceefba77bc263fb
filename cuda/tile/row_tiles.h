// The walk over a matrix of bytes in pieces that are contiguous in memory.
//
//        inner bytes                 rows wider than a tile: a tile is a part of one row
//      +------+------+---+           rows narrower:          a tile is several whole rows
//      |  0   |  1   | 2 |
//      +------+------+---+           Either way a tile is one contiguous piece of the packed [rows,
//      inner] source, and |  3   |  4   | 5 |           `num_rows` pieces of `num_cols` bytes in a
//      destination with a wider pitch.
//      +------+------+---+
//
// Every mechanism of an op walks the same tiles; this is the only place with the arithmetic. Host
// and device.
#pragma once

#include <cstdint>

#include "tile/host_device.h"

namespace pk {

struct RowTile {
  int64_t row;
  int64_t col;        // bytes
  uint32_t num_rows;  // more than 1 only if num_cols is the whole row
  uint32_t num_cols;  // bytes

  PK_HOST_DEVICE uint32_t bytes() const { return num_rows * num_cols; }
};

struct RowTiles {
  int64_t rows;
  int64_t inner;  // bytes
  uint32_t tile_bytes;
  uint32_t rows_per_tile;
  int64_t tiles_per_row;
  int64_t num_tiles;

  // `tile_bytes` is a multiple of every alignment that a mechanism asks for (at least 16), so a
  // tile starts aligned when rows do.
  PK_HOST_DEVICE static RowTiles make(int64_t rows, int64_t inner, uint32_t tile_bytes) {
    RowTiles tiles{rows, inner, tile_bytes, 1, 1, 0};
    if (rows <= 0 || inner <= 0) return tiles;
    if (inner >= tile_bytes) {
      tiles.tiles_per_row = (inner + tile_bytes - 1) / tile_bytes;
      tiles.num_tiles = rows * tiles.tiles_per_row;
    } else {
      tiles.rows_per_tile = tile_bytes / static_cast<uint32_t>(inner);
      tiles.num_tiles = (rows + tiles.rows_per_tile - 1) / tiles.rows_per_tile;
    }
    return tiles;
  }

  PK_HOST_DEVICE RowTile tile(int64_t index) const {
    if (inner >= tile_bytes) {
      const int64_t row = index / tiles_per_row;
      const int64_t col = (index - row * tiles_per_row) * tile_bytes;
      const int64_t left = inner - col;
      return {row, col, 1, static_cast<uint32_t>(left < tile_bytes ? left : tile_bytes)};
    }
    const int64_t row = index * rows_per_tile;
    const int64_t left = rows - row;
    return {row, 0, static_cast<uint32_t>(left < rows_per_tile ? left : rows_per_tile),
            static_cast<uint32_t>(inner)};
  }
};

}  // namespace pk

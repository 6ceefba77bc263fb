// The walk over a matrix of bytes in pieces that are contiguous in memory.
//
//      inner bytes
//    +-----+-----+----+     Rows wider than a tile: a tile is a part of one row, all parts about
//    |  0  |  1  | 2  |     equally wide.
//    +-----+-----+----+     Rows narrower: a tile is several whole rows.
//    |  3  |  4  | 5  |
//    +-----+-----+----+
//
// Either way a tile is one contiguous piece of the packed [rows, inner] source, and `num_rows`
// pieces of `num_cols` bytes in a destination with a wider pitch. Every mechanism of an op walks
// the same tiles; this is the only place with the arithmetic. Host and device.
#pragma once

#include <cstdint>

#include "tile/host_device.h"

namespace pk {

struct RowTile {
  int64_t row;
  int64_t col;        // bytes
  uint32_t num_rows;  // of RowTiles more than 1 only if num_cols is the whole row
  uint32_t num_cols;  // bytes

  PK_HOST_DEVICE uint32_t bytes() const { return num_rows * num_cols; }
};

struct RowTiles {
  int64_t rows;
  int64_t inner;           // bytes
  uint32_t width;          // bytes of a full tile's rows
  uint32_t rows_per_tile;  // more than 1 only if width is inner
  int64_t tiles_per_row;
  int64_t num_tiles;

  // No tile is larger than `tile_bytes`, a multiple of 128. Parts of a row start at multiples of
  // 128 bytes, so a tile is as aligned as its row.
  PK_HOST_DEVICE static RowTiles make(int64_t rows, int64_t inner, uint32_t tile_bytes) {
    RowTiles tiles{rows, inner, static_cast<uint32_t>(inner), 1, 1, 0};
    if (rows <= 0 || inner <= 0) return tiles;
    if (inner > tile_bytes) {
      const int64_t parts = (inner + tile_bytes - 1) / tile_bytes;
      tiles.width = static_cast<uint32_t>(((inner + parts - 1) / parts + 127) / 128 * 128);
      tiles.tiles_per_row = (inner + tiles.width - 1) / tiles.width;
      tiles.num_tiles = rows * tiles.tiles_per_row;
    } else {
      tiles.rows_per_tile = tile_bytes / tiles.width;
      tiles.num_tiles = (rows + tiles.rows_per_tile - 1) / tiles.rows_per_tile;
    }
    return tiles;
  }

  PK_HOST_DEVICE RowTile tile(int64_t index) const {
    // The 64-bit division is a long routine, and one dimension is mostly 1.
    const int64_t band = tiles_per_row == 1 ? index : rows == 1 ? 0 : index / tiles_per_row;
    const int64_t row = band * rows_per_tile;
    const int64_t col = (index - band * tiles_per_row) * width;
    const int64_t rows_left = rows - row, cols_left = inner - col;
    return {row, col, static_cast<uint32_t>(rows_left < rows_per_tile ? rows_left : rows_per_tile),
            static_cast<uint32_t>(cols_left < width ? cols_left : width)};
  }
};

}  // namespace pk

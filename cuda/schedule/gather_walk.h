// Who does what in a product whose rows are gathered from all ranks. Host and device.
//
//   rows      rank 0 | rank 1 | rank 2 | rank 3
//   rank 1         4 | 1      | 2      | 3         the order in which it makes its tiles ...
//   to rank 1   last | -      | first  | second    ... and in which each peer sends to it first
//
// The walk begins with this rank's own rows, which are there; then come those of the next ranks, in
// the order in which they are sent. Own rows have tiles of their own, so that they need not be in
// the gathered matrix; all rows before them, and all behind them, are cut regardless of whose they
// are, and a tile may wait for several ranks.
//
// There may be several matrices to gather, [outer, part_rows] rows of each rank. The result is then
// [outer, ranks, part_rows], and each stretch of a rank's rows has tiles of its own.
//
// The rows of a band of tiles come together, chunk by chunk of k (gather_pieces.h), so that it does
// not matter which of them a round of tiles takes first.
#pragma once

#include <cstdint>

#include "schedule/matmul_walk.h"
#include "tile/host_device.h"

namespace pk {

struct GatherWalk {
  MatmulWalk tiles;  // rows of tiles are counted in the order in which they are made
  int outer;
  int part_rows;
  int rank, num_ranks;
  int tile_rows;
  int stretch_tiles;  // rows of tiles: of one stretch of rows,
  int own_tiles;      // of all of a rank's,
  int later_tiles;    // and of those behind the own rows, if there is one matrix

  // `tiles` without num_m, and with the largest band.
  PK_HOST_DEVICE static GatherWalk make(MatmulWalk tiles, int outer, int part_rows, int rank,
                                        int num_ranks, int tile_rows) {
    GatherWalk walk{tiles, outer, part_rows, rank, num_ranks, tile_rows, 0, 0, 0};
    walk.stretch_tiles = walk.tiles_of(part_rows);
    walk.own_tiles = outer * walk.stretch_tiles;
    walk.later_tiles = walk.tiles_of((num_ranks - 1 - rank) * part_rows);
    walk.tiles.num_m = outer > 1
                           ? num_ranks * walk.own_tiles
                           : walk.own_tiles + walk.later_tiles + walk.tiles_of(rank * part_rows);
    // Bands of equal height, so that one ends where the own rows do, if it can.
    const int bands = (walk.own_tiles + tiles.band_rows - 1) / tiles.band_rows;
    walk.tiles.band_rows = (walk.own_tiles + bands - 1) / bands;
    return walk;
  }

  struct Part : MatmulWalk::Part {
    int first_row, past_row;  // of the result; past the last that the tile may have
    bool own;

    PK_HOST_DEVICE int row(int /*tile_rows*/) const { return first_row; }
    PK_HOST_DEVICE int end_row() const { return past_row; }
  };

  PK_HOST_DEVICE static constexpr bool is_whole(const Part&) { return true; }

  class Parts {
   public:
    PK_HOST_DEVICE Parts(const GatherWalk& walk, int block) : walk_(walk), tile_(block) {}

    // The next part; one without steps if there is none.
    PK_HOST_DEVICE Part next() {
      if (tile_ >= walk_.tiles.num_tiles()) return {};
      const MatmulWalk::Part part = walk_.tiles.whole(tile_);
      tile_ += walk_.tiles.num_blocks;
      return walk_.with_rows(part);
    }

   private:
    const GatherWalk& walk_;
    int tile_;
  };

  // f(source, o, first, end) for each rank that has rows of the part: which of its matrix `o`.
  template <typename F>
  PK_HOST_DEVICE void for_each_source(const Part& part, F f) const {
    const int past = part.first_row + tile_rows;
    const int end = past < part.past_row ? past : part.past_row;
    for (int stretch = part.first_row / part_rows; stretch * part_rows < end; ++stretch) {
      const int before = stretch * part_rows, o = stretch / num_ranks;
      f(stretch - o * num_ranks, o, part.first_row > before ? part.first_row - before : 0,
        end - before < part_rows ? end - before : part_rows);
    }
  }

  // The row of a rank's part that is at `row` of the result.
  PK_HOST_DEVICE int row_of_part(int row) const {
    const int stretch = row / part_rows;
    return row - (stretch - stretch / num_ranks) * part_rows;
  }

 private:
  PK_HOST_DEVICE int tiles_of(int rows) const { return (rows + tile_rows - 1) / tile_rows; }

  PK_HOST_DEVICE Part with_rows(const MatmulWalk::Part& part) const {
    const int turn = part.m / own_tiles, m = part.m - turn * own_tiles;
    if (turn == 0 || outer > 1) {
      const int o = m / stretch_tiles;
      const int source = rank + turn < num_ranks ? rank + turn : rank + turn - num_ranks;
      const int first = (o * num_ranks + source) * part_rows;
      return {part, first + (m - o * stretch_tiles) * tile_rows, first + part_rows, turn == 0};
    }
    const int own_row = rank * part_rows, later_row = own_row + part_rows;
    const int other = part.m - own_tiles;
    if (other < later_tiles)
      return {part, later_row + other * tile_rows, num_ranks * part_rows, false};
    return {part, (other - later_tiles) * tile_rows, own_row, false};
  }
};

}  // namespace pk

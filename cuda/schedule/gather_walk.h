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
// What a rank sends is cut into pieces with a flag each (gather_push.cuh), which are dealt out in
// turn, so that all who push work on the rows that come next.
#pragma once

#include <cstdint>

#include "schedule/matmul_walk.h"
#include "tile/host_device.h"

namespace pk {

struct GatherWalk {
  MatmulWalk tiles;  // rows of tiles are counted in the order in which they are made
  int part_rows;     // that each rank has
  int rank, num_ranks;
  int tile_rows;
  int own_tiles, later_tiles;  // rows of tiles: of the own rows, and of those behind them

  // `tiles` without num_m, and with the largest band.
  PK_HOST_DEVICE static GatherWalk make(MatmulWalk tiles, int part_rows, int rank, int num_ranks,
                                        int tile_rows) {
    GatherWalk walk{tiles, part_rows, rank, num_ranks, tile_rows, 0, 0};
    walk.own_tiles = walk.tiles_of(part_rows);
    walk.later_tiles = walk.tiles_of((num_ranks - 1 - rank) * part_rows);
    walk.tiles.num_m = walk.own_tiles + walk.later_tiles + walk.tiles_of(rank * part_rows);
    // Bands of equal height, so that one ends where the own rows do, if it can.
    const int bands = (walk.own_tiles + tiles.band_rows - 1) / tiles.band_rows;
    walk.tiles.band_rows = (walk.own_tiles + bands - 1) / bands;
    return walk;
  }

  struct Part : MatmulWalk::Part {
    int first_row, past_row;  // of the gathered matrix; past the last that the tile may have
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

  // f(source, first, end) for each rank that has rows of the part, and those rows of its own.
  template <typename F>
  PK_HOST_DEVICE void for_each_source(const Part& part, F f) const {
    const int past = part.first_row + tile_rows;
    const int end = past < part.past_row ? past : part.past_row;
    for (int source = part.first_row / part_rows; source * part_rows < end; ++source) {
      const int before = source * part_rows;
      f(source, part.first_row > before ? part.first_row - before : 0,
        end - before < part_rows ? end - before : part_rows);
    }
  }

 private:
  PK_HOST_DEVICE int tiles_of(int rows) const { return (rows + tile_rows - 1) / tile_rows; }

  PK_HOST_DEVICE Part with_rows(const MatmulWalk::Part& part) const {
    const int own_row = rank * part_rows, later_row = own_row + part_rows;
    if (part.m < own_tiles) return {part, own_row + part.m * tile_rows, later_row, true};
    const int m = part.m - own_tiles;
    if (m < later_tiles) return {part, later_row + m * tile_rows, num_ranks * part_rows, false};
    return {part, (m - later_tiles) * tile_rows, own_row, false};
  }
};

// What a rank sends: its part, in pieces, to the peer that uses it first, then to
// the next one, ...
struct GatherPieces {
  int64_t part_bytes;
  int shift;  // a piece has 2^shift bytes; the last one of a part may have fewer
  int num_pieces;
  int rank, num_ranks;

  static constexpr int kLeastShift = 14;  // a stage of the communicators' rings
  static constexpr int kMostShift = 18;

  // `small`: for warps that push by themselves. No more than `most_pieces`, however large they are.
  PK_HOST_DEVICE static GatherPieces make(int64_t part_bytes, int rank, int num_ranks, bool small,
                                          int most_pieces) {
    constexpr int kWanted = 64;
    const int most = small ? kLeastShift : kMostShift;
    GatherPieces pieces{part_bytes, kLeastShift, 0, rank, num_ranks};
    while ((pieces.shift < most && pieces.count() > kWanted) || pieces.count() > most_pieces)
      ++pieces.shift;
    pieces.num_pieces = static_cast<int>(pieces.count());
    return pieces;
  }

  PK_HOST_DEVICE int64_t first(int piece) const { return int64_t{piece} << shift; }

  // The piece that has a byte of the part.
  PK_HOST_DEVICE int at(int64_t byte) const { return static_cast<int>(byte >> shift); }

  PK_HOST_DEVICE int num_sent() const { return num_pieces * (num_ranks - 1); }

  struct Sent {
    int to, piece;
  };
  PK_HOST_DEVICE Sent sent(int i) const {
    const int turn = i / num_pieces;  // to the rank before this one, the one before that, ...
    const int to = rank - 1 - turn;
    return {to < 0 ? to + num_ranks : to, i - turn * num_pieces};
  }

 private:
  PK_HOST_DEVICE int64_t count() const { return ((part_bytes - 1) >> shift) + 1; }
};

}  // namespace pk

// How a rank's part, matrices of rows, is cut into pieces with a flag each, and in which order they
// are sent. Host and device.
//
//                chunk 0   1    2        A piece is a band of rows by a chunk of the columns, which
//    group 0  band 0   0   3    6        are k of the product. Groups of bands follow each other,
//                  1   1   4    7        as many rows as about a round of tiles has. A group comes
//                  2   2   5    8        chunk by chunk: its tiles can all begin when the first one
//    group 1       3   9  11   13        is there, and by the time they need the next it has come.
//                  4  10  12   14
//
// Which piece has which flag follows from the part's sizes and the way of pushing alone; the groups
// say only when it comes, and need not be the same on every rank.
//
// Where rows are short there is one chunk, and a piece is contiguous.
#pragma once

#include <cstdint>

#include "tile/divisor.h"
#include "tile/host_device.h"
#include "tile/row_tiles.h"

namespace pk {

struct GatherPieces {
  int outer, rows;     // matrices of a part, and rows of each
  uint32_t row_bytes;  // a multiple of 16
  int rank, num_ranks;

  uint32_t chunk_bytes;  // of a row; the last one may have fewer
  int num_chunks;
  int band_shift;  // a band has 2^band_shift rows; the last one of a matrix may have fewer
  int num_pieces;
  Divisor bands;  // of a matrix

  // A piece is sent in 2^moves_shift moves, each of a stage's bytes at most, some of them empty
  // where a piece has fewer rows.
  int moves_shift;
  int move_rows_shift, move_cols_shift;  // log2 of a move's rows; of the moves side by side
  uint32_t move_cols;                    // bytes

  int all_bands, group_bands;                     // of all matrices; of a group
  Divisor part, group, full_height, last_height;  // pieces of each; bands of a group

  static constexpr int kStage = 1 << 14;  // bytes of the communicators' rings, and of least pieces
  static constexpr int kMost = 1 << 17;   // bytes of the largest piece, if there are flags for all
  // Bytes of a chunk at most. With more a tile begins later; with half of it the link is still
  // fast, but a stage takes twice as many copies.
  static constexpr int kChunk = 1 << 12;

  // `small`: for warps that push by themselves. No more than `most_pieces`, however large they are;
  // none if there are more matrices than that.
  PK_HOST_DEVICE static GatherPieces make(int outer, int rows, uint32_t row_bytes, int rank,
                                          int num_ranks, bool small, int most_pieces) {
    constexpr int kWanted = 128;
    GatherPieces p{};
    p.outer = outer;
    p.rows = rows;
    p.row_bytes = row_bytes;
    p.rank = rank;
    p.num_ranks = num_ranks;
    if (outer > most_pieces) return p;
    // Equal chunks, for a narrow one at the end would be slow; whole steps of k, if not all of it.
    int64_t chunks = ceil_div(row_bytes, kChunk);
    if (chunks > most_pieces / outer) chunks = most_pieces / outer;
    p.chunk_bytes = chunks == 1 ? row_bytes : round_up(ceil_div(row_bytes, chunks), 128);
    p.num_chunks = static_cast<int>(ceil_div(row_bytes, p.chunk_bytes));

    p.move_cols = p.chunk_bytes < kStage ? p.chunk_bytes : kStage;
    while (int64_t{p.move_cols} << p.move_cols_shift < p.chunk_bytes) ++p.move_cols_shift;
    while (int64_t{p.move_cols} << (p.move_rows_shift + 1) <= kStage) ++p.move_rows_shift;

    const int most = small ? kStage : kMost;
    const auto count = [&] {
      return outer * p.num_chunks * ceil_div(rows, int64_t{1} << p.band_shift);
    };
    p.band_shift = p.move_rows_shift;
    while ((int64_t{p.chunk_bytes} << (p.band_shift + 1) <= most && count() > kWanted) ||
           count() > most_pieces)
      ++p.band_shift;
    p.moves_shift = p.band_shift - p.move_rows_shift + p.move_cols_shift;
    p.num_pieces = static_cast<int>(count());
    p.all_bands = p.num_pieces / p.num_chunks;
    p.bands = Divisor::make(p.all_bands / outer);

    p.part = Divisor::make(p.num_pieces);
    p.set_groups(1);
    return p;
  }

  // `group_rows`: of a part, that are multiplied at the same time.
  PK_HOST_DEVICE void set_groups(int group_rows) {
    group_bands = group_rows >> band_shift;
    if (group_bands > all_bands) group_bands = all_bands;
    if (group_bands < 1) group_bands = 1;
    const int past = all_bands % group_bands;
    group = Divisor::make(group_bands * num_chunks);
    full_height = Divisor::make(group_bands);
    last_height = Divisor::make(past > 0 ? past : group_bands);
  }

  struct Piece {
    int band;  // counted through all matrices
    int chunk;
  };

  // Its flag, and its id in a timeline.
  PK_HOST_DEVICE int number(const Piece& piece) const {
    return piece.band * num_chunks + piece.chunk;
  }

  // The bands that rows [first, end) of matrix `o` are in: of the first of them, and past the last.
  PK_HOST_DEVICE int first_band(int o, int first) const {
    return o * static_cast<int>(bands.by) + (first >> band_shift);
  }
  PK_HOST_DEVICE int end_band(int o, int end) const { return first_band(o, end - 1) + 1; }

  // The matrix that it is of.
  PK_HOST_DEVICE int matrix(const Piece& piece) const {
    return outer == 1 ? 0 : bands.quotient(piece.band);
  }

  // Its bytes, with the rows of all matrices counted through.
  PK_HOST_DEVICE RowTile tile(const Piece& piece) const {
    const int o = matrix(piece);
    const int row = (piece.band - o * static_cast<int>(bands.by)) << band_shift;
    const uint32_t col = static_cast<uint32_t>(piece.chunk) * chunk_bytes;
    return {o * rows + row, col, least(rows - row, 1u << band_shift),
            least(row_bytes - col, chunk_bytes)};
  }

  // The same row in the result, [outer, ranks, rows].
  PK_HOST_DEVICE int64_t row_of_result(const Piece& piece, int64_t row) const {
    return row + (int64_t{matrix(piece)} * (num_ranks - 1) + rank) * rows;
  }

  // Move `i` of a piece.
  PK_HOST_DEVICE RowTile move(const Piece& piece, int i) const {
    const RowTile all = tile(piece);
    const uint32_t row = static_cast<uint32_t>(i >> move_cols_shift) << move_rows_shift;
    const uint32_t col = (i & ((1 << move_cols_shift) - 1)) * move_cols;
    return joined({all.row + row, all.col + col,
                   row < all.num_rows ? least(all.num_rows - row, 1u << move_rows_shift) : 0,
                   col < all.num_cols ? least(all.num_cols - col, move_cols) : 0});
  }

  // Whole rows, which follow each other in memory, as one.
  PK_HOST_DEVICE RowTile joined(const RowTile& tile) const {
    if (tile.num_cols != row_bytes) return tile;
    return {tile.row, 0, 1, tile.bytes()};
  }

  PK_HOST_DEVICE int num_sent() const { return num_pieces * (num_ranks - 1); }

  // What is sent as the i-th: first all to the peer that uses it first, then to the next one, ...
  struct Sent {
    int to;
    Piece piece;
  };
  PK_HOST_DEVICE Sent sent(int i) const {
    const int turn = part.quotient(i);
    const int to = rank - 1 - turn;  // the rank before this one, the one before that, ...
    i -= turn * num_pieces;
    const int first = group.quotient(i) * group_bands;
    i -= first * num_chunks;
    const Divisor& height = first + group_bands <= all_bands ? full_height : last_height;
    const int chunk = height.quotient(i);
    const int band = first + i - chunk * static_cast<int>(height.by);
    return {to < 0 ? to + num_ranks : to, {band, chunk}};
  }

 private:
  PK_HOST_DEVICE static int64_t ceil_div(int64_t x, int64_t by) { return (x - 1) / by + 1; }
  PK_HOST_DEVICE static uint32_t round_up(int64_t x, int64_t to) {
    return static_cast<uint32_t>(ceil_div(x, to) * to);
  }
  PK_HOST_DEVICE static uint32_t least(uint32_t left, uint32_t most) {
    return left < most ? left : most;
  }
};

}  // namespace pk

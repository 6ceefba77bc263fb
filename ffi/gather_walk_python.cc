#include "ffi/gather_walk_python.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <tuple>
#include <vector>

#include "schedule/gather_pieces.h"
#include "schedule/gather_walk.h"
#include "tile/comm_view.h"

namespace nb = nanobind;

namespace pk {
namespace {

// (first row, end, column of tiles, whether the rows are its own) of each tile of each block of
// `rank`, in its order; and the pieces (source, piece) that it waits for before each chunk of k.
using GatheredTile = std::tuple<int, int, int, bool, std::vector<std::vector<std::array<int, 2>>>>;
std::vector<std::vector<GatheredTile>> gathered_tiles(const GatherWalk& walk,
                                                      const GatherPieces& pieces) {
  std::vector<std::vector<GatheredTile>> out(walk.tiles.num_blocks);
  for (int block = 0; block < walk.tiles.num_blocks; ++block) {
    GatherWalk::Parts parts(walk, block);
    for (auto part = parts.next(); part.num_steps > 0; part = parts.next()) {
      std::vector<std::vector<std::array<int, 2>>> waited;
      for (int chunk = 0; !part.own && chunk < pieces.num_chunks; ++chunk) {
        waited.emplace_back();
        walk.for_each_source(part, [&](int source, int o, int first, int end) {
          const int end_band = pieces.end_band(o, end);
          for (int band = pieces.first_band(o, first); band < end_band; ++band)
            waited.back().push_back({source, pieces.number({band, chunk})});
        });
      }
      const int end = std::min(part.row(walk.tile_rows) + walk.tile_rows, part.end_row());
      out[block].push_back({part.row(walk.tile_rows), end, part.n, part.own, waited});
    }
  }
  return out;
}

// (row, first byte, rows, bytes of each) with the rows of all matrices counted through.
using Rectangle = std::array<int64_t, 4>;
Rectangle rectangle(const RowTile& tile) {
  return {tile.row, tile.col, tile.num_rows, tile.num_cols};
}

// Of each piece that a rank sends, in order: to whom, its number, what it is, and its moves if
// asked for.
using SentPiece = std::tuple<int, int, Rectangle, std::vector<Rectangle>>;
std::vector<SentPiece> sent_pieces(const GatherPieces& pieces, bool with_moves) {
  std::vector<SentPiece> out;
  for (int i = 0; i < pieces.num_sent(); ++i) {
    const auto [to, piece] = pieces.sent(i);
    std::vector<Rectangle> moves;
    for (int j = 0; with_moves && j < 1 << pieces.moves_shift; ++j)
      moves.push_back(rectangle(pieces.move(piece, j)));
    out.push_back({to, pieces.number(piece), rectangle(pieces.tile(piece)), moves});
  }
  return out;
}

}  // namespace

void bind_gather_walk(nb::module_& m) {
  m.def(
      "gather_walk",
      [](int part_rows, int row_bytes, int rank, int num_ranks, int num_n, int num_blocks,
         int tile_rows, int band_rows, bool small_pieces, int outer, bool moves) {
        const MatmulWalk tiles{0, num_n, 1, num_blocks, 0, 1, band_rows};
        const auto walk = GatherWalk::make(tiles, outer, part_rows, rank, num_ranks, tile_rows);
        auto pieces = GatherPieces::make(outer, part_rows, row_bytes, rank, num_ranks, small_pieces,
                                         tile_flags(num_ranks));
        pieces.set_groups(walk.tiles.band_rows * tile_rows);
        return std::tuple(gathered_tiles(walk, pieces), sent_pieces(pieces, moves),
                          pieces.chunk_bytes);
      },
      nb::arg("part_rows"), nb::arg("row_bytes"), nb::arg("rank"), nb::arg("num_ranks"),
      nb::arg("num_n"), nb::arg("num_blocks"), nb::arg("tile_rows") = 128,
      nb::arg("band_rows") = 16, nb::arg("small_pieces") = false, nb::arg("outer") = 1,
      nb::arg("moves") = false,
      "A rank's share of all_gather_matmul: (first row, end, column, own, pieces waited for before "
      "each chunk) of each block's tiles; (to, piece, its rows and bytes, those of its moves) of "
      "what is sent, in order; bytes of a chunk.");
}

}  // namespace pk

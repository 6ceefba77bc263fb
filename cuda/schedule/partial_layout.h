// How a rank's partial tile lies in the scratch of the rank that adds it up, and when tiles leave.
// Host and device.
//
// Nobody reads it but the threads that hold the same elements of the owner's own partial, so it
// lies as they hold it: a warp's 16 rows by 16 columns are a chunk of 512 bytes, 16 for each lane.
// The chunks follow each other as they are read. A piece is what a stage of the pipeline takes of
// all peers' tiles, and one bulk copy a peer:
//
//   piece 0                                    piece 1
//   warp 0: chunks 0, 1 | warp 1: 0, 1 | ...   warp 0: chunks 2, 3 | warp 1: 2, 3 | ...
#pragma once

#include <cstdint>

#include "tile/host_device.h"

namespace pk {

struct PartialLayout {
  static constexpr int kWarps = 8, kCols = 256, kChunkCols = 16;
  static constexpr int kChunks = kCols / kChunkCols;
  static constexpr int kChunkBytes = 512;
  static constexpr int64_t kTileBytes = int64_t{kWarps} * kChunks * kChunkBytes;
  // Of a stage: the part of it that is in one piece.
  static constexpr int kStageBytes = 32 << 10;
  static constexpr int kMostRanks = 1 + kStageBytes / (kWarps * kChunkBytes);

  int chunks_log2;  // of a warp in a piece: 1, 2 or 4 chunks
  // A tile leaves under the products of the next one. One for a peer goes a panel every
  // `push_steps` steps from the first on, so that the link is loaded evenly. To an own one a piece
  // is added every `add_steps` steps up to the last, so that the peers' have the time to come;
  // between two of them is a step whose operands take the stage that the piece has left.
  int push_steps, add_steps;  // powers of two

  PK_HOST_DEVICE static PartialLayout make(int num_ranks, int num_steps) {
    const int peers = num_ranks - 1, quarter = num_steps / 4;
    PartialLayout layout{peers <= 2 ? 2 : peers <= 4 ? 1 : 0, 1, 1};
    layout.push_steps = quarter < 2 ? 1 : quarter < 4 ? 2 : 4;
    layout.add_steps = num_steps >= 2 * layout.num_pieces() ? 2 : 1;
    return layout;
  }

  PK_HOST_DEVICE int chunks() const { return 1 << chunks_log2; }
  PK_HOST_DEVICE int num_pieces() const { return kChunks >> chunks_log2; }
  PK_HOST_DEVICE int piece_bytes() const { return (kWarps * kChunkBytes) << chunks_log2; }
  PK_HOST_DEVICE int offset(int warp, int chunk) const {
    const int piece = chunk >> chunks_log2;
    return (((piece * kWarps + warp - piece) << chunks_log2) + chunk) * kChunkBytes;
  }

  // Whether a panel is sent at a step; whether a piece is added, with `left` of them to be added
  // and `ahead` steps to come.
  PK_HOST_DEVICE bool sends(int step) const { return (step & (push_steps - 1)) == 0; }
  PK_HOST_DEVICE bool adds(int left, int ahead) const {
    return ahead < left * add_steps && (ahead & (add_steps - 1)) == 0;
  }
};

}  // namespace pk

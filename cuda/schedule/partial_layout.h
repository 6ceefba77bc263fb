// How a rank's partial tile lies in the scratch of the rank that adds it up, and when tiles leave.
// Host and device.
//
// Nobody reads it but the threads that hold the same elements of the owner's own partial, so it
// lies as they hold it: a warp's 16 rows by 16 columns are a chunk of 512 bytes, 16 for each lane.
// A warp's chunks follow each other, and the warps.
#pragma once

#include <cstdint>

#include "tile/host_device.h"

namespace pk {

struct PartialLayout {
  static constexpr int kWarps = 8, kCols = 256, kChunkCols = 16;
  static constexpr int kChunks = kCols / kChunkCols;
  static constexpr int kChunkBytes = 512;
  static constexpr int64_t kTileBytes = int64_t{kWarps} * kChunks * kChunkBytes;
  // A tile leaves under the products of the next one. One for a peer goes a panel every
  // `push_steps` steps from the first on, so that the link is loaded evenly. Of an own one a chunk
  // is added up every `add_steps` steps up to the last, so that the peers' have the time to come.
  int push_steps, add_steps;  // powers of two

  PK_HOST_DEVICE static PartialLayout make(int num_steps) {
    const int quarter = num_steps / 4;
    return {quarter < 2 ? 1 : quarter < 4 ? 2 : 4, num_steps >= 2 * kChunks ? 2 : 1};
  }

  PK_HOST_DEVICE static int offset(int warp, int chunk) {
    return (warp * kChunks + chunk) * kChunkBytes;
  }

  // Whether a panel is sent at a step; whether a chunk is added, with `left` of them to be added
  // and `ahead` steps to come.
  PK_HOST_DEVICE bool sends(int step) const { return (step & (push_steps - 1)) == 0; }
  PK_HOST_DEVICE bool adds(int left, int ahead) const {
    return ahead < left * add_steps && (ahead & (add_steps - 1)) == 0;
  }
};

}  // namespace pk

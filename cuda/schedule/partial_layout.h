// How a rank's partial tile lies in the scratch of the rank that adds it up. Host and device.
//
// Nobody reads it but the threads that hold the same elements of the owner's own partial, so it
// lies as they hold it: a warp's 16 rows by 16 columns are a chunk of 512 bytes, 16 for each lane.
// The chunks of a warp follow each other, those of a panel with them: one bulk copy.
#pragma once

#include <cstdint>

#include "tile/host_device.h"

namespace pk {

struct PartialLayout {
  static constexpr int kWarps = 8, kCols = 256, kChunkCols = 16;
  static constexpr int kChunks = kCols / kChunkCols;
  static constexpr int kChunkBytes = 512;
  static constexpr int64_t kTileBytes = int64_t{kWarps} * kChunks * kChunkBytes;

  // A tile leaves under the `num_steps` steps of the next one, a panel each so many of them:
  // evenly, so that the link is loaded so, and before the last one.
  static constexpr int kPanels = 4;
  PK_HOST_DEVICE static int panel_steps(int num_steps) {
    return num_steps < kPanels + 1 ? 1 : (num_steps - 2) / (kPanels - 1);
  }

  // Whether it has left then, even so.
  PK_HOST_DEVICE static bool leaves_early(int num_steps) { return num_steps > kPanels; }

  PK_HOST_DEVICE static int offset(int warp, int chunk) {
    return (warp * kChunks + chunk) * kChunkBytes;
  }
};

}  // namespace pk

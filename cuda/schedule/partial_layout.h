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

  PK_HOST_DEVICE static int offset(int warp, int chunk) {
    return (warp * kChunks + chunk) * kChunkBytes;
  }
};

}  // namespace pk

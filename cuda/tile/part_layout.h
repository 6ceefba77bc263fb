// Where the rows of one rank's part lie in a tensor that holds a part of every rank.
//
//   packed    [rows, inner]              one part alone: what is gathered, what is left of a sum
//   inside    [rows, ranks, inner]       parts side by side: concatenated along the dimension that
//                                        follows the rows
//   outside   [bands, ranks, rows, inner]  a part's rows in bands, one band of each rank after the
//                                        other
//
// A collective along any dimension of any array is a move between two of these, so that no kernel
// knows of dimensions, and none transposes. Host and device.
#pragma once

#include <cstdint>

#include "tile/host_device.h"

namespace pk {

struct PartLayout {
  int64_t rank_pitch;     // bytes from one rank's part to the next rank's
  int64_t row_pitch;      // bytes from one row of a part to the next in its band
  int64_t rows_per_band;  // every row, if there is one band or the bands follow on evenly
  int64_t band_pitch;     // bytes from one band of a part to the next

  static constexpr int64_t kOneBand = INT64_MAX;

  PK_HOST_DEVICE static PartLayout packed(int64_t inner) { return {0, inner, kOneBand, 0}; }
  PK_HOST_DEVICE static PartLayout inside(int num_ranks, int64_t inner) {
    return {inner, num_ranks * inner, kOneBand, 0};
  }
  PK_HOST_DEVICE static PartLayout outside(int num_ranks, int64_t rows_per_band, int64_t inner) {
    return {rows_per_band * inner, inner, rows_per_band, num_ranks * rows_per_band * inner};
  }

  // Byte offset of a row of rank's part. Rows of all bands are counted through.
  PK_HOST_DEVICE int64_t at(int rank, int64_t row) const {
    const int64_t part = rank * rank_pitch;
    if (row < rows_per_band) return part + row * row_pitch;
    // The 64-bit division is a long routine; rows past 2^32 are rare.
    const uint64_t band = static_cast<uint64_t>(row) >> 32 == 0
                              ? static_cast<uint32_t>(row) / static_cast<uint32_t>(rows_per_band)
                              : static_cast<uint64_t>(row) / static_cast<uint64_t>(rows_per_band);
    return part + static_cast<int64_t>(band) * band_pitch +
           (row - static_cast<int64_t>(band) * rows_per_band) * row_pitch;
  }
};

// One part in this GPU's memory.
struct Part {
  const char* base;
  PartLayout layout;
  int rank;

  PK_HOST_DEVICE const char* at(int64_t row, int64_t col) const {
    return base + layout.at(rank, row) + col;
  }
};

}  // namespace pk

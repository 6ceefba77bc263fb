// Where the strips of a partial are: a strip is 8 rows by 64 columns of 16 bits, 8 bytes of a lane
// in each of four words (schedule/strip_sum.cuh). What goes to one owner is numbered down its rows,
// then on to the next columns; a strip with rows of several owners goes to each of them, and each
// has a number for it. Host and device.
#pragma once

#include <cstdint>

#include "tile/host_device.h"

namespace pk {

struct StripLayout {
  static constexpr int kRows = 8, kCols = 64;
  static constexpr int kBytes = kRows * kCols * 2;

  int rows;   // of the partial
  int share;  // of each rank, in rank order; or all rows, if every rank gets them

  PK_HOST_DEVICE static StripLayout make(int64_t rows, int num_ranks, bool all_reduce) {
    return {static_cast<int>(rows), static_cast<int>(all_reduce ? rows : rows / num_ranks)};
  }

  // That kCols columns of an owner's rows may touch. Shares that are no whole strips begin anywhere
  // in one.
  PK_HOST_DEVICE int strips_of_column() const {
    const bool whole = share == rows || share % kRows == 0;
    return (share + (whole ? kRows - 1 : 2 * kRows - 2)) / kRows;
  }
  // That a rank sends one owner.
  PK_HOST_DEVICE int64_t num_strips(int64_t cols) const {
    return (cols + kCols - 1) / kCols * strips_of_column();
  }
  // The owner's one that begins at `row` in the n-th kCols columns.
  PK_HOST_DEVICE int number(int owner, int row, int n) const {
    return n * strips_of_column() + row / kRows - first_row(owner) / kRows;
  }
  // The number of the owner's first one of some that begin at `row`.
  PK_HOST_DEVICE int first_number(int owner, int row, int n) const {
    const int first = first_row(owner);
    return number(owner, row > first ? row : first, n);
  }

  // The first of a rank's rows.
  PK_HOST_DEVICE int first_row(int rank) const { return share == rows ? 0 : rank * share; }
  // Whether a rank gets any of `count` rows.
  PK_HOST_DEVICE bool goes_to(int rank, int row, int count = 1) const {
    const int first = first_row(rank);
    return row < first + share && row + count > first;
  }

  // Of a lane: the place of its first word in a mailbox, in packets of 8 bytes of data; and of its
  // first two words in a scratch, in vectors of 16 bytes. The next are 32 places on.
  static constexpr int kPackets = kBytes / 8, kVectors = kBytes / 16;  // of a strip
  PK_HOST_DEVICE static constexpr int64_t packet(int strip, int lane) {
    return int64_t{strip} * kPackets + lane;
  }
  PK_HOST_DEVICE static constexpr int64_t vector(int strip, int lane) {
    return int64_t{strip} * kVectors + lane;
  }
};

}  // namespace pk

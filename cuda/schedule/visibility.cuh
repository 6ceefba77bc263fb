// Which keys a query sees: those near enough by position, and of its own segment. The same question
// is asked of tiles, to leave out what nobody sees, and of single scores, to mask them.
//
// Positions are those of the whole sequence. A rank of a ring has rows that begin anywhere, in one
// run or in two (zigzag): rows 0 .. run - 1 follow first[0], the others first[1].
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "schedule/attention_walk.h"
#include "tile/register_tile.cuh"

namespace pk {

// Positions from the first to the last, both of them in it.
struct Span {
  int first, last;

  __device__ __forceinline__ bool is_empty() const { return last < first; }
};

// The queries or the keys, of one matrix of the batch.
struct Rows {
  int count;
  int run;
  int first[2];
  const int* segments;  // null for one
  const int2* bounds;   // of each kBoundRows

  __device__ __forceinline__ int position(int row) const {
    return row < run ? first[0] + row : first[1] + (row - run);
  }

  // Positions of the rows of a tile that are in a run.
  __device__ __forceinline__ Span span(int row, int num_rows, int which) const {
    const int begin = which == 0 ? row : max(row, run);
    const int end = min(row + num_rows, which == 0 ? run : count);
    if (begin >= end) return {0, -1};
    const int first_position = position(begin);
    return {first_position, first_position + (end - 1 - begin)};
  }

  // Least and greatest segment of a tile's rows, which begin at a multiple of kBoundRows.
  __device__ __forceinline__ int2 segments_of(int row, int num_rows) const {
    int2 found{INT32_MAX, INT32_MIN};
#pragma unroll 1
    for (int i = row / kBoundRows; i * kBoundRows < min(row + num_rows, count); ++i) {
      const int2 each = __ldg(bounds + i);
      found = {min(found.x, each.x), max(found.y, each.y)};
    }
    return found;
  }
};

// Of all the batch: what the host knows.
struct RowsOfBatch {
  int count;
  const int* starts;    // [batch, 2]; null if rows begin at 0
  const int* segments;  // [batch, count]
  const int2* bounds;   // [batch, ceil(count / kBoundRows)]

  __device__ __forceinline__ Rows of(int batch) const {
    const int run = starts == nullptr ? count : count / 2;  // one run is quicker to look at
    Rows rows{count, run, {0, run}, nullptr, nullptr};
    if (starts != nullptr) {
      rows.first[0] = __ldg(starts + 2 * batch);
      rows.first[1] = __ldg(starts + 2 * batch + 1);
    }
    if (segments != nullptr) {
      rows.segments = segments + int64_t{batch} * count;
      rows.bounds = bounds + int64_t{batch} * ((count + kBoundRows - 1) / kBoundRows);
    }
    return rows;
  }
};

enum class Seen { kNone, kSome, kAll };

// What rows see of columns: queries of keys, or the other way round. A row at p sees columns at
// p - before .. p + after.
struct Visibility {
  Rows rows, cols;
  int before, after;  // kUnlimited for no end

  static constexpr int kUnlimited = INT32_MAX;

  // The first and the last position seen from p.
  __device__ __forceinline__ int first_seen(int p) const {
    return before == kUnlimited ? INT32_MIN : p - before;
  }
  __device__ __forceinline__ int last_seen(int p) const {
    return after >= kUnlimited - p ? INT32_MAX : p + after;
  }

  // Of a tile of scores with whole tiles' rows and columns: begins at multiples of kBoundRows. The
  // loader asks, which has few registers: nothing is kept from one pair of runs to the next.
  __device__ __forceinline__ Seen of_tile(int row, int num_rows, int col, int num_cols) const {
    bool any = false, all = row + num_rows <= rows.count && col + num_cols <= cols.count;
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {  // the runs that have a part in it
      ptx::forget();
      const Span r = rows.span(row, num_rows, i / 2), c = cols.span(col, num_cols, i % 2);
      if (r.is_empty() || c.is_empty()) continue;
      any |= first_seen(r.first) <= c.last && c.first <= last_seen(r.last);
      all &= first_seen(r.last) <= c.first && c.last <= last_seen(r.first);
    }
    if (any && rows.segments != nullptr) {
      const int2 a = rows.segments_of(row, num_rows), b = cols.segments_of(col, num_cols);
      any = a.x <= b.y && b.x <= a.y;
      all &= a.x == a.y && b.x == b.y && a.x == b.x;
    }
    return !any ? Seen::kNone : all ? Seen::kAll : Seen::kSome;
  }

  // One warp: the first tile of columns, from `begin` on, that a tile of rows sees something of, or
  // the one at the end; and what it sees of it.
  struct Found {
    int col;
    Seen seen;
  };
  __device__ __forceinline__ Found next(int row, int num_rows, int begin, int num_cols) const {
    for (; begin < cols.count; begin += 32 * num_cols) {
      const int col = begin + threadIdx.x % 32 * num_cols;
      const Seen seen = of_tile(row, num_rows, col, num_cols);
      const uint32_t found = __ballot_sync(0xFFFFFFFF, seen != Seen::kNone);
      if (found == 0) continue;
      const int lane = __ffs(found) - 1;
      return {begin + lane * num_cols,
              static_cast<Seen>(__shfl_sync(0xFFFFFFFF, static_cast<int>(seen), lane))};
    }
    return {cols.count, Seen::kNone};
  }

  // One warp: the last tile of rows before `end` that sees something of a tile of columns, or one
  // below zero.
  __device__ __forceinline__ int previous_row(int end, int num_rows, int col, int num_cols) const {
    for (; end > 0; end -= 32 * num_rows) {
      const int row = end - static_cast<int>(1 + static_cast<int>(ptx::lane_id())) * num_rows;
      const bool sees = row >= 0 && of_tile(row, num_rows, col, num_cols) != Seen::kNone;
      const uint32_t found = __ballot_sync(0xFFFFFFFF, sees);
      if (found != 0) return end - __ffs(found) * num_rows;
    }
    return -1;
  }

  // Gives `hidden` to the scores of an accumulator at (row, col) that are not seen.
  template <int kCols>
  __device__ __forceinline__ void mask(Accumulator<kCols>& scores, int row, int col,
                                       float hidden) const {
    static_assert(kCols / 4 <= 32);
    row += Accumulator<kCols>::row();
    col += Accumulator<kCols>::col();
    const uint32_t seen[2] = {seen_of(row, col, kCols), seen_of(row + 8, col, kCols)};
#pragma unroll
    for (int i = 0; i < kCols / 2; ++i)
      if ((seen[i / 2 % 2] >> (i / 4 * 2 + i % 2) & 1) == 0) scores.value[i] = hidden;
  }

 private:
  // Of a row's columns col, col + 1, col + 8, col + 9 and so on: a bit for each that it sees.
  __device__ __forceinline__ uint32_t seen_of(int row, int col, int num_cols) const {
    if (row >= rows.count) return 0;
    const int p = rows.position(row);
    // Those of either run that lie between two ends.
    uint32_t seen = near(int64_t{p} - cols.first[0], col, 0, min(cols.run, cols.count)) |
                    near(int64_t{p} - cols.first[1] + cols.run, col, cols.run, cols.count);
    if (rows.segments == nullptr) return seen;
    const int segment = __ldg(rows.segments + row);
    // Not unrolled: what is loaded would fill the registers that scores leave.
#pragma unroll 1
    for (int i = 0; i < num_cols / 4; ++i) {
      const int c = col + i / 2 * 8 + i % 2;
      if (c < cols.count && __ldg(cols.segments + c) != segment) seen &= ~(1u << i);
    }
    return seen;
  }

  // Of columns begin .. end - 1, in which `center` has the row's position.
  __device__ __forceinline__ uint32_t near(int64_t center, int col, int begin, int end) const {
    const int64_t first = before == kUnlimited ? begin : max(center - before, int64_t{begin});
    const int64_t last = after == kUnlimited ? end : min(center + after + 1, int64_t{end});
    return bits_before(last - col) & ~bits_before(first - col);
  }

  // For each of columns 0, 1, 8, 9 and so on whether it lies before x.
  static __device__ __forceinline__ uint32_t bits_before(int64_t x) {
    const int left = static_cast<int>(min(max(x, int64_t{0}), int64_t{128}));
    const int count = left / 8 * 2 + min(left % 8, 2);
    return count >= 32 ? ~0u : (1u << count) - 1;
  }
};

}  // namespace pk

// A tile on its way: out of one part, into the same place in the tensors of `count` ranks from
// `first_rank` on. What a schedule hands to a mechanism.
#pragma once

#include "tile/part_layout.h"
#include "tile/row_tiles.h"

namespace pk {

struct Move {
  Part source;
  RowTile tile;
  int first_rank;
  int count;
};

}  // namespace pk

// Which block makes which tiles of a product whose rows are scattered over the ranks, and in which
// order. Host and device.
//
// Each rank owns a part of the rows, which is cut into tiles by itself, and every rank makes the
// partial tiles of all owners. Of several matrices, one after the other, it owns a part of each.
// They are numbered through, owner by owner, and dealt to the blocks in turn, on every rank the
// same: what block b adds up, the blocks b of the peers send.
//
// A block goes in rounds: one tile for each peer, beginning with the next rank, so that no two
// ranks load the link to a third one first; and `lead` rounds later an own tile, when those of the
// peers that it lacks have had time to come. Blocks are out of step, so that at all times the same
// share of them sends.
//
//   two ranks, lead 1    block 0   peer 0 | own 0  | peer 1 | own 1  | peer 2 | own 2
//                        block 1   peer 0 | peer 1 | own 0  | peer 2 | own 1  | own 2
//
// Progress: only own tiles wait, the c-th of a block for the c-th that each peer's block makes for
// this rank. A block that has not made that one stands before it, with an own tile that comes, by
// its order, after all its tiles of rounds up to that own tile's: so the own tile's number is less
// than c. What such a block waits for is a number less again; the last of them waits for nobody. So
// blocks of equal number need only be resident together on all ranks, a few of them or many.
#pragma once

#include <cstdint>

#include "schedule/matmul_walk.h"
#include "tile/host_device.h"

namespace pk {

struct ScatterWalk {
  static constexpr int kMostRanks = 16;

  MatmulWalk tiles;  // of the rows of one owner; whole ones alone
  int num_ranks, rank;
  int rows;               // of an owner, in all matrices
  int stretch;            // rows of an owner in each; whole tiles, if there are several
  int stretch_tiles;      // as tiles
  int lead;               // at least 1
  int slots;              // of a block: tiles for peers in all rounds, with those that some lack
  int start[kMostRanks];  // the block that makes an owner's first tile

  static ScatterWalk make(MatmulWalk tiles, int num_ranks, int rank, int rows, int lead,
                          int outer = 1) {
    const int blocks = tiles.num_blocks;
    ScatterWalk walk{tiles, num_ranks, rank, rows, rows / outer, tiles.num_m / outer, lead, 0, {}};
    walk.slots = ((tiles.num_tiles() - 1) / blocks + 1) * (num_ranks - 1);
    for (int owner = 0; owner < num_ranks; ++owner)
      walk.start[owner] = owner * (tiles.num_tiles() % blocks) % blocks;
    return walk;
  }

  struct Part {
    int m, n;   // the tile, among its owner's
    int begin;  // as in MatmulWalk
    int num_steps;
    int owner;
    int tile;       // its number among the owner's
    int first_row;  // less the owner's rows before its matrix

    // Of the whole product.
    PK_HOST_DEVICE int row(int tile_rows) const { return first_row + m * tile_rows; }
    PK_HOST_DEVICE int group() const { return 0; }
  };

  // The first tile of an owner that a block makes, if the owner has as many.
  PK_HOST_DEVICE int first_tile(int owner, int block) const {
    const int first = block - start[owner];
    return first < 0 ? first + tiles.num_blocks : first;
  }

  PK_HOST_DEVICE bool has_tiles(int owner, int block) const {
    return first_tile(owner, block) < tiles.num_tiles();
  }

  // Tiles of an owner that a block makes.
  PK_HOST_DEVICE int count(int owner, int block) const {
    const int left = tiles.num_tiles() - first_tile(owner, block);
    return left > 0 ? (left - 1) / tiles.num_blocks + 1 : 0;
  }

  // A block's way through its parts.
  class Parts {
   public:
    PK_HOST_DEVICE Parts(const ScatterWalk& walk, int block)
        : walk_(walk),
          block_(block),
          own_(walk.first_tile(walk.rank, block)),
          due_(walk.lead * (walk.num_ranks - 1) + block % walk.num_ranks) {}

    // The next part; one without steps if there is none.
    PK_HOST_DEVICE Part next() {
      const int peers = walk_.num_ranks - 1, blocks = walk_.tiles.num_blocks;
      while (true) {
        const bool all_sent = sent_ == walk_.slots;
        if (own_ < walk_.tiles.num_tiles() && (sent_ >= due_ || all_sent)) {
          own_ += blocks;
          due_ += peers;
          return walk_.part(walk_.rank, own_ - blocks);
        }
        if (all_sent) return {};
        const int round = sent_ / peers;
        int owner = walk_.rank + 1 + sent_ - round * peers;
        if (owner >= walk_.num_ranks) owner -= walk_.num_ranks;
        ++sent_;
        // Some owners have a tile less than others.
        const int tile = walk_.first_tile(owner, block_) + round * blocks;
        if (tile < walk_.tiles.num_tiles()) return walk_.part(owner, tile);
      }
    }

   private:
    const ScatterWalk& walk_;
    int block_;
    int own_;       // the next own tile
    int due_;       // slots before it
    int sent_ = 0;  // slots that are past
  };

 private:
  PK_HOST_DEVICE Part part(int owner, int tile) const {
    const MatmulWalk::Part at = tiles.whole(tile);
    // In front of it are the rows of all ranks in the matrices before, its owner's among them.
    const int first_row = (at.m / stretch_tiles * (num_ranks - 1) + owner) * stretch;
    return {at.m, at.n, at.begin, at.num_steps, owner, tile, first_row};
  }
};

}  // namespace pk

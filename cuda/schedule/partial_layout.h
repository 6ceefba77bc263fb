// How a rank's partial tile lies in the scratch of the rank that adds it up, and when tiles leave.
// Host and device.
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

  // A tile leaves under the `num_steps` steps of the next one, a panel each so many of them, and
  // before the last one. With a lead of one round the peer may add it up when that tile is done: it
  // leaves in the first half, if there are steps enough, to have come by then. With more, where the
  // link is what takes long, it leaves evenly, so that the link is loaded so. Not in the first
  // step, when no other one is in flight, and consumer 1 half way between the panels of consumer 0:
  // a step in which both write one takes twice its time.
  static constexpr int kPanels = 4;
  PK_HOST_DEVICE static constexpr int panel_steps(int num_steps, int lead) {
    const int even = (num_steps - 3) * 2 / (2 * kPanels - 1);
    if (even < 2) return 1;  // both consumers in the same steps: there are no others
    return lead > 1 ? even : even / 2 > 2 ? even / 2 : 2;
  }
  PK_HOST_DEVICE static constexpr int send_step(int panel, int panel_steps, int consumer) {
    return 1 + consumer * panel_steps / 2 + panel * panel_steps;
  }
  // Whether it has left then, even so.
  PK_HOST_DEVICE static constexpr bool leaves_early(int num_steps) {
    return num_steps >= kPanels + 2;
  }

  PK_HOST_DEVICE static int offset(int warp, int chunk) {
    return (warp * kChunks + chunk) * kChunkBytes;
  }
};

// Else a peer's part would be fetched into registers whose panels have not left.
constexpr bool leaves_before_the_last_step() {
  using Layout = PartialLayout;
  for (int steps = 1; steps <= 1024; ++steps) {
    for (int lead = 1; lead <= 2; ++lead) {
      const int last = Layout::send_step(Layout::kPanels - 1, Layout::panel_steps(steps, lead), 1);
      if (Layout::leaves_early(steps) && last > steps - 2) return false;
    }
  }
  return true;
}
static_assert(leaves_before_the_last_step());
static_assert(PartialLayout::panel_steps(64, 1) < PartialLayout::panel_steps(64, 2));

}  // namespace pk

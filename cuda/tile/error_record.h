// The device's last words: written once, by the first wait that ran out of time, then the kernel
// traps.
//
// The record lives in pinned host memory, because nothing on the device can be read after a trap.
#pragma once

#include <cstdint>

namespace pk {

enum class Op : uint32_t {
  kNone = 0,
  kAllGather = 1,
  kAllToAll = 2,
  kPpermute = 3,
  kRaggedAllToAll = 4,
  kPsum = 5,
  kPsumScatter = 6,
  kAllGatherMatmul = 7,
  kMatmulReduceScatter = 8,
  kMatmulAllReduce = 9,
  // From here on: ops of other libraries, numbered as they are loaded.
  kCustom = 1024,
};

// What a wait was for; the host turns it into words (runtime/error_log.cc).
enum class Slot : uint32_t {
  kInvitation = 0,  // the peer says where its result is: it has reached the op
  kData = 1,        // a data word of the peer in the mailbox
  kLeave = 2,       // the peer is done with this rank's buffers
  kLanded = 3,      // a chunk of the peer in the landing buffer
  kTaken = 4,       // the peer has emptied its landing buffer
  kStaged = 5,      // tiles of the peer in this rank's scratch
  kTileFlag = 6,    // a piece of the peer's data in its place here (tile_flags.cuh)
  // Not waits, but what a kernel refuses to go on with.
  kGrid = 7,       // the peer runs another number of blocks (seen) than this rank (expected)
  kSourceRow = 8,  // a slice for the peer ends at a row (seen) past the operand's (expected)
  kTargetRow = 9,  // the same in the peer's output
};

struct ErrorRecord {
  uint32_t claimed;  // 0, then 1 by the thread that may write the rest
  uint32_t ready;    // 1 when the rest is there
  Op op;
  Slot slot;
  int32_t rank;
  int32_t num_ranks;
  int32_t peer;
  int32_t channel;
  uint32_t expected;
  uint32_t seen;
  uint64_t waited_ns;
};

}  // namespace pk

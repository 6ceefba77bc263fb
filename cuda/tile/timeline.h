// What the warps of a kernel did, and when: as the device leaves it in memory and the host reads
// it. See timeline.cuh.
#pragma once

#include <cstdint>

#ifdef PK_JAX_TIMELINE
#include <vector>
#endif

namespace pk::timeline {

// What a warp did since its last event.
enum class Did : uint8_t {
  kNothing,       // there is no event
  kEnter,         // the peers' invitations, given and waited for
  kWaitOperands,  // consumer: the first step's of a tile
  kMultiply,      // consumer: the steps of a tile, or those up to an addition
  kEpilogue,      // consumer: the sum on its way out of the accumulators
  kLoad,          // mover: operands of a tile, and room for them
  kWaitRows,      // mover: for its watcher, before a chunk of a tile's rows
  kWaitFlags,     // watcher: for what peers send for a tile, ahead of who uses it
  kPush,          // pusher: a piece, to `peer`; it is told
  kCopyOwn,       // pusher: this rank's rows, within the GPU
  kSend,          // storer: a tile, to `peer`; it is told
  kStore,         // storer: a tile of this rank
  kWaitParts,     // consumer: for the peers' parts of an own tile
  kAdd,           // consumer: those parts to the sum
};
inline constexpr const char* kNames[] = {
    "nothing", "enter",         "wait for operands", "multiply", "epilogue",
    "load",    "wait for rows", "wait for flags",    "push",     "copy own",
    "send",    "store",         "wait for parts",    "add"};
static_assert(sizeof(kNames) / sizeof(kNames[0]) == static_cast<int>(Did::kAdd) + 1);

inline constexpr uint8_t kNobody = 255;
inline constexpr uint32_t kNoId = UINT32_MAX;

struct alignas(16) Event {
  uint32_t ns;     // since the block began
  uint32_t id;     // of a tile: tile(), or, with a peer, which one of the block; of a piece
  uint32_t bytes;  // that crossed the link in this time
  Did did;
  uint8_t warp;  // of the block
  uint8_t peer;  // or kNobody
  uint8_t unused;
};

// Of one thread block, in the order of their ends for each warp. Later ones are dropped, and
// counted.
inline constexpr int kMostEvents = 4094;
struct Block {
  uint32_t sm, block, grid;
  uint32_t dropped;
  uint64_t began;  // globaltimer
  uint64_t unused;
  Event events[kMostEvents];
};

// Of a device: a place for each block that began. Blocks beyond are dropped, and counted by
// `begun`.
inline constexpr int kMostBlocks = 1024;
struct alignas(128) Buffer {
  uint32_t begun;
  alignas(128) Block blocks[kMostBlocks];
};

#ifndef PK_JAX_TIMELINE
inline constexpr bool kRecorded = false;
#else
inline constexpr bool kRecorded = true;

// Without a device linker each file of kernels has a pointer to the buffer of its own: the
// addresses of all of them, for the host to set.
inline std::vector<const void*>& pointers() {
  static std::vector<const void*> all;
  return all;
}
#endif

}  // namespace pk::timeline

// What a kernel knows of its communicator: plain data, passed by value, shared by host and device.
//
// Each rank owns one symmetric region, mapped by all ranks: a SignalPage at offset 0 and the
// mailboxes behind it. The addresses in a CommView never change during the life of a communicator
// (regions grow in place), so a view may be baked into a captured CUDA graph. Everything that
// changes from call to call lives in device memory, in the page.
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstdint>

#include "tile/host_device.h"

namespace pk {

// Room for the largest NVLink domain there is (72 GPUs).
inline constexpr int kMaxRanks = 72;

// Call sites that may be in flight at the same time on one communicator without sharing a slot.
inline constexpr int kNumChannels = 16;

// Bytes that one rank may send to another by the low-latency protocol: as many as keep the
// mailboxes of a channel at 4 MiB up to 8 ranks, and a useful number beyond.
PK_HOST_DEVICE inline constexpr size_t low_latency_bytes(int num_ranks) {
  const size_t share = (1 << 20) / num_ranks / 128 * 128, least = 128 << 10;
  return share > least ? share : least;
}

// The copy-engine path cuts a part into about kChunks chunks within these sizes and moves them
// through a ring of slots in the receiver's landing buffer.
inline constexpr int kChunks = 16;
inline constexpr size_t kLeastChunkBytes = 1 << 20;
inline constexpr size_t kMostChunkBytes = 16 << 20;
inline constexpr int kLandingSlots = 4;

// The most blocks an op may have: each has an epoch word of its own.
inline constexpr int kMaxBlocks = 512;

// Words of flags that the peers of a rank share in it, for each channel (schedule/tile_flags.cuh).
inline constexpr int kTileFlags = 16384;

// Flags that one rank may raise in another: 8192 between two, 2048 among eight.
PK_HOST_DEVICE inline constexpr int tile_flags(int num_ranks) { return kTileFlags / num_ranks; }

// The most buffers that an invitation names (schedule/rendezvous.cuh).
inline constexpr int kPublished = 2;

// The counters of one call site. What other ranks see only grows; `begun`, `ended`, `work` and
// `emptied` count within a call or a chunk and go back to zero.
struct alignas(128) Channel {
  // [block]: calls finished, as this block will read it. A block reads its word when it begins and
  // writes it when it ends, so that blocks of one call need not agree on when the epoch advances;
  // block 0 also writes the words of blocks that the call did not have.
  uint32_t epoch[kMaxBlocks];
  // Blocks that have ended in the call under way, and, where they are told apart by their arrival
  // (schedule/inter_sm.cuh), that have begun; the last one puts it back to zero.
  alignas(128) uint32_t ended;
  uint32_t begun;
  // Copy-engine path. Rounds of the landing ring so far; a call takes whole ones.
  uint32_t rounds;
  // Pieces of work handed out in the call under way, where blocks or warps draw them.
  alignas(128) uint32_t work;
  // [peer]: where the peer's buffers are in this epoch, and with how many blocks it pushes, in
  // pairs of (epoch << 32 | half). See Invitation.
  alignas(128) ulonglong2 invitation[kMaxRanks][kPublished];
  // [peer]: blocks of the peer that have finished their writes to this rank, over all calls; and
  // how many that should be after the last call.
  alignas(128) uint32_t left[kMaxRanks];
  uint32_t left_before[kMaxRanks];
  // [peer][block]: tiles that this block of the peer has put into this rank's scratch, over all
  // calls; and how many each should be after the last call, which is the same for every peer.
  alignas(128) uint32_t staged[kMaxRanks][kMaxBlocks];
  alignas(128) uint32_t staged_before[kMaxBlocks];
  // [peer][flag], as many for each as tile_flags() says: the last epoch in which the peer has
  // raised the flag.
  alignas(128) uint32_t tile_flag[kTileFlags];
  // Copy-engine path. [peer][slot]: number of the last round of the ring in which the peer has put
  // a chunk into that slot of this rank's landing buffer.
  alignas(128) uint32_t landed[kMaxRanks][kLandingSlots];
  // [peer][slot]: rounds of the ring in which the peer has emptied that slot of ours in its landing
  // buffer; a call counts whole rounds.
  alignas(128) uint32_t taken[kMaxRanks][kLandingSlots];
  // [peer][slot]: parts that blocks of this rank have taken out of the slot's present chunk.
  alignas(128) uint32_t emptied[kMaxRanks][kLandingSlots];
};

struct SignalPage {
  Channel channels[kNumChannels];
  // [peer]: where the peer's XLA heap is mapped here; 0 when peers publish plain pointers (one
  // process).
  alignas(128) uint64_t heap_base[kMaxRanks];
  // [peer]: the token the peer left here when the communicator was checked.
  alignas(128) uint64_t check[kMaxRanks];
  alignas(128) uint32_t check_count[kMaxRanks];
};

inline constexpr size_t kSignalPageBytes = (sizeof(SignalPage) + 4095) / 4096 * 4096;

// A published address is an offset of this many bits; the rest of its word says something else
// (schedule/rendezvous.cuh).
inline constexpr int kOffsetBits = 48;

struct ErrorRecord;

struct CommView {
  int rank;
  int num_ranks;
  uint64_t timeout_ns;
  ErrorRecord* error;  // pinned host memory: readable after the device has trapped
  char* region[kMaxRanks];
};

// The place of `source` among the peers of `owner`: what has room for each peer needs none for the
// owner itself.
PK_HOST_DEVICE inline int peer_index(int source, int owner) {
  return source < owner ? source : source - 1;
}

// Offset, in a rank's region, of the mailbox half that `source` fills for `channel` in epochs of
// this parity.
PK_HOST_DEVICE inline size_t low_latency_offset(int channel, uint32_t parity, int source,
                                                int num_ranks) {
  const size_t slot = (static_cast<size_t>(channel) * 2 + parity) * num_ranks + source;
  // Every 4 bytes of data travel with 4 bytes of epoch.
  return kSignalPageBytes + slot * 2 * low_latency_bytes(num_ranks);
}

}  // namespace pk

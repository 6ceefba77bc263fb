// The first knob: how bytes move. Addresses (local, peer) are a separate matter.
#pragma once

namespace pk {

enum class Mechanism {
  kRegister,    // loads and stores by threads: any alignment, any size
  kTma,         // 1-D bulk copies through shared memory: 16-byte rows, few threads
  kCopyEngine,  // the DMA engines drive the link, a few SMs empty the landing buffer; large blocks
};

// NCCL's words. kSimple: data straight into its place, signals around it. kLowLatency ("ll"): data
// and epoch in one word through a mailbox, so that one trip over the link is the whole op; small
// messages.
enum class Protocol { kSimple, kLowLatency };

}  // namespace pk

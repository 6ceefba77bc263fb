#include "runtime/error_log.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdio>
#include <cstring>

#include "runtime/check.h"

namespace pk {
namespace {

struct Node {
  ErrorRecord* record;
  Node* next;
};
std::atomic<Node*> records{nullptr};  // only ever grows at the front

struct CustomName {
  Op op;
  std::string name;
  CustomName* next;
};
std::atomic<CustomName*> custom_names{nullptr};  // likewise

const char* name(Op op) {
  switch (op) {
    case Op::kAllGather:
      return "all_gather";
    case Op::kAllToAll:
      return "all_to_all";
    case Op::kPpermute:
      return "ppermute";
    case Op::kRaggedAllToAll:
      return "ragged_all_to_all";
    case Op::kPsum:
      return "psum";
    case Op::kPsumScatter:
      return "psum_scatter";
    case Op::kAllGatherMatmul:
      return "all_gather_matmul";
    case Op::kMatmulReduceScatter:
      return "matmul_reduce_scatter";
    case Op::kMatmulAllReduce:
      return "matmul_all_reduce";
    case Op::kNone:
    case Op::kCustom:
      break;
  }
  for (const CustomName* known = custom_names.load(std::memory_order_acquire); known;
       known = known->next) {
    if (known->op == op) return known->name.c_str();
  }
  return "unknown op";
}

const char* what(Slot slot) {
  switch (slot) {
    case Slot::kInvitation:
      return "to reach this op (invitation slot)";
    case Slot::kData:
      return "to send its data (mailbox slot)";
    case Slot::kLeave:
      return "to finish with this rank's buffers (leave slot)";
    case Slot::kLanded:
      return "to copy a chunk here (landed slot)";
    case Slot::kTaken:
      return "to take a chunk out of its landing buffer (taken slot)";
    case Slot::kStaged:
      return "to push its tiles here (staged slot)";
    case Slot::kTileFlag:
      return "to push a piece of its data here (tile flag)";
    case Slot::kGrid:
    case Slot::kSourceRow:
    case Slot::kTargetRow:
      break;  // not waits
  }
  return "(unknown slot)";
}

std::string text(const ErrorRecord& record) {
  char line[640];
  switch (record.slot) {
    case Slot::kGrid:
      std::snprintf(line, sizeof line,
                    "pk_jax: %s runs %u blocks on rank %d of %d and %u on rank %d, channel %d: the "
                    "ranks must run one program on GPUs of one kind. The CUDA context of this "
                    "process is lost, restart it.",
                    name(record.op), record.expected, record.rank, record.num_ranks, record.seen,
                    record.peer, record.channel);
      break;
    case Slot::kSourceRow:
    case Slot::kTargetRow: {
      const bool source = record.slot == Slot::kSourceRow;
      std::snprintf(
          line, sizeof line,
          "pk_jax: %s on rank %d of %d: the slice for rank %d reaches row %d of %s, which has %u "
          "rows; PK_JAX_CHECKS=1 refuses it. Look at %s and send_sizes. The CUDA context of this "
          "process is lost, restart it.",
          name(record.op), record.rank, record.num_ranks, record.peer,
          static_cast<int32_t>(record.seen), source ? "operand" : "that rank's output",
          record.expected, source ? "input_offsets" : "output_offsets");
      break;
    }
    default:
      std::snprintf(line, sizeof line,
                    "pk_jax: %s on rank %d of %d waited %.1f s for rank %d %s, channel %d: "
                    "expected %u, seen %u. Rank %d is late, stuck or gone: look at its log first. "
                    "The limit is PK_JAX_TIMEOUT_S; the CUDA context of this process is lost, "
                    "restart it.",
                    name(record.op), record.rank, record.num_ranks, record.waited_ns * 1e-9,
                    record.peer, what(record.slot), record.channel, record.expected, record.seen,
                    record.peer);
  }
  return line;
}

}  // namespace

ErrorRecord* new_error_record() {
  void* memory = nullptr;
  check(cudaHostAlloc(&memory, sizeof(ErrorRecord), cudaHostAllocPortable | cudaHostAllocMapped),
        "cudaHostAlloc");
  std::memset(memory, 0, sizeof(ErrorRecord));
  Node* node = new Node{static_cast<ErrorRecord*>(memory), records.load()};
  while (!records.compare_exchange_weak(node->next, node)) {
  }
  return node->record;
}

Op number_op(const std::string& name) {
  static std::atomic<uint32_t> next{static_cast<uint32_t>(Op::kCustom)};
  const Op op{next.fetch_add(1)};
  CustomName* known = new CustomName{op, name, custom_names.load()};
  while (!custom_names.compare_exchange_weak(known->next, known)) {
  }
  return op;
}

std::optional<std::string> error_text() {
  for (const Node* node = records.load(std::memory_order_acquire); node; node = node->next) {
    // Acquire: pairs with the device's release of `ready` in signal.cuh.
    if (std::atomic_ref<uint32_t>(node->record->ready).load(std::memory_order_acquire) != 0)
      return text(*node->record);
  }
  return std::nullopt;
}

}  // namespace pk

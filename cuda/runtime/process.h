// Which process a rank lives in, and file descriptors handed from one process to another.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/exchange.h"

namespace pk {

// Equal exactly for processes that can pass descriptors to each other: one boot of one kernel, one
// network namespace.
std::string host_id();

// Identity of this process within its job; random, so that process numbers of different containers
// cannot be confused.
uint64_t process_id();

struct Placement {
  uint64_t host;     // hash of host_id()
  uint64_t process;  // process_id()
  int32_t device;    // CUDA ordinal within the process
};

// Hands a descriptor to every rank of `placements` that lives in another process, and takes one
// from each. Collective over the ranks of `exchange`. The descriptors returned, one a rank (-1 for
// ranks of this process), belong to the caller.
//
// Unix sockets in the abstract namespace, named at random and gone when closed; each message
// carries a secret that only the job's own ranks know from the exchange, and the sender must run as
// the same user.
std::vector<int> exchange_descriptors(Exchange& exchange, const std::vector<Placement>& placements,
                                      int descriptor);

}  // namespace pk

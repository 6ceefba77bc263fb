// Which process a rank lives in, and file descriptors handed from one process to another.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
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

// A file descriptor with an owner.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor();
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// Hands `mine` to every rank of `placements` that lives in another process, and takes one
// descriptor from each: one a rank, empty for ranks of this process. Collective over the ranks of
// `exchange`; throws on all of them if it fails on any.
//
// Unix sockets in the abstract namespace, named at random and gone when closed. Each message
// carries a secret that only the job's own ranks know from the exchange, and both ends must run as
// one user.
std::vector<Descriptor> exchange_descriptors(Exchange& exchange,
                                             const std::vector<Placement>& placements,
                                             const Descriptor& mine);

}  // namespace pk

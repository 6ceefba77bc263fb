// Recording of timelines (tile/timeline.cuh): a buffer of a device, and its clock.
#pragma once

#include <cstdint>
#include <string>

namespace pk::timeline {

// All of these throw Error, and unless the library was built with PK_JAX_TIMELINE do nothing else.

// Kernels that begin on the device from now on record into an empty buffer.
void start(int device);

// The records since start(), which ends; when all that runs on the device has ended. Blocks as they
// are in memory (tile/timeline.h), one after the other, and how many found no place.
struct Records {
  std::string blocks;
  uint32_t blocks_dropped;
};
Records take(int device);

// globaltimer of the device, and what the host's steady clock said within `error_ns` of that: the
// best of many readings. On a device on which nothing runs.
struct Reading {
  uint64_t device_ns;
  int64_t host_ns;
  int64_t error_ns;
};
Reading read_clock(int device);

}  // namespace pk::timeline

// What a device's clock says when the host asks, to put the timelines of several devices beside
// each other: their clocks were set by the driver, and differ by microseconds or more.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace pk {

// In pinned host memory: the host writes `asked`, the device `ns` and then `answered`.
struct ClockTalk {
  uint32_t asked;
  alignas(128) uint32_t answered;
  uint64_t ns;  // globaltimer
};

// Answers the questions 1, 2, ... `count`, and gives up after a second without one.
cudaError_t launch_clock(ClockTalk* talk, uint32_t count, cudaStream_t stream);

}  // namespace pk

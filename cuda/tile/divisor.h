// Division by a number that is known before the kernel starts: a multiplication and a shift, where
// the device's own division is a routine of some twenty instructions. Host and device.
#pragma once

#include <cstdint>

#include "tile/host_device.h"

namespace pk {

// Of 0 <= x < 2^31 by 1 <= by < 2^31. With shift = ceil(log2(by)) and magic the next whole number
// after 2^(31 + shift) / by, which has 32 bits, x magic / 2^(31 + shift) is too large by less than
// 1 / by.
struct Divisor {
  uint32_t by;
  uint32_t magic;
  uint32_t shift;

  PK_HOST_DEVICE static Divisor make(int by) {
    uint32_t shift = 0;
    while (int64_t{1} << shift < by) ++shift;
    const auto magic = static_cast<uint32_t>((uint64_t{1} << (31 + shift)) / by + 1);
    return {static_cast<uint32_t>(by), magic, shift};
  }

  PK_HOST_DEVICE int quotient(int x) const {
    const uint64_t product = uint64_t{2 * static_cast<uint32_t>(x)} * magic;
    return static_cast<int>(static_cast<uint32_t>(product >> 32) >> shift);
  }
};

}  // namespace pk

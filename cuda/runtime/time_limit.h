// The one limit of every wait for another rank, on the device and on the host.
#pragma once

#include <cstdint>

namespace pk {

// PK_JAX_TIMEOUT_S in nanoseconds, 300 s if unset. Throws Error if it is not a number of seconds.
uint64_t time_limit_ns();

}  // namespace pk

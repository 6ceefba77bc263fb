// The error records of this process: where kernels that ran out of time leave their last words.
#pragma once

#include <optional>
#include <string>

#include "tile/error_record.h"

namespace pk {

// A record in pinned host memory, zeroed, readable for the life of the process (a trapped device
// can free nothing).
ErrorRecord* new_error_record();

// A number for an op of another library, under which records name it. Once for each name.
Op number_op(const std::string& name);

// The text of the first record that a kernel has written: op, rank, peer, slot, expected, seen, and
// what to look at. Takes no lock and touches no device: fit to be asked before every execution.
std::optional<std::string> error_text();

}  // namespace pk

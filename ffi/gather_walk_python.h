// Who does what in all_gather_matmul, for tests.
#pragma once

#include <nanobind/nanobind.h>

namespace pk {

void bind_gather_walk(nanobind::module_& module);

}  // namespace pk

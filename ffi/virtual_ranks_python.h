// The test harness as Python sees it.
#pragma once

#include <nanobind/nanobind.h>

namespace pk {

void bind_virtual_ranks(nanobind::module_& module);

}  // namespace pk

// Timelines as Python sees them.
#pragma once

#include <nanobind/nanobind.h>

namespace pk {

void bind_timeline(nanobind::module_& module);

}  // namespace pk

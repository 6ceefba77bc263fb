// A buffer that peers write into during a call.
#pragma once

#include <cstdint>

namespace pk {

struct Published {
  char* address;    // as this rank sees it
  uint64_t offset;  // where peers find it: offset in the published space of this rank
};

}  // namespace pk

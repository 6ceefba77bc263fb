#include "runtime/time_limit.h"

#include <cstdlib>
#include <string>

#include "runtime/check.h"

namespace pk {

uint64_t time_limit_ns() {
  const char* text = std::getenv("PK_JAX_TIMEOUT_S");
  if (!text || !*text) return 300'000'000'000ull;
  char* end = nullptr;
  const double seconds = std::strtod(text, &end);
  if (*end != '\0' || !(seconds > 0) || seconds > 1e6) {
    throw Error(std::string("PK_JAX_TIMEOUT_S must be a number of seconds, not \"") + text + "\"");
  }
  return static_cast<uint64_t>(seconds * 1e9);
}

}  // namespace pk

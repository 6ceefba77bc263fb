// How the ranks of a group talk before they share memory: one collective call, in the same order on
// every rank.
#pragma once

#include <cstddef>
#include <exception>
#include <string>
#include <type_traits>
#include <vector>

#include "runtime/check.h"

namespace pk {

class Exchange {
 public:
  virtual ~Exchange() = default;
  virtual int rank() const = 0;
  virtual int num_ranks() const = 0;
  // all[r * bytes ...] becomes rank r's `mine`. Blocks; throws Error when a rank is lost.
  virtual void all_gather(const void* mine, void* all, size_t bytes) = 0;

  template <typename T>
  std::vector<T> all_gather(const T& mine) {
    static_assert(std::is_trivially_copyable_v<T>);
    std::vector<T> all(num_ranks());
    all_gather(&mine, all.data(), sizeof(T));
    return all;
  }

  // Runs `step` on every rank; throws on all of them if it threw on any, so that none is left
  // waiting for one that gave up.
  template <typename Step>
  void together(const char* what, Step step) {
    std::exception_ptr mine;
    std::string cause;
    try {
      step();
    } catch (const std::exception& error) {
      mine = std::current_exception();
      cause = std::string(error.what()) + "; then: ";
    } catch (...) {
      mine = std::current_exception();
    }
    std::vector<char> failed;
    try {
      failed = all_gather(static_cast<char>(mine != nullptr));
    } catch (const Lost& lost) {
      throw Lost(cause + lost.what());  // lost all the same, but the cause says more
    }
    if (mine) std::rethrow_exception(mine);
    for (int r = 0; r < num_ranks(); ++r) {
      if (failed[r])
        throw Error(std::string(what) + " failed on rank " + std::to_string(r) +
                    "; its own error says why");
    }
  }
};

}  // namespace pk

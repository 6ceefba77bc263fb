// The kernels of attention's derivatives by name.
#pragma once

#include "kernels/attention_backward.cuh"
#include "kernels/attention_instances.cuh"

namespace pk::attention {

// With as many stages as shared memory holds, or as are of use.
using BackwardTile64 = BackwardShape<64, 4, 4, 24>;
using BackwardTile128 = BackwardShape<128, 3, 2, 24>;

struct BackwardInstance {
  void (*kernel)(BackwardArgs);
  int shared_bytes, num_threads;
  int width;
};

template <typename Shape, ptx::Type kType>
BackwardInstance make_backward_instance(bool capped) {
  return {capped ? attention_backward<Shape, kType, true> : attention_backward<Shape, kType, false>,
          static_cast<int>(sizeof(BackwardShared<Shape>)) + kSwizzleBytes, Shape::Crew::kThreads,
          Shape::kD};
}

inline constexpr int kBackwardInstances = 2;

template <ptx::Type kType>
BackwardInstance backward_of_index(int i, bool capped) {
  return i == 0 ? make_backward_instance<BackwardTile64, kType>(capped)
                : make_backward_instance<BackwardTile128, kType>(capped);
}

// Of one operand type, each compiled by itself.
BackwardInstance bfloat16_backward(int i, bool capped);
BackwardInstance float16_backward(int i, bool capped);

}  // namespace pk::attention

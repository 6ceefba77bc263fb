// The kernels of matmul_reduce_scatter and matmul_all_reduce by name.
#pragma once

#include "kernels/matmul_instances.cuh"
#include "kernels/matmul_reduce.cuh"

namespace pk::matmul {

// The tile that reads the least of the L2 for a flop. With few tiles nothing fused is called for.
using ReduceShape = Tile128x256;

using ReduceInstance = InstanceOf<void (*)(CommView, ReduceArgs)>;

template <ptx::Type kType>
ReduceInstance reduce_instance(bool transpose_w) {
  return transpose_w ? instance_of<ReduceShape, Major::kK, Major::kK>(
                           matmul_reduce<ReduceShape, kType, Major::kK>)
                     : instance_of<ReduceShape, Major::kK, Major::kMn>(
                           matmul_reduce<ReduceShape, kType, Major::kMn>);
}

// Of one operand type, each compiled by itself.
ReduceInstance reduce_bfloat16_instance(bool transpose_w);
ReduceInstance reduce_float16_instance(bool transpose_w);

}  // namespace pk::matmul

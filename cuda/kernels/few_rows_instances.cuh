// The kernels of matmul_all_reduce and matmul_reduce_scatter for few rows by name.
#pragma once

#include "kernels/few_rows.cuh"
#include "kernels/few_rows.h"
#include "kernels/matmul_instances.cuh"

namespace pk::matmul {

// All rows there are, and so few columns that w's are enough for all SMs: 8192 are 128 tiles.
// Warps wait for what the peers' same warps have sent, so they come apart.
struct FewRowsShape : TileShape<kMostFewRows, StripLayout::kCols, 8> {
  static constexpr bool kWarpsApart = true;
};

using FewRowsInstance = InstanceOf<void (*)(CommView, FewRowsArgs)>;

template <ptx::Type kType>
FewRowsInstance few_rows_instance(bool transpose_w) {
  return transpose_w ? instance_of<FewRowsShape, Major::kK, Major::kK>(
                           matmul_few_rows<FewRowsShape, kType, Major::kK>)
                     : instance_of<FewRowsShape, Major::kK, Major::kMn>(
                           matmul_few_rows<FewRowsShape, kType, Major::kMn>);
}

// Of one operand type, each compiled by itself.
FewRowsInstance few_rows_bfloat16_instance(bool transpose_w);
FewRowsInstance few_rows_float16_instance(bool transpose_w);

}  // namespace pk::matmul

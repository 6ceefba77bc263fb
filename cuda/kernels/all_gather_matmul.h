// all_gather_matmul: gathered[outer, n m, k] = the x[outer, m, k] of all n ranks along the rows,
// and y[outer, n m, p] = gathered w[k, p], of bfloat16 or float16, accumulated in fp32. One kernel:
// a few blocks, or two warps of every block, push x into the peers' gathered matrices while the
// others multiply.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/matmul.h"
#include "tile/comm_view.h"
#include "tile/published.h"

namespace pk {

struct AllGatherMatmulOperands {
  const void* x;       // [outer, m, k]
  const void* w;       // [k, p], or [p, k] with transpose_w
  Published gathered;  // [outer, n m, k], with the pitch of x
  void* y;             // [outer, n m, p]
  int64_t outer, m, k, p;
  int64_t pitch_x;           // elements from row to row: the next multiple of 8 after k
  int64_t pitch_w, pitch_y;  // multiples of 8
  bool transpose_w;
  bool bfloat16;  // or float16
  bool float32_result;
  bool own_rows;  // this rank's rows are wanted in `gathered` too; for y they are not needed there
  int channel;
};

struct AllGatherMatmulPlan {
  MatmulTile tile;      // one of kAllGatherMatmulTiles
  int num_blocks;       // kMaxBlocks at most
  int num_comm_blocks;  // of them; as many at most as leave one that computes
};

inline constexpr MatmulTile kAllGatherMatmulTiles[] = {MatmulTile::k128x256, MatmulTile::k128x128};

// The same operands' sizes and the same plan on every rank, but for pointers. cudaErrorInvalidValue
// for what a plan or a tensor map cannot be.
cudaError_t launch_all_gather_matmul(const CommView& comm, const AllGatherMatmulOperands& operands,
                                     const AllGatherMatmulPlan& plan, cudaStream_t stream);

// Loads all kernels on the current device and gives them their shared memory.
cudaError_t load_all_gather_matmul();

}  // namespace pk

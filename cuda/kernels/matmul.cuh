// The matrix product: C[m, n] = A[m, k] B[k, n], fp32 accumulation. The main loop of every op that
// has one: an op brings a source (what to wait for before rows of A are read) and an epilogue (what
// becomes of an element of C).
//
//   mover          loads k | loads k + 1 | ...               | loads of the next tile
//   consumer 0         wgmma k | wgmma k + 1 | ... | epilogue      | wgmma 0 | ...
//   consumer 1         wgmma k | wgmma k + 1 | ... | epilogue      | wgmma 0 | ...
//
// Persistent blocks walk the tiles (matmul_walk.h). The loads run through a ring of stages, across
// tiles, so that the next tile is on its way while this one is stored.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "schedule/matmul_walk.h"
#include "schedule/partial_tiles.cuh"
#include "schedule/roles.cuh"
#include "schedule/store_tile.cuh"
#include "tile/pipeline.cuh"
#include "tile/register_tile.cuh"
#include "tile/shared_tile.cuh"

namespace pk::matmul {

struct Args {
  CUtensorMap a, b;
  CUtensorMap c;  // of a 16-bit result
  float* c32;     // of a float32 one, else null
  int m;
  int64_t pitch_c;  // elements
  MatmulWalk walk;
  uint32_t* flags;  // see partial_tiles.cuh: of the blocks that leave a part of a tile
  float* partials;
};

using Crew = Roles<2>;

// A block's tile of C. Two consumers share it: one above the other, or side by side if it has 64
// rows. The blocks of a cluster have tiles above each other and so need the same part of B.
template <int kRows, int kCols, int kNumStages, int kBlocks = 1>
struct TileShape {
  static_assert(kRows == 64 || kRows == 128);
  static constexpr int kM = kRows, kN = kCols, kStages = kNumStages, kCluster = kBlocks;
  static constexpr bool kSideBySide = kM == 64;
  static constexpr int kConsumerN = kSideBySide ? kN / 2 : kN;
};

template <typename Shape, Major kMajorA, Major kMajorB>
struct Shared {
  using A = OperandTile<Shape::kM, kMajorA>;
  using B = OperandTile<Shape::kN, kMajorB, Shape::kCluster>;

  A a[Shape::kStages];
  B b[Shape::kStages];
  PanelBuffers c[Crew::kConsumers];
  Pipeline<Shape::kStages, Shape::kCluster> pipeline;
};

// A is whole before the kernel starts.
struct WholeSource {
  __device__ __forceinline__ void wait(int /*m*/) const {}
};

// C is the product.
struct PlainEpilogue {
  __device__ __forceinline__ float operator()(float value, int /*row*/, int /*col*/) const {
    return value;
  }
};

template <typename Shape, ptx::Half kType, Major kMajorA, Major kMajorB, typename Source,
          typename Epilogue>
struct Matmul {
  using Memory = Shared<Shape, kMajorA, kMajorB>;
  using At = Cursor<Shape::kStages>;
  using Tile = Accumulator<Shape::kConsumerN>;
  static constexpr uint32_t kStepBytes = Memory::A::kBytes + Memory::B::kBytes;

  const Args& args;
  Memory& shared;
  Source source;
  Epilogue epilogue;

  // Warp 0 of the movers.
  __device__ __forceinline__ void load() {
    if (threadIdx.x % 32 != 0) return;
    ptx::prefetch_tensor_map(&args.a);
    ptx::prefetch_tensor_map(&args.b);
    At at;
    const int num_parts = args.walk.num_parts(worker());
    for (int i = 0; i < num_parts; ++i) {
      const MatmulWalk::Part part = args.walk.part(worker(), i);
      source.wait(part.m);
      for (int step = part.begin; step < part.end; ++step, at.advance()) {
        uint64_t* full = shared.pipeline.acquire(at, kStepBytes);
        shared.a[at.stage].load(&args.a, row_of(part), step * kBlockK, full);
        shared.b[at.stage].load(&args.b, part.n * Shape::kN, step * kBlockK, full);
      }
    }
  }

  __device__ __forceinline__ void consume(int consumer) {
    const int row = Shape::kSideBySide ? 0 : consumer * 64;
    const int col = Shape::kSideBySide ? consumer * Shape::kConsumerN : 0;
    At at;
    const int num_parts = args.walk.num_parts(worker());
    for (int i = 0; i < num_parts; ++i) {
      const MatmulWalk::Part part = args.walk.part(worker(), i);
      Tile tile;
      multiply(tile, row, col, part.end - part.begin, at);
      const PartialTiles<Crew::kConsumers, Shape::kConsumerN> partials{args.flags, args.partials};
      const int block = blockIdx.x;
      if (!args.walk.ends_tile(part)) {
        partials.leave(tile, block, consumer);
        continue;
      }
      if (!args.walk.begins_tile(part)) {
        // What the other parts' blocks have left, always in the same order.
        const int between = args.walk.split_tiles * Shape::kCluster;
        for (int other = block - between; other >= 0; other -= between)
          partials.add(tile, other, consumer);
      }
      finish(tile, consumer, row_of(part) + row, part.n * Shape::kN + col);
    }
    if (is_first_thread()) ptx::cp_async_bulk_wait_group<0>();
  }

 private:
  // What walks the tiles: a block, or a cluster whose blocks take a tile's rows one below the
  // other.
  static __device__ __forceinline__ int worker() { return blockIdx.x / Shape::kCluster; }

  static __device__ __forceinline__ int row_of(const MatmulWalk::Part& part) {
    return (part.m * Shape::kCluster + blockIdx.x % Shape::kCluster) * Shape::kM;
  }

  // The product of `steps` steps. A step's instructions are in flight while the next one's operands
  // are waited for; its stage is given back one step later.
  __device__ __forceinline__ void multiply(Tile& tile, int row, int col, int steps, At& at) {
    uint32_t previous = 0;
    for (int step = 0; step < steps; ++step, at.advance()) {
      shared.pipeline.wait_full(at);
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kBlockK / kWgmmaK; ++i) {
        ptx::wgmma<kType, Memory::A::kTransposed, Memory::B::kTransposed>(
            tile.value, shared.a[at.stage].descriptor(row, i),
            shared.b[at.stage].descriptor(col, i), step > 0 || i > 0);
      }
      ptx::wgmma_commit_group();
      if (step > 0) {
        ptx::wgmma_wait_group<1>();
        shared.pipeline.release(previous, threadIdx.x % 128);
      }
      previous = at.stage;
    }
    ptx::wgmma_wait_group<0>();
    ptx::written(tile.value);
    shared.pipeline.release(previous, threadIdx.x % 128);
  }

  __device__ __forceinline__ void finish(Tile& tile, int consumer, int row, int col) {
#pragma unroll
    for (int i = 0; i < Tile::kCount; ++i) {
      tile.value[i] = epilogue(tile.value[i], row + Tile::row() + i / 2 % 2 * 8,
                               col + Tile::col() + i / 4 * 8 + i % 2);
    }
    if (args.c32 != nullptr) {
      store_float32(tile, args.c32, args.m, args.pitch_c, row, col);
    } else {
      store_rounded<kType>(tile, shared.c[consumer], consumer, &args.c, row, col);
    }
  }
};

template <typename Shape, ptx::Half kType, Major kMajorA, Major kMajorB, typename Source,
          typename Epilogue>
__global__ void __launch_bounds__(Crew::kThreads, 1)
    matmul(const __grid_constant__ Args args, Source source, Epilogue epilogue) {
  using Op = Matmul<Shape, kType, kMajorA, kMajorB, Source, Epilogue>;
  extern __shared__ char memory[];
  // The launch adds what this rounding takes.
  const auto address = reinterpret_cast<uintptr_t>(memory) + kSwizzleBytes - 1;
  auto& shared = *reinterpret_cast<typename Op::Memory*>(address & ~uintptr_t{kSwizzleBytes - 1});
  if (threadIdx.x == 0) shared.pipeline.init(Crew::kConsumers);
  __syncthreads();
  // Another block may fill these stages once their barriers exist, and until its last step is done.
  if constexpr (Shape::kCluster > 1) ptx::cluster_sync();
  Op op{args, shared, source, epilogue};
  Crew::run(op);
  if constexpr (Shape::kCluster > 1) {
    __syncwarp();  // one lane loads
    ptx::cluster_sync();
  }
}

}  // namespace pk::matmul

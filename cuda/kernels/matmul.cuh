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
#include <utility>

#include "schedule/matmul_walk.h"
#include "schedule/roles.cuh"
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
  uint32_t* flags;  // of the blocks that leave a part of a tile, zero at the start
  float* partials;  // theirs, [rows * columns of a tile] each
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
  using C = ResultTile<kPanel>;  // what a consumer rounds and stores at a time

  A a[Shape::kStages];
  B b[Shape::kStages];
  C c[Crew::kConsumers][2];  // in turn: one is written while the other is read
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
      if (!args.walk.ends_tile(part)) {
        leave(tile, consumer);
        continue;
      }
      if (!args.walk.begins_tile(part)) collect(tile, consumer);
      finish(tile, consumer, row_of(part) + row, part.n * Shape::kN + col);
    }
    if (first_thread()) ptx::cp_async_bulk_wait_group<0>();
  }

 private:
  // What walks the tiles: a block, or a cluster whose blocks take a tile's rows one below the
  // other.
  static __device__ __forceinline__ int worker() { return blockIdx.x / Shape::kCluster; }

  static __device__ __forceinline__ int row_of(const MatmulWalk::Part& part) {
    return (part.m * Shape::kCluster + blockIdx.x % Shape::kCluster) * Shape::kM;
  }

  static __device__ __forceinline__ bool first_thread() { return threadIdx.x % 128 == 0; }

  // The threads of this consumer alone.
  static __device__ __forceinline__ void sync(int consumer) {
    ptx::named_barrier_sync(1 + consumer, 128);
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

  // This consumer's place in a block's partial tile: a thread's values four by four, so that a warp
  // writes 512 bytes together.
  __device__ __forceinline__ float4* partial(int block, int consumer) const {
    constexpr int kValues = Tile::kCount * 128;
    return reinterpret_cast<float4*>(args.partials) +
           (static_cast<int64_t>(block) * Crew::kConsumers + consumer) * (kValues / 4) +
           threadIdx.x % 128;
  }

  // A part of a tile that another block finishes.
  __device__ __forceinline__ void leave(const Tile& tile, int consumer) {
    float4* to = partial(blockIdx.x, consumer);
#pragma unroll
    for (int i = 0; i < Tile::kCount / 4; ++i) {
      __stcg(to + i * 128, make_float4(tile.value[4 * i], tile.value[4 * i + 1],
                                       tile.value[4 * i + 2], tile.value[4 * i + 3]));
    }
    sync(consumer);
    // Release of all this consumer's stores; pairs with the acquire in collect().
    if (first_thread()) ptx::red_add_release_gpu(args.flags + blockIdx.x, 1);
  }

  // Adds what the other parts' blocks have left of this tile, always in the same order.
  __device__ __forceinline__ void collect(Tile& tile, int consumer) {
    const int between = args.walk.split_tiles * Shape::kCluster;
    for (int block = static_cast<int>(blockIdx.x) - between; block >= 0; block -= between) {
      if (first_thread()) {
        const uint64_t start = ptx::globaltimer_ns();
        while (ptx::ld_acquire_gpu(args.flags + block) < Crew::kConsumers) {
          if (ptx::globaltimer_ns() - start > kLimitNs) ptx::trap();
        }
      }
      sync(consumer);
      const float4* from = partial(block, consumer);
#pragma unroll
      for (int i = 0; i < Tile::kCount / 4; ++i) {
        const float4 left = __ldcg(from + i * 128);
        tile.value[4 * i] += left.x;
        tile.value[4 * i + 1] += left.y;
        tile.value[4 * i + 2] += left.z;
        tile.value[4 * i + 3] += left.w;
      }
    }
  }
  // Blocks of a lower number started earlier and wait for nobody above them, so this means a fault.
  static constexpr uint64_t kLimitNs = 300'000'000'000;

  __device__ __forceinline__ void finish(Tile& tile, int consumer, int row, int col) {
#pragma unroll
    for (int i = 0; i < Tile::kCount; ++i) {
      tile.value[i] = epilogue(tile.value[i], row + Tile::row() + i / 2 % 2 * 8,
                               col + Tile::col() + i / 4 * 8 + i % 2);
    }
    if (args.c32 != nullptr) {
      store_float32(tile, row + Tile::row(), col + Tile::col());
      return;
    }
    store_panels(tile, consumer, row, col, std::make_integer_sequence<int, kPanels>{});
  }
  static constexpr int kPanels = Shape::kConsumerN / kPanel;

  template <int... kIndices>
  __device__ __forceinline__ void store_panels(const Tile& tile, int consumer, int row, int col,
                                               std::integer_sequence<int, kIndices...>) {
    (store_panel<kIndices>(tile, consumer, row, col), ...);
  }

  template <int kIndex>
  __device__ __forceinline__ void store_panel(const Tile& tile, int consumer, int row, int col) {
    typename Memory::C& buffer = shared.c[consumer][kIndex % 2];
    // The store before the last one, from this buffer, has read it.
    if (first_thread()) ptx::cp_async_bulk_wait_group_read<1>();
    sync(consumer);
    store_rounded<kType, kIndex * kPanel>(buffer, tile);
    ptx::fence_proxy_async_shared();
    sync(consumer);
    if (!first_thread()) return;
    buffer.store(&args.c, row, col + kIndex * kPanel);
    ptx::cp_async_bulk_commit_group();
  }
  static_assert(kPanels % 2 == 0);  // the buffers' turns go on from tile to tile

  // Straight from the registers: four lanes write a sector. Rows are padded to whole vectors.
  __device__ __forceinline__ void store_float32(const Tile& tile, int row, int col) const {
#pragma unroll
    for (int half = 0; half < 2; ++half, row += 8) {
      if (row >= args.m) return;
      float* to = args.c32 + row * args.pitch_c + col;
      const int left = static_cast<int>(args.pitch_c) - col;
#pragma unroll
      for (int j = 0; j < Shape::kConsumerN / 8; ++j) {
        const float2 pair{tile.value[4 * j + 2 * half], tile.value[4 * j + 2 * half + 1]};
        if (8 * j < left) *reinterpret_cast<float2*>(to + 8 * j) = pair;
      }
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

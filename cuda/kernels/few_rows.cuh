// The kernel of matmul_all_reduce and matmul_reduce_scatter for few rows: the main loop of
// matmul.cuh on tiles of all rows by 64 columns, whose sum over ranks is made right out of the
// accumulators.
//
//   mover        loads, tile i | loads, tile i + 1                     | ...
//   greeter      invites the peers, waits for their invitations
//   consumers    wgmma, tile i | send | wgmma, tile i + 1 | sum of tile i, send | ...
//
// w is read once, as fast as HBM gives it, and nothing else takes its time: invitations come and go
// meanwhile, and a block's first tile leaves when its last step is done. What peers sent of a tile
// is looked for after the next tile's products, so that only the last one is waited for. A tile
// that is split along k is a block's last: its cluster adds it up (cluster_sum.cuh), and each warp
// sends what it has of the sum.
//
// Exit: see schedule/strip_sum.cuh. A block whose share of a split tile has no rows sends nothing,
// or nothing to some peer, which then does not wait for it: nor must it wait for that one's
// invitation, for the next one might stand in its place.
//
// Progress: block b waits for the peers' blocks of the same number, for a tile that these have sent
// before they wait for anything of that tile or the next. Blocks start in order on every GPU, which
// is observed and not promised, so the first resident ones always meet; by arrival they cannot be
// numbered, since a cluster's blocks have their parts by their ranks in it. All ranks run the same
// grid; with invitations it is checked, and by low latency the result does not depend on it.
#pragma once

#include "kernels/few_rows.h"
#include "kernels/matmul.cuh"
#include "schedule/epilogue.cuh"
#include "schedule/rendezvous.cuh"
#include "schedule/strip_sum.cuh"

namespace pk::matmul {

struct FewRowsArgs {
  Args<MatmulWalk> product;  // its c is y
  Published scratch;         // unless by low latency
  StripLayout strips;
  int num_strips;
  Op op;
  int channel;
  bool low_latency;
};

// What a block has in shared memory besides the product's.
struct FewRowsMemory {
  GuestsUpTo<kFewRowsRanks> guests;
  uint32_t epoch;
  uint64_t greeted;  // mbarrier: the above are there
};

template <typename Shape, ptx::Type kType, Major kMajorB>
struct FewRowsMatmul : Matmul<Shape, kType, Major::kK, kMajorB, MatmulWalk, WholeSource, Epilogue> {
  using Base = Matmul<Shape, kType, Major::kK, kMajorB, MatmulWalk, WholeSource, Epilogue>;
  using typename Base::At, typename Base::Part, typename Base::Tile, typename Base::Sum;
  using Whole = Strips<kType, 2>;  // a warp's 16 rows of a tile
  using Share = Strips<kType, 1>;  // of a tile that a cluster has added up
  static_assert(!Shape::kSideBySide && Shape::kN == StripLayout::kCols);

  const FewRowsArgs& all;
  const Waiter& waiter;
  FewRowsMemory& memory;

  // The greeter.
  __device__ __forceinline__ void communicate() {
    Channel& channel = channel_of(waiter);
    uint32_t epoch;
    if (all.low_latency) {
      epoch = this_epoch(channel);
    } else {
      const auto expects = [&](int peer) { return sends_to(peer); };
      const Published mine[] = {all.scratch};
      epoch = enter<OneWarp>(waiter, mine, memory.guests, expects);
      check_grids<OneWarp>(waiter, memory.guests, expects);
    }
    // The others have the epoch from here.
    end_block<OneWarp>(channel, epoch);
    if (threadIdx.x % 32 == 0) memory.epoch = epoch;
    // Release of what each lane has written; pairs with the wait in consume().
    ptx::mbarrier_arrive(&memory.greeted);
  }

  __device__ __forceinline__ void consume(int consumer) {
    auto& shared = ptx::kept(this->shared);
    const MatmulWalk& walk = all.product.walk;
    const int rows = all.strips.rows, row = consumer * 64;
    ResultPanel& panel = shared.c[consumer][threadIdx.x % 128 / 32][0];
    At at;
    typename MatmulWalk::Parts parts(walk, this->block);
    Part part = parts.next();
    if (row >= rows) {
      for (; part.num_steps > 0; part = parts.next())
        this->skip(shared.pipeline, consumer, part.num_steps, at, [](int) {});
      return;
    }
    Whole pending;
    pending.row = row + threadIdx.x % 128 / 32 * ResultPanel::kRows;
    pending.n = -1;  // none
    Tile tile;
    for (;; part = parts.next()) {
      if (part.num_steps > 0) this->multiply(shared, tile, row, 0, part.num_steps, at, [](int) {});
      // Acquire of what the greeter has found out; pairs with its arrival.
      while (!ptx::mbarrier_try_wait_parity(&memory.greeted, 0)) {
      }
      if (pending.n >= 0) finish(pending, panel);
      if (part.num_steps == 0) return;
      pending.n = part.n;
      if (!walk.is_whole(part)) break;  // it is the last part
#pragma unroll
      for (int half = 0; half < 2; ++half)
        pending.own[half].template round<8, 4>(tile.value + 2 * half);
      if (pending.row < rows) sum().send(pending);
    }
    Sum{reinterpret_cast<float4*>(shared.a)}.run(
        tile, consumer, rows - row, [&](int first, int /*col*/, Strip& strip) {
          Share share;
          share.own[0].template round<4, 2>(strip.value[0]);
          share.row = row + first;
          share.n = part.n;
          sum().send(share);
          finish(share, panel);
        });
  }

 private:
  __device__ __forceinline__ StripSum sum() const {
    return {waiter,         memory.epoch, all.strips, all.num_strips, memory.guests.address[0],
            all.low_latency};
  }

  // Whether any strip of this block goes to a peer.
  __device__ __forceinline__ bool sends_to(int peer) const {
    const MatmulWalk& walk = all.product.walk;
    if (walk.num_whole(this->block) > 0) return true;  // tiles have all rows
    if (walk.num_parts(this->block) == 0) return false;
    const int share = Sum::kGroups / walk.split * StripLayout::kRows;
    const int row = static_cast<int>(ptx::cluster_rank()) * share;
    // Of either consumer.
    return all.strips.goes_to(peer, row, share) || all.strips.goes_to(peer, 64 + row, share);
  }

  // One warp: the sums of its strips, to y.
  template <int kCount>
  __device__ __forceinline__ void finish(const Strips<kType, kCount>& strips,
                                         ResultPanel& panel) const {
    Strip sums[kCount];
    if (!sum().sum(strips, sums)) return;
    const int row = strips.row - all.strips.first_row(waiter.comm.rank);
#pragma unroll
    for (int s = 0; s < kCount; ++s) {
      this->args.c.template store_rounded<kType>(sums[s], panel, row + s * StripLayout::kRows,
                                                 strips.n * Shape::kN);
    }
  }
};

template <typename Shape, ptx::Type kType, Major kMajorB>
__global__ void __launch_bounds__(Shape::Crew::kThreads, Shape::Crew::kMinBlocks)
    matmul_few_rows(const __grid_constant__ CommView comm,
                    const __grid_constant__ FewRowsArgs args) {
  using Product = FewRowsMatmul<Shape, kType, kMajorB>;
  constexpr int kSharedBytes = 227 << 10;  // of a block at most
  static_assert(sizeof(typename Product::Memory) + kSwizzleBytes + sizeof(FewRowsMemory) <
                kSharedBytes);
  extern __shared__ char memory[];
  __shared__ FewRowsMemory more;
  auto& shared = set_up<Product>(memory, args.product);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&more.greeted, 32);  // the greeter's lanes
    ptx::fence_mbarrier_init();
  }
  const Waiter waiter{comm, args.op, args.channel};
  __syncthreads();
  Product product{{args.product, shared, {}, {}, static_cast<int>(blockIdx.x)}, args, waiter, more};
  Shape::Crew::run(product);
}

}  // namespace pk::matmul

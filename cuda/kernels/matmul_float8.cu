#include "kernels/matmul_instances.cuh"

namespace pk::matmul {

Instance<MatmulWalk> float8_instance(MatmulTile tile) {
  constexpr auto kType = ptx::Type::kE4m3;
  constexpr Major kK = Major::kK;
  // Larger ones have no registers for their second accumulator.
  if (tile == MatmulTile::k128x128) return make_instance<Tile128x128, kType, kK, kK, MatmulWalk>();
  if (tile == MatmulTile::k64x128) return make_instance<Tile64x128, kType, kK, kK, MatmulWalk>();
  return {};
}

}  // namespace pk::matmul

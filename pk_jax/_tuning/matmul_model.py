"""How a matrix product is cut into tiles and dealt to thread blocks, and what that should cost.

Pure functions; `ffi/matmul.cc` reads the result, `cuda/schedule/matmul_walk.h` is the walk.
"""

import dataclasses
from collections.abc import Iterator

# Elements of k that a block multiplies at a time.
BLOCK_K = 64

# A part of a split tile has no fewer steps of k than pay for the partial result.
LEAST_STEPS = 4


@dataclasses.dataclass(frozen=True)
class Tile:
    """A shape of the tile that a worker, a block or a cluster of blocks, makes of the result.

    Attributes:
        name: what the custom call calls it.
        rows: of the worker's tile.
        cols: of the worker's tile.
        blocks: thread blocks of a worker.
        flops: per second and SM, in the main loop.
    """

    name: str
    rows: int
    cols: int
    blocks: int
    flops: float


# Measured at 8192 x 8192 x 8192 on an H200, the cluster before its stages were given back without a
# fence; 64x256 is a guess. See docs/decisions/0011-matmul.md.
TILES = (
    Tile("128x256", 128, 256, 1, 5.05e12),
    Tile("2x128x256", 256, 256, 2, 4.1e12),
    Tile("128x128", 128, 128, 1, 4.4e12),
    Tile("64x256", 64, 256, 1, 3.8e12),
)
SHAPES = tuple((tile.rows, tile.cols) for tile in TILES)

# Estimates until they are fitted to measurements.
LAUNCH_S = 4e-6  # a call, whatever its size
TILE_S = 1e-6  # a tile's first loads and its epilogue
SPLIT_S = 5e-6  # clearing the flags, and a block's wait for others
PARTIAL_BANDWIDTH = 5e12  # bytes of partial tiles, written and read, all blocks together
HBM_BANDWIDTH = 4e12


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a call is told, with the time that the model expects.

    Attributes:
        tile: name of the tile.
        num_blocks: thread blocks, whole workers.
        split_tiles: how many of the last tiles are cut along k; the others come in whole waves.
        split: parts of each of those tiles, a worker each.
        scratch_bytes: memory for flags and partial tiles; 0 if no tile is split.
        seconds: the expected time.
    """

    tile: str
    num_blocks: int
    split_tiles: int
    split: int
    scratch_bytes: int
    seconds: float


def candidates(m: int, n: int, k: int, num_sms: int) -> Iterator[Plan]:
    """The plans for [m, k] @ [k, n] in 16 bits on so many SMs."""
    for tile in TILES:
        num_tiles = _ceil(m, tile.rows) * _ceil(n, tile.cols)
        workers = num_sms // tile.blocks
        if workers == 0:
            continue
        yield _plan(tile, m, n, k, min(workers, num_tiles))
        rest = num_tiles % workers
        most = min(workers // rest, _ceil(k, BLOCK_K) // LEAST_STEPS) if rest else 1
        if most > 1:
            used = rest * most if rest == num_tiles else workers
            yield _plan(tile, m, n, k, used, rest, most)


def choose(m: int, n: int, k: int, num_sms: int, shape: tuple[int, int] | None = None) -> Plan:
    """The plan with the least expected time; of those with tiles of one shape, if one is given."""
    names = {tile.name for tile in TILES if shape in (None, (tile.rows, tile.cols))}
    plans = [plan for plan in candidates(m, n, k, num_sms) if plan.tile in names]
    return min(plans, key=lambda plan: plan.seconds)


def _plan(
    tile: Tile, m: int, n: int, k: int, workers: int, split_tiles: int = 0, split: int = 1
) -> Plan:
    num_blocks = workers * tile.blocks
    steps = _ceil(k, BLOCK_K)
    whole = _ceil(m, tile.rows) * _ceil(n, tile.cols) - split_tiles
    step_s = 2 * tile.rows * tile.cols * BLOCK_K / (tile.flops * tile.blocks)
    seconds = _ceil(whole, workers) * (steps * step_s + TILE_S)
    scratch_bytes = 0
    if split_tiles:
        # Each part but the last leaves a partial tile, and a flag for each of its blocks.
        left = split_tiles * (split - 1)
        partials = left * tile.rows * tile.cols * 4
        scratch_bytes = _ceil(4 * left * tile.blocks, 256) * 256 + partials
        seconds += _ceil(steps, split) * step_s + TILE_S
        seconds += SPLIT_S + 2 * partials / PARTIAL_BANDWIDTH
    memory_s = 2 * (m * k + k * n + m * n) / HBM_BANDWIDTH
    expected = LAUNCH_S + max(seconds, memory_s)
    return Plan(tile.name, num_blocks, split_tiles, split, scratch_bytes, expected)


def _ceil(x: int, by: int) -> int:
    return -(-x // by)

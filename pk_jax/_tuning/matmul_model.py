"""How a matrix product is cut into tiles and dealt to thread blocks, and what that should cost.

Pure functions; `ffi/matmul.cc` reads the result, `cuda/schedule/matmul_walk.h` is the walk.
"""

import dataclasses
from collections.abc import Iterator

# Bytes of k that a block multiplies at a time, of each row of A and column of B.
BLOCK_K_BYTES = 128

# A part of a split tile has no fewer steps of k than pay for adding the parts up.
LEAST_STEPS = 4

# Parts of a split tile: the blocks of a cluster, which share out its 8 groups of rows.
SPLITS = (2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Tile:
    """A shape of the tile that a thread block makes of the result.

    Attributes:
        rows: of the tile.
        cols: of the tile.
        flops: per second and SM, in the main loop.
    """

    rows: int
    cols: int
    flops: float

    @property
    def name(self) -> str:
        """What the custom call calls it."""
        return f"{self.rows}x{self.cols}"


# Fitted to one H200, see docs/decisions/0011-matmul.md. The smaller ones read more of the L2 for a
# flop.
TILES = (
    Tile(128, 256, 5.3e12),
    Tile(128, 128, 4.7e12),
    Tile(64, 256, 4.4e12),
    Tile(64, 128, 4.2e12),
    Tile(64, 64, 3.2e12),
)
SHAPES = tuple((tile.rows, tile.cols) for tile in TILES)

# Of operands of a byte; larger tiles have no registers for the second accumulator. PREDICTED, not
# measured: twice the rate of the same tile in 16 bits, whose bytes they have for a clock, less a
# tenth for adding up steps.
TILES_OF_BYTES = (
    Tile(128, 128, 8.4e12),
    Tile(64, 128, 7.5e12),
)
SHAPES_OF_BYTES = tuple((tile.rows, tile.cols) for tile in TILES_OF_BYTES)

LAUNCH_S = 2.7e-6  # a call, whatever its size
TILE_S = 0.7e-6  # between the tiles of a block
SUM_S = 1.2e-6  # the blocks of a cluster meet twice
CLUSTER_FACTOR = 1.03  # whole tiles take longer where blocks come in clusters
SUM_BANDWIDTH = 25e9  # bytes of a tile in fp32 that a block sends, adds and stores
SM_BANDWIDTH = 95e9  # bytes that an SM can load
HBM_BANDWIDTH = 4.3e12


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a call is told, with the time that the model expects.

    Attributes:
        tile: name of the tile.
        num_blocks: thread blocks, whole clusters.
        split_tiles: how many of the last tiles are cut along k; the others come in whole waves.
        split: parts of each of those tiles, and blocks of a cluster.
        seconds: the expected time.
    """

    tile: str
    num_blocks: int
    split_tiles: int
    split: int
    seconds: float


def tiles(itemsize: int = 2) -> tuple[Tile, ...]:
    """The tiles for operands of so many bytes an element, 1 or 2."""
    return TILES if itemsize == 2 else TILES_OF_BYTES


def candidates(m: int, n: int, k: int, num_sms: int, itemsize: int = 2) -> Iterator[Plan]:
    """The plans for [m, k] @ [k, n], of so many bytes an element, on so many SMs."""
    for tile in tiles(itemsize):
        yield from candidates_of(tile, m, n, k, num_sms, itemsize)


def candidates_of(
    tile: Tile, m: int, n: int, k: int, num_sms: int, itemsize: int = 2
) -> Iterator[Plan]:
    """Those with one tile."""
    num_tiles = _ceil(m, tile.rows) * _ceil(n, tile.cols)
    yield _plan(tile, m, n, k, itemsize, min(num_sms, num_tiles))
    for split in SPLITS:
        num_blocks = resident_clusters(num_sms, split) * split
        rest = num_tiles % num_blocks if num_blocks else 0
        if 0 < rest * split <= num_blocks and split * LEAST_STEPS <= _steps(k, itemsize):
            used = rest * split if rest == num_tiles else num_blocks
            yield _plan(tile, m, n, k, itemsize, used, rest, split)


def choose(
    m: int,
    n: int,
    k: int,
    num_sms: int,
    shape: tuple[int, int] | None = None,
    itemsize: int = 2,
) -> Plan:
    """The plan with the least expected time; of those with tiles of one shape, if one is given."""
    rows = {
        tile.name: tile.rows for tile in tiles(itemsize) if shape in (None, (tile.rows, tile.cols))
    }
    plans = [plan for plan in candidates(m, n, k, num_sms, itemsize) if plan.tile in rows]
    # Of those that memory limits alike, one that multiplies few rows of nothing.
    padded = {name: _ceil(m, each) * each for name, each in rows.items()}
    return min(plans, key=lambda plan: (plan.seconds, padded[plan.tile]))


def tile_seconds(tile: Tile, k: int) -> float:
    """A tile of 16-bit operands on one SM, where tensor cores are the bound."""
    step_s = tile.rows * tile.cols * BLOCK_K_BYTES / tile.flops
    return _steps(k, 2) * step_s + TILE_S


def resident_clusters(num_sms: int, blocks: int) -> int:
    """How many clusters of 2, 4 or 8 blocks run together.

    A cluster runs on the SMs of one GPC, which are not all a multiple of 4: of an H200's 132 there
    is room for 66, 30 or 15 clusters (cudaOccupancyMaxActiveClusters).
    """
    return num_sms // 2 if blocks == 2 else num_sms * 10 // 11 // blocks


def _plan(
    tile: Tile,
    m: int,
    n: int,
    k: int,
    itemsize: int,
    num_blocks: int,
    split_tiles: int = 0,
    split: int = 1,
) -> Plan:
    steps = _steps(k, itemsize)
    whole = _ceil(m, tile.rows) * _ceil(n, tile.cols) - split_tiles
    rows = min(tile.rows, _ceil(m, 8) * 8)  # that are loaded
    step_s = max(
        2 * tile.rows * tile.cols * BLOCK_K_BYTES / itemsize / tile.flops,
        (rows + tile.cols) * BLOCK_K_BYTES / SM_BANDWIDTH,
    )
    seconds = _ceil(whole, num_blocks) * (steps * step_s + TILE_S)
    if split_tiles:
        seconds *= CLUSTER_FACTOR
        seconds += _ceil(steps, split) * step_s + TILE_S
    num_bytes = itemsize * (m * k + k * n) + 2 * m * n
    seconds = max(seconds, num_bytes / HBM_BANDWIDTH + TILE_S)
    if split_tiles:
        seconds += SUM_S + 4 * rows * tile.cols / SUM_BANDWIDTH
    return Plan(tile.name, num_blocks, split_tiles, split, LAUNCH_S + seconds)


def _steps(k: int, itemsize: int) -> int:
    return _ceil(k * itemsize, BLOCK_K_BYTES)


def _ceil(x: int, by: int) -> int:
    return -(-x // by)

"""How all_gather_matmul splits a GPU between pushing and multiplying, and what that should cost.

Pure functions; `ffi/all_gather_matmul.cc` reads the result, `cuda/schedule/gather_walk.h` is the
walk, `gather_pieces.h` the order in which rows come. What decides is the link beside a GEMM
(`Hardware.loaded_store_bandwidth`), and whether the tiles come in whole waves on the SMs that are
left: where they do, those that push cost nothing.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from pk_jax._tuning import matmul_model
from pk_jax._tuning.hardware import Curve, Hardware

# The kernel has these alone. The smaller one is as fast as that where a few rows are gathered, and
# not all SMs multiply all the time: M512 N7168 K8192, 107 us (decision 0013).
TILES = (
    matmul_model.TILES[0],
    dataclasses.replace(matmul_model.TILES[1], flops=5.1e12),
)

# Blocks that push and do nothing else; with none, two warps of every block push (intra-SM).
COMM_BLOCKS = (0, 1, 2, 4, 6, 8, 12, 16, 20, 24, 32)

BAND_ROWS = 2048  # of the result, cuda/kernels/all_gather_matmul.cu
CHUNK_BYTES = 4096  # of a row at most, cuda/schedule/gather_pieces.h
# That two warps of an SM copy or push beside all else, bytes/s: what 8192x1280x8192 takes at least
# (decision 0013).
COPY_BANDWIDTH = 1.6e9
ENTRY_S = 3.5e-6  # before the first byte: the blocks' roles and the invitations
# Of a communicator, the same, and the trip through its ring: M512 N7168 K8192 on two H200, where
# nothing else differs (decision 0013).
COMM_ENTRY_S = 10e-6
PIECE_S = 4e-6  # from a byte's store to the use of its piece: acknowledgement, release, polls


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a call is told, with the time that the model expects.

    Attributes:
        tile: name of the tile.
        num_blocks: thread blocks, those that push among them.
        num_comm_blocks: those that push and do nothing else; 0 if a part of every block pushes.
        seconds: the expected time.
    """

    tile: str
    num_blocks: int
    num_comm_blocks: int
    seconds: float


def candidates(
    hardware: Hardware,
    m: int,
    p: int,
    k: int,
    num_ranks: int,
    *,
    outer: int = 1,
    own_rows: bool = False,
    num_sms: int | None = None,
) -> Iterator[Plan]:
    """The plans for x [outer, m, k] of each rank, gathered, times w [k, p], in 16 bits.

    Args:
        hardware: the GPU and its links.
        m: rows of each rank in each matrix.
        p: columns of the weight.
        k: columns of x.
        num_ranks: ranks.
        outer: matrices.
        own_rows: the gathered matrix is wanted, for which a rank copies its own rows too.
        num_sms: SMs to be used, if not all.
    """
    num_sms = num_sms or hardware.num_sms
    work = _Work(m, p, k, num_ranks, outer, own_rows)
    for tile in TILES:
        for num_comm in COMM_BLOCKS:
            if num_comm < num_sms:
                yield _plan(hardware, work, tile, num_sms, num_comm)


def choose(
    hardware: Hardware,
    m: int,
    p: int,
    k: int,
    num_ranks: int,
    *,
    outer: int = 1,
    own_rows: bool = False,
    num_sms: int | None = None,
    tile: tuple[int, int] | None = None,
    num_comm_blocks: int | None = None,
    least_comm_blocks: int = 0,
) -> Plan:
    """The plan with the least expected time, of those with the tile and the blocks asked for.

    Args:
        hardware: as in candidates(), like what follows it.
        m: as in candidates().
        p: columns of the weight.
        k: columns of x.
        num_ranks: ranks.
        outer: as in candidates().
        own_rows: as in candidates().
        num_sms: as in candidates().
        tile: (rows, columns) of the tile, if not any.
        num_comm_blocks: blocks that push and do nothing else, if not any number.
        least_comm_blocks: where any number will do, no fewer.

    Raises:
        ValueError: there is no such tile, or no SM is left that multiplies.
    """
    num_sms = num_sms or hardware.num_sms
    tiles = [each for each in TILES if tile in (None, (each.rows, each.cols))]
    if not tiles:
        names = " or ".join(f"({each.rows}, {each.cols})" for each in TILES)
        raise ValueError(f"all_gather_matmul has tiles of {names}, not {tile}")
    if num_comm_blocks is not None and not 0 <= num_comm_blocks < num_sms:
        raise ValueError(
            f"all_gather_matmul: num_comm_sms={num_comm_blocks} must leave some of {num_sms} SMs "
            "to multiply"
        )
    numbers = [number for number in COMM_BLOCKS if number >= least_comm_blocks]
    if num_comm_blocks is not None:
        numbers = [num_comm_blocks]
    work = _Work(m, p, k, num_ranks, outer, own_rows)
    plans = [
        _plan(hardware, work, each, num_sms, number)
        for each in tiles
        for number in numbers
        if number < num_sms
    ]
    # Of those that take as long, the one that has pushed soonest, by the fewest SMs: more than fill
    # the link only take time from the products.
    least = min(plan.seconds for plan in plans)
    return max(
        (plan for plan in plans if plan.seconds <= 1.002 * least),
        key=lambda plan: (
            push_bandwidth(hardware, plan.num_comm_blocks, num_sms),
            -plan.num_comm_blocks,
            -plan.seconds,
        ),
    )


def push_bandwidth(hardware: Hardware, num_comm: int, num_sms: int) -> float:
    """Bytes per second that `num_comm` of the SMs push to peers while the others multiply."""
    curve = hardware.loaded_store_bandwidth["tma"]
    if num_comm == 0:
        return min(COPY_BANDWIDTH * num_sms, curve[-1][1])
    return _interpolate(curve, num_comm)


@dataclasses.dataclass(frozen=True)
class _Work:
    m: int
    p: int
    k: int
    num_ranks: int
    outer: int
    own_rows: bool


def _plan(
    hardware: Hardware, work: _Work, tile: matmul_model.Tile, num_sms: int, num_comm: int
) -> Plan:
    seconds = matmul_model.LAUNCH_S + _seconds(hardware, work, tile, num_sms, num_comm)
    return Plan(tile.name, num_sms, num_comm, seconds)


def _seconds(
    hardware: Hardware, work: _Work, tile: matmul_model.Tile, num_sms: int, num_comm: int
) -> float:
    rows, others = work.outer * work.m, work.num_ranks - 1
    part = 2 * rows * work.k
    tile_s = matmul_model.tile_seconds(tile, work.k)
    num_n, workers = _ceil(work.p, tile.cols), num_sms - num_comm
    sent_s = others * part / push_bandwidth(hardware, num_comm, num_sms)

    # A block makes every workers-th tile in the order of cuda/schedule/matmul_walk.h. The wait that
    # ends last is for some row of tiles; from there on its block works without another. Of a row
    # the first tile counts, which has the most tiles behind it. Of the ranks the middle one stands
    # for all.
    own = work.outer * _ceil(work.m, tile.rows)
    band = _band(tile, own, num_n, workers)
    coming = _first_starts(work, tile.rows, own, band, sent_s, tile_s)
    start = np.concatenate([np.zeros(own), _entry_s(num_comm) + PIECE_S + coming])
    rows_of_tiles = np.arange(len(start))
    first_tile = rows_of_tiles // band * band * num_n + rows_of_tiles % band
    num_left = (len(start) * num_n - 1 - first_tile) // workers + 1
    tiles_s = float(np.max(start + num_left * tile_s, initial=0.0))

    num_bytes = 2 * (work.num_ranks * rows * (work.k + work.p) + work.k * work.p)
    copied_s = work.own_rows * part / (COPY_BANDWIDTH * workers)
    copied_s += sent_s if num_comm == 0 else 0
    return max(tiles_s, copied_s, num_bytes / matmul_model.HBM_BANDWIDTH)


def _entry_s(num_comm: int) -> float:
    return COMM_ENTRY_S if num_comm else ENTRY_S


def _first_starts(
    work: _Work, tile_rows: int, own: int, band: int, sent_s: float, tile_s: float
) -> np.ndarray:
    """When the others' rows of tiles may begin and then wait for no chunk of k any more.

    Of a group, the rows of a band, chunk c of C comes when c + 1 of C parts of its bytes have, and
    a tile needs it c / C of its time after its start. Both go evenly, so the first chunk decides or
    the last one.
    """
    others, chunks = work.num_ranks - 1, num_chunks(work.k)
    if work.outer > 1:  # every part has rows of tiles of its own
        size, height = own, band
        last = np.arange(others * own)
    else:
        size, height = work.m, band * tile_rows
        last = np.arange(1, _ceil(others * work.m, tile_rows) + 1) * tile_rows
        last = np.minimum(last, others * work.m) - 1
    part, row = np.divmod(last, size)
    group = row // height * height
    bytes_s = sent_s / max(others * size, 1)  # of a row, or of a row of tiles
    group_s = (np.minimum(group + height, size) - group) * bytes_s
    late_s = np.maximum(group_s / chunks, group_s - (chunks - 1) / chunks * tile_s)
    return (part * size + group) * bytes_s + late_s


def num_chunks(k: int) -> int:
    """The chunks of k in which rows come, if there are flags for them."""
    row = 2 * _ceil(k, 8) * 8
    chunks = _ceil(row, CHUNK_BYTES)
    return _ceil(row, row if chunks == 1 else _ceil(_ceil(row, chunks), 128) * 128)


def _band(tile: matmul_model.Tile, own: int, num_n: int, workers: int) -> int:
    """Rows of tiles in a band: as many in each, if they can, of those of the own rows."""
    most = max(BAND_ROWS // tile.rows, workers // num_n)
    return _ceil(own, _ceil(own, most))


def _interpolate(curve: Curve, x: float) -> float:
    """The curve at x, a straight line from nothing to its first point and flat after its last."""
    xs, ys = zip((0, 0.0), *curve, strict=True)
    return float(np.interp(x, xs, ys))


def _ceil(x: int, by: int) -> int:
    return -(-x // by)

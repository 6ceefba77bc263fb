"""How matmul_reduce_scatter and matmul_all_reduce are dealt to thread blocks, and what they cost.

Pure functions; `ffi/matmul_reduce.cc` reads the result, `cuda/schedule/scatter_walk.h` is the walk.
Every SM multiplies and sends, so what decides is only whether tensor cores or the link take longer.
"""

import dataclasses

from pk_jax._tuning import matmul_model
from pk_jax._tuning.hardware import Hardware

# The kernel has this one alone.
TILE = matmul_model.TILES[0]

# cuda/schedule/scatter_walk.h.
MOST_RANKS = 16

ENTRY_S = 1.5e-6  # the block's number, before its first tile
# A tile's partials beside its product, by three sizes on two H200: a fit to the whole, some of
# which goes with k (decision 0014).
ROUND_S = 2.8e-6
# Where the link takes so much of the products' time, a tile that was sent right before an own one
# comes too late for it: two rounds of lead then. One leaves less to be added at the end.
LINK_BOUND = 0.75
LAST_S = 5e-6  # the last tile's way: stores to the peer, flag, sum, stores to the result


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a call is told, with the time that the model expects.

    Attributes:
        num_blocks: thread blocks, the same on every rank.
        lead: rounds of tiles that a block is ahead with those for its peers.
        scratch_bytes: for the partial tiles of the peers.
        seconds: the expected time.
    """

    num_blocks: int
    lead: int
    scratch_bytes: int
    seconds: float


def choose(
    hardware: Hardware,
    m: int,
    p: int,
    k: int,
    num_ranks: int,
    *,
    all_reduce: bool = False,
    num_sms: int | None = None,
    lead: int | None = None,
) -> Plan:
    """The plan for x [m, k] times w [k, p], in 16 bits, summed over ranks.

    Args:
        hardware: the GPU and its links.
        m: rows of x, of all ranks.
        p: columns of w.
        k: this rank's share of the sum.
        num_ranks: ranks.
        all_reduce: every rank gets the whole sum, and not its share of the rows alone.
        num_sms: SMs to be used, if not all.
        lead: see Plan; None for what the link asks for.
    """
    tiles = num_tiles(m, p, num_ranks, all_reduce)
    num_blocks = min(num_sms or hardware.num_sms, num_ranks * tiles)
    tile_s = matmul_model.tile_seconds(TILE, k)
    waves = _ceil(num_ranks * tiles, num_blocks)
    link_bytes = (num_ranks - 1) * 2 * rows_of_rank(m, num_ranks, all_reduce) * p
    link_s = (1 + all_reduce) * link_bytes / hardware.loaded_store_bandwidth["tma"][-1][1]
    if lead is None:
        lead = 2 if link_s > LINK_BOUND * waves * tile_s else 1
    hbm_bytes = 2 * (m * k + k * p) + 2 * (1 + all_reduce) * m * p
    seconds = max(
        waves * (tile_s + ROUND_S),
        tile_s + link_s,  # there is nothing to be sent before the first tile
        hbm_bytes / matmul_model.HBM_BANDWIDTH,
    )
    seconds += matmul_model.LAUNCH_S + ENTRY_S + LAST_S + all_reduce * 2 * hardware.flag_latency
    scratch = (num_ranks - 1) * tiles * 2 * TILE.rows * TILE.cols
    return Plan(num_blocks, lead, scratch, seconds)


def rows_of_rank(m: int, num_ranks: int, all_reduce: bool) -> int:
    """Rows that a rank adds up: whole tiles where all ranks get them."""
    if not all_reduce:
        return m // num_ranks
    return _ceil(m, num_ranks * TILE.rows) * TILE.rows


def num_tiles(m: int, p: int, num_ranks: int, all_reduce: bool) -> int:
    """Tiles of the rows that a rank adds up."""
    return _ceil(rows_of_rank(m, num_ranks, all_reduce), TILE.rows) * _ceil(p, TILE.cols)


def _ceil(x: int, by: int) -> int:
    return -(-x // by)

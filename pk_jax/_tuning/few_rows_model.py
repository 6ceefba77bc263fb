"""How a product of few rows, summed over ranks, is dealt to blocks and sent, and what it costs.

Pure functions; `ffi/few_rows.cc` reads the result, `cuda/schedule/strip_sum.cuh` is the exchange.
The product reads the weights once; what follows is a trip over the link, of few bytes or many.
"""

import dataclasses

from pk_jax._tuning import matmul_model
from pk_jax._tuning.hardware import Hardware

# Rows and columns of the kernel's only tile, which has all rows there are.
TILE = (128, 64)
MOST_ROWS, TILE_COLS = TILE
MOST_RANKS = 9  # kFewRowsRanks, cuda/kernels/few_rows.h

# Flags that the peers of a rank share: cuda/tile/comm_view.h.
TILE_FLAGS = 16384
# What is sent, and has a flag, at a time: cuda/schedule/strip_layout.h.
STRIP_ROWS, STRIP_COLS = 8, 64
STRIP_BYTES = 2 * STRIP_ROWS * STRIP_COLS

# Rates of the tile, as of those in matmul_model with the same instructions: 128x64 as 64x128, whose
# step has the same bytes and flops. Up to 64 rows one of two consumers has nothing to do.
_WHOLE = matmul_model.Tile(128, 64, 4.2e12)
_HALF = matmul_model.Tile(64, 64, 3.2e12)

# Guesses; decision 0015 has what was predicted with them, and measured.
RELEASE_S = 3e-6  # a flag's release: all that the SM has stored must have arrived
LOAD_S = 0.4e-6  # what has come of two ranks, out of the L2
STORE_S = 0.5e-6  # to the result


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a call is told, with the time that the model expects.

    Attributes:
        protocol: "ll" (words with their epoch, in mailboxes) or "simple" (scratch and flags).
        num_blocks: thread blocks, whole clusters, the same on every rank.
        split_tiles: how many of the last tiles are cut along k.
        split: parts of each of those, and blocks of a cluster.
        scratch_bytes: for what the peers send, by "simple".
        seconds: the expected time.
    """

    protocol: str
    num_blocks: int
    split_tiles: int
    split: int
    scratch_bytes: int
    seconds: float


def choose(
    hardware: Hardware,
    m: int,
    p: int,
    k: int,
    num_ranks: int,
    *,
    all_reduce: bool = True,
    num_sms: int | None = None,
    protocol: str | None = None,
) -> Plan | None:
    """The plan for x [m, k] times w [k, p], in 16 bits, summed over ranks; None if there is none.

    Args:
        hardware: the GPU and its links.
        m: rows of x.
        p: columns of w.
        k: this rank's share of the sum.
        num_ranks: ranks.
        all_reduce: every rank gets the whole sum, and not its share of the rows alone.
        num_sms: SMs to be used, if not all.
        protocol: the one to be used; None for the faster one.
    """
    if why_not(hardware, m, p, num_ranks, all_reduce) is not None:
        return None
    tile = _HALF if 2 * m <= MOST_ROWS else _WHOLE
    product = min(
        matmul_model.candidates_of(tile, m, p, k, num_sms or hardware.num_sms),
        key=lambda plan: plan.seconds,
    )
    plans = []
    for name in ("ll", "simple"):
        if protocol not in (None, name) or p > most_cols(hardware, m, num_ranks, all_reduce, name):
            continue
        scratch = (
            (num_ranks - 1) * num_strips(m, p, num_ranks, all_reduce) * STRIP_BYTES
            if name == "simple"
            else 0
        )
        seconds = _seconds(
            hardware, m if all_reduce else m // num_ranks, p, num_ranks, product, name
        )
        plans.append(
            Plan(name, product.num_blocks, product.split_tiles, product.split, scratch, seconds)
        )
    return min(plans, key=lambda plan: plan.seconds, default=None)


def why_not(hardware: Hardware, m: int, p: int, num_ranks: int, all_reduce: bool) -> str | None:
    """Why the kernel cannot take these sizes; None if it can."""
    if m > MOST_ROWS:
        return f"{m} rows; the kernel for few rows takes at most {MOST_ROWS}"
    if num_ranks > MOST_RANKS:
        return f"{num_ranks} ranks; the kernel for few rows adds up at most {MOST_RANKS}"
    most = max(most_cols(hardware, m, num_ranks, all_reduce, name) for name in ("ll", "simple"))
    if p > most:
        return (
            f"{p} columns of {m} rows; the kernel for few rows takes at most {most} there, with "
            f"{num_ranks} ranks"
        )
    return None


def most_cols(hardware: Hardware, m: int, num_ranks: int, all_reduce: bool, protocol: str) -> int:
    """Columns for whose strips there is room in a mailbox, or are flags."""
    most = TILE_FLAGS // num_ranks
    if protocol == "ll":
        most = hardware.ll_max_bytes(num_ranks) // STRIP_BYTES
    return most // num_strips(m, 1, num_ranks, all_reduce) * STRIP_COLS


def num_strips(m: int, p: int, num_ranks: int, all_reduce: bool) -> int:
    """What a rank sends each peer; a share of the rows may begin and end within a strip."""
    share = m if all_reduce else m // num_ranks
    if not all_reduce and share % STRIP_ROWS:
        share += STRIP_ROWS - 1
    return _ceil(share, STRIP_ROWS) * _ceil(p, STRIP_COLS)


def _seconds(
    hardware: Hardware, m: int, p: int, num_ranks: int, product: matmul_model.Plan, protocol: str
) -> float:
    sent = (num_ranks - 1) * 2 * m * p
    if protocol == "ll":
        link_s, release_s = sent / hardware.ll_bandwidth, 0.0
    else:
        link_s, release_s = sent / hardware.reduce_bandwidth, RELEASE_S
    # Of the tiles of a block the last leaves when there is nothing else to do, and the others under
    # the products that follow.
    tiles = _ceil(
        _ceil(p, TILE_COLS) + (product.split - 1) * product.split_tiles, product.num_blocks
    )
    moved = max(product.seconds + link_s / tiles, product.seconds / tiles + link_s)
    last_s = release_s + hardware.flag_latency + _ceil(num_ranks, 2) * LOAD_S + STORE_S
    return moved + last_s


def _ceil(x: int, by: int) -> int:
    return -(-x // by)

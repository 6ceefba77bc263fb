"""What each candidate of an op should cost, and the cheapest: pure functions over a Hardware.

An estimate is the time of the slowest resource (link, HBM or drain) plus the latencies that nothing
hides. It never falls below bytes / link, and never falls when the message grows.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Iterator

from pk_jax._tuning.hardware import Curve, Hardware

# Block counts to consider, besides one for each SM, which is what a kernel starts of itself: that
# one is given as 0, right for a GPU of any size. Hardware.block_overhead makes few the cheapest
# where few do.
_BLOCKS = (1, 2, 4, 8, 16, 64)

# Trips over the link that nothing hides. Low latency: data and its arrival are one word. Simple:
# the invitation before the data, then the acknowledgement of the last write, and its announcement.
_LL_TRIPS = 1
_SIMPLE_TRIPS = 3

# How the copy-engine path cuts a part into chunks, and how many blocks place them in the result.
CHUNKS = 16
CHUNK_BYTES = (1 << 20, 16 << 20)
_DRAIN_BLOCKS = 32


@dataclasses.dataclass(frozen=True)
class Choice:
    """One way to run a collective and its predicted time.

    Attributes:
        mechanism: "register", "tma" or "copy_engine".
        protocol: "ll" (each word carries its epoch) or "simple" (into the peer's result after an
            address handshake).
        num_blocks: blocks that move data, with the copy engine those that empty the landing buffer;
            0 leaves it to the kernel: one for each SM, a thread a word by ll, 32 beside the copies.
        seconds: predicted time of one call.
    """

    mechanism: str
    protocol: str
    num_blocks: int
    seconds: float


def all_gather_candidates(
    hardware: Hardware,
    bytes_per_rank: int,
    num_ranks: int,
    inner_bytes: int,
    num_blocks: int | None = None,
) -> list[Choice]:
    """Every way to gather, cheapest first.

    Args:
        hardware: the machine.
        bytes_per_rank: operand bytes of one rank.
        num_ranks: ranks in a group.
        inner_bytes: contiguous bytes of the operand in the result: no bulk copy is longer, and all
            must divide it.
        num_blocks: how many blocks move data; None considers several numbers.
    """
    choices = list(_stores(hardware, bytes_per_rank, num_ranks, inner_bytes, num_blocks))
    choices.append(_copies(hardware, bytes_per_rank, num_ranks, num_blocks))
    return sorted(choices, key=lambda choice: choice.seconds)


def choose_all_gather(
    hardware: Hardware,
    bytes_per_rank: int,
    num_ranks: int,
    inner_bytes: int,
    mechanism: str | None = None,
    num_blocks: int | None = None,
) -> Choice:
    """The cheapest candidate, or the cheapest of the given mechanism or number of blocks.

    Raises:
        ValueError: the mechanism cannot gather this operand.
    """
    candidates = all_gather_candidates(hardware, bytes_per_rank, num_ranks, inner_bytes, num_blocks)
    for choice in candidates:
        if mechanism in (None, choice.mechanism):
            return choice
    possible = sorted({choice.mechanism for choice in candidates})
    raise ValueError(
        f"all_gather cannot honour config.mechanism={mechanism!r} for blocks of {inner_bytes} "
        f"contiguous bytes (bulk copies need a multiple of {hardware.tma_alignment}); "
        f"choose one of {possible}"
    )


def _stores(
    hardware: Hardware,
    bytes_per_rank: int,
    num_ranks: int,
    inner_bytes: int,
    num_blocks: int | None,
) -> Iterator[Choice]:
    """The candidates in which SMs move the data."""
    received = bytes_per_rank * (num_ranks - 1)
    # Own and remote shards alike are read once and written once on some GPU.
    local = 2 * bytes_per_rank * num_ranks
    if bytes_per_rank <= hardware.ll_max_bytes:
        # By default a thread sends one word, and the blocks together as fast as the link takes it.
        rate = hardware.ll_bandwidth
        if num_blocks is not None:
            rate = min(rate, _rate(hardware, "register", num_blocks) / 2)
        seconds = _seconds(hardware, received / rate, local, _LL_TRIPS, num_blocks or 0)
        yield Choice("register", "ll", num_blocks or 0, seconds)
    block_counts = {blocks: blocks for blocks in _BLOCKS} | {0: hardware.num_sms}
    if num_blocks is not None:
        block_counts = {num_blocks: num_blocks}
    for mechanism in ("register", "tma"):
        share = 1.0
        if mechanism == "tma":
            if inner_bytes % hardware.tma_alignment:
                continue
            # A tile is longer than what the full rate needs, so the row sets the length of copies.
            share = min(1.0, inner_bytes / hardware.tma_full_rate_bytes)
        for asked, blocks in block_counts.items():
            link = received / (share * _rate(hardware, mechanism, blocks)) if received else 0.0
            seconds = _seconds(hardware, link, local, _SIMPLE_TRIPS, blocks)
            yield Choice(mechanism, "simple", asked, seconds)


def _copies(
    hardware: Hardware, bytes_per_rank: int, num_ranks: int, num_blocks: int | None
) -> Choice:
    """The candidate in which copy engines move the data, chunk after chunk, and SMs place it."""
    # The walk of cuda/mechanism/copy_engine.h, without its rounding.
    chunk = min(max(bytes_per_rank / CHUNKS, CHUNK_BYTES[0]), CHUNK_BYTES[1])
    one = _copy_seconds(hardware.copy_engine_bandwidth, chunk) + hardware.copy_overhead
    pushes = (num_ranks - 1) * max(bytes_per_rank / chunk, 1.0)
    # The drain goes on beside the copies. A block reads and writes its own memory at least as fast
    # as it stores to a peer, and no link holds many of them back.
    first_blocks, first_rate = hardware.store_bandwidth["register"][0]
    drain_rate = first_rate / first_blocks * (num_blocks or _DRAIN_BLOCKS)
    moved = max(pushes * one, bytes_per_rank * num_ranks / drain_rate)
    # Every received shard passes the landing buffer: written by the copy, read and written again
    # by the drain.
    local = 2 * bytes_per_rank * num_ranks + 2 * bytes_per_rank * (num_ranks - 1)
    seconds = _seconds(hardware, moved, local, _SIMPLE_TRIPS, num_blocks or 0)
    return Choice("copy_engine", "simple", num_blocks or 0, seconds + hardware.copy_setup)


def _seconds(hardware: Hardware, moving: float, local: int, trips: int, blocks: int) -> float:
    """The slower of what moves the data and HBM, after what nothing hides: launch, blocks, trips.

    Args:
        hardware: the machine.
        moving: seconds that the link, or what feeds it, is busy.
        local: bytes read and written in the HBM of one GPU.
        trips: flags over the link, one after another.
        blocks: blocks that move data.
    """
    fixed = hardware.launch_overhead + blocks * hardware.block_overhead
    return fixed + trips * hardware.flag_latency + max(moving, local / hardware.hbm_bandwidth)


def _rate(hardware: Hardware, mechanism: str, blocks: int) -> float:
    """Bytes per second of `blocks` blocks: linear between the measured points."""
    points = hardware.store_bandwidth[mechanism]
    above = bisect.bisect_left(points, blocks, key=lambda point: point[0])
    if above == len(points):
        return points[-1][1]
    if above == 0:
        return points[0][1] * blocks / points[0][0]
    (x0, y0), (x1, y1) = points[above - 1], points[above]
    return y0 + (y1 - y0) * (blocks - x0) / (x1 - x0)


def _copy_seconds(curve: Curve, num_bytes: float) -> float:
    """Time of one copy: linear between the measured points in time, not in rate.

    So a longer copy never takes less time; below the first point the time is the latency that the
    first point shows, beyond the last one its rate holds.
    """
    points = [(size, size / rate) for size, rate in curve]
    if num_bytes <= points[0][0]:
        return points[0][1]
    for (x0, t0), (x1, t1) in itertools.pairwise(points):
        if num_bytes <= x1:
            return t0 + (t1 - t0) * (num_bytes - x0) / (x1 - x0)
    return num_bytes / curve[-1][1]

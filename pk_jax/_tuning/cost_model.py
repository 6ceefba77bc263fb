"""What each candidate of an op should cost, and the cheapest: pure functions over a Hardware.

An estimate is the time of the slowest resource (link or HBM) plus the latencies that nothing
hides. It never falls below bytes / link, and never falls when the message grows.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Iterator

from pk_jax._tuning.hardware import Curve, Hardware

# Block counts to consider, besides one for each SM. Few where few do: equal times go to the fewest.
_BLOCKS = (1, 2, 4, 8, 16, 64)

# Trips over the link that nothing hides. Low latency: data and its arrival are one word. Simple:
# the invitation before the data, then the acknowledgement of the last write, and its announcement.
_LL_TRIPS = 1
_SIMPLE_TRIPS = 3

# How the copy-engine path cuts a part into chunks.
_CHUNKS = 16
_CHUNK_BYTES = (1 << 20, 16 << 20)


@dataclasses.dataclass(frozen=True)
class Choice:
    """One way to run a collective and its predicted time.

    Attributes:
        mechanism: "register", "tma" or "copy_engine".
        protocol: "ll" (each word carries its epoch) or "simple" (into the peer's result after an
            address handshake).
        num_blocks: blocks that move data; 0 for the copy engine, and for ll where the kernel has a
            thread a word.
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
    """Every way to gather, cheapest first; equal times in favour of fewer blocks.

    Args:
        hardware: the machine.
        bytes_per_rank: operand bytes of one rank.
        num_ranks: ranks in a group.
        inner_bytes: contiguous bytes of the operand in the result: what bulk copies must divide.
        num_blocks: how many blocks move data; None considers several numbers.
    """
    choices = list(_stores(hardware, bytes_per_rank, num_ranks, inner_bytes, num_blocks))
    if num_blocks is None:
        choices.append(_copies(hardware, bytes_per_rank, num_ranks))
    return sorted(choices, key=lambda choice: (choice.seconds, choice.num_blocks))


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
    if bytes_per_rank <= hardware.ll_max_bytes:
        # By default a thread sends one word, and the blocks together as fast as the link takes it.
        rate = hardware.ll_bandwidth
        if num_blocks is not None:
            rate = min(rate, _rate(hardware, "register", num_blocks) / 2)
        link = received / rate
        seconds = _seconds(hardware, bytes_per_rank, num_ranks, link, _LL_TRIPS, num_blocks or 0)
        yield Choice("register", "ll", num_blocks or 0, seconds)
    block_counts = (*_BLOCKS, hardware.num_sms) if num_blocks is None else (num_blocks,)
    for mechanism in ("register", "tma"):
        if mechanism == "tma" and inner_bytes % hardware.tma_alignment:
            continue
        for blocks in block_counts:
            link = received / _rate(hardware, mechanism, blocks)
            seconds = _seconds(hardware, bytes_per_rank, num_ranks, link, _SIMPLE_TRIPS, blocks)
            yield Choice(mechanism, "simple", blocks, seconds)


def _copies(hardware: Hardware, bytes_per_rank: int, num_ranks: int) -> Choice:
    """The candidate in which copy engines move the data, chunk after chunk."""
    # The walk of cuda/mechanism/copy_engine.h, without its rounding.
    chunk = min(max(bytes_per_rank / _CHUNKS, _CHUNK_BYTES[0]), _CHUNK_BYTES[1])
    one = _copy_seconds(hardware.copy_engine_bandwidth, chunk) + hardware.copy_overhead
    pushes = (num_ranks - 1) * max(bytes_per_rank / chunk, 1.0)
    seconds = _seconds(hardware, bytes_per_rank, num_ranks, pushes * one, _SIMPLE_TRIPS, 0)
    return Choice("copy_engine", "simple", 0, seconds + hardware.copy_setup)


def _seconds(
    hardware: Hardware,
    bytes_per_rank: int,
    num_ranks: int,
    link: float,
    trips: int,
    blocks: int,
) -> float:
    """The slower of link and HBM, after what nothing hides: launch, blocks, trips."""
    # Own and remote shards alike are read once and written once on some GPU.
    local = 2 * bytes_per_rank * num_ranks / hardware.hbm_bandwidth
    fixed = hardware.launch_overhead + blocks * hardware.block_overhead
    return fixed + trips * hardware.flag_latency + max(link, local)


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

"""What each candidate of an op should cost, and the cheapest: pure functions over a Hardware.

Whatever the op, a way to run it is a `Traffic`: bytes over the link, bytes of HBM, trips, scratch.
An estimate is the time of the slowest resource (link, HBM or drain) plus the latencies that nothing
hides. It never falls below bytes / link, and never falls when the message grows.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Iterator

from pk_jax._tuning.hardware import GIB, Curve, Hardware

# Block counts to consider, besides one for each SM, which is what a kernel starts of itself: that
# one is given as 0, right for a GPU of any size. Hardware.block_overhead makes few the cheapest
# where few do.
_BLOCKS = (1, 2, 4, 8, 16, 64)

# Trips over the link that nothing hides. Low latency: data and its arrival are one word. Simple:
# the invitation before the data, then the acknowledgement of the last write, and its announcement
# (of a sum: the flag of the data, and the announcement that its scratch is read). Two shots: flag
# and acknowledgement once more for the second.
_LL_TRIPS = 1
_SIMPLE_TRIPS = 3
_TWO_SHOT_TRIPS = 5

# A share of a two-shot psum starts on a line of its own.
SHARE_BYTES = 128

# A candidate whose scratch is larger is chosen only if none does with less.
MAX_SCRATCH_BYTES = GIB

# How the copy-engine path cuts a part into chunks, and how many blocks place them in the result.
CHUNKS = 16
CHUNK_BYTES = (1 << 20, 16 << 20)
_DRAIN_BLOCKS = 32

# The mechanisms that each op has kernels for. A sum has no choice under the simple protocol: bulk
# copies, or registers where rows are too short for them.
MECHANISMS = {
    "all_gather": ("copy_engine", "tma", "register"),
    "all_to_all": ("tma", "register"),
    "ppermute": ("tma", "register"),
    "psum": ("tma", "register"),
    "psum_scatter": ("tma", "register"),
}
# A block of a sum combines what another pushes to it: all SMs take part.
_SUMS = ("psum", "psum_scatter")


@dataclasses.dataclass(frozen=True)
class Work:
    """One call of a collective, as far as its time depends on it.

    Attributes:
        op: a key of MECHANISMS; pmax and pmin are "psum".
        num_bytes: operand bytes of one rank.
        num_ranks: ranks in a group.
        inner_bytes: bytes that are contiguous both where they come from and where they go: no bulk
            copy is longer, and all must divide it.
    """

    op: str
    num_bytes: int
    num_ranks: int
    inner_bytes: int


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one algorithm for a call asks of each GPU.

    Attributes:
        link_bytes: sent to all peers together, and received from them.
        peer_bytes: sent to one peer.
        hbm_bytes: read and written in the GPU's own memory.
        trips: flags over the link, one after another, under the simple protocol.
        algorithm: "one_shot" or "two_shot" for a psum, else "".
        scratch_bytes: what arrives before it is summed, under the simple protocol.
    """

    link_bytes: int
    peer_bytes: int
    hbm_bytes: int
    trips: int = _SIMPLE_TRIPS
    algorithm: str = ""
    scratch_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Choice:
    """One way to run a collective and its predicted time.

    Attributes:
        mechanism: "register", "tma" or "copy_engine".
        protocol: "ll" (each word carries its epoch) or "simple" (into the peer's memory after an
            address handshake).
        num_blocks: blocks that move data, with the copy engine those that empty the landing buffer;
            0 leaves it to the kernel: one for each SM, a thread a word by ll, 32 beside the copies.
        seconds: predicted time of one call.
        algorithm: "one_shot" or "two_shot" for a psum, else "".
        scratch_bytes: memory that the call takes beside operand and result.
    """

    mechanism: str
    protocol: str
    num_blocks: int
    seconds: float
    algorithm: str = ""
    scratch_bytes: int = 0


def traffics(work: Work) -> list[Traffic]:
    """The algorithms there are for a call."""
    n, size = work.num_ranks, work.num_bytes
    peers = n - 1
    if work.op == "all_gather":
        # Own and remote shards alike are read once and written once on some GPU.
        return [Traffic(peers * size, size, 2 * n * size)]
    if work.op == "all_to_all":
        return [Traffic(peers * size // n, size // n, 2 * size)]
    if work.op == "ppermute":
        return [Traffic(size, size, 2 * size)]
    # A sum reads what it sends, has it written into its scratch by the peers, reads that and its
    # own part, and writes the result.
    if work.op == "psum_scatter":
        part = size // n
        hbm = (3 * n - 1) * part
        return [Traffic(peers * part, part, hbm, scratch_bytes=peers * slot_bytes(part))]
    if work.op == "psum":
        share = share_bytes(size, n)
        return [
            Traffic(
                peers * size,
                size,
                (2 * n + 1) * size,
                _SIMPLE_TRIPS,
                "one_shot",
                peers * slot_bytes(size),
            ),
            Traffic(
                2 * peers * share,
                share,
                size + (3 * n - 1) * share,
                _TWO_SHOT_TRIPS,
                "two_shot",
                peers * share,
            ),
        ]
    raise KeyError(f"no cost model for {work.op!r}; there are {list(MECHANISMS)}")


def share_bytes(num_bytes: int, num_ranks: int) -> int:
    """Bytes that one rank sums in a two-shot psum."""
    return -(-num_bytes // (num_ranks * SHARE_BYTES)) * SHARE_BYTES


def slot_bytes(part_bytes: int) -> int:
    """Bytes that a peer's part takes in the scratch, where each starts on a cache line."""
    return -(-part_bytes // SHARE_BYTES) * SHARE_BYTES


def candidates(hardware: Hardware, work: Work, num_blocks: int | None = None) -> list[Choice]:
    """Every way to run a call, cheapest first.

    Args:
        hardware: the machine.
        work: the call.
        num_blocks: how many blocks move data; None considers several numbers.
    """
    found = []
    for traffic in traffics(work):
        found += _stores(hardware, work, traffic, num_blocks)
        if "copy_engine" in MECHANISMS[work.op]:
            found.append(_copies(hardware, work, traffic, num_blocks))
    return sorted(found, key=lambda choice: choice.seconds)


def choose(
    hardware: Hardware,
    work: Work,
    mechanism: str | None = None,
    num_blocks: int | None = None,
) -> Choice:
    """The cheapest candidate, or the cheapest of the given mechanism or number of blocks.

    One that needs more than MAX_SCRATCH_BYTES gives way to the one that needs least.

    Raises:
        ValueError: the mechanism cannot move this operand.
    """
    found = candidates(hardware, work, num_blocks)
    fitting = [choice for choice in found if mechanism in (None, choice.mechanism)]
    if not fitting:
        possible = sorted({choice.mechanism for choice in found})
        raise ValueError(
            f"{work.op} cannot honour config.mechanism={mechanism!r} for blocks of "
            f"{work.inner_bytes} contiguous bytes (bulk copies need a multiple of "
            f"{hardware.tma_alignment}); choose one of {possible}"
        )
    for choice in fitting:
        if choice.scratch_bytes <= MAX_SCRATCH_BYTES:
            return choice
    return min(fitting, key=lambda choice: choice.scratch_bytes)


def _stores(
    hardware: Hardware, work: Work, traffic: Traffic, num_blocks: int | None
) -> Iterator[Choice]:
    """The candidates in which SMs move the data."""
    fits = traffic.peer_bytes <= hardware.ll_max_bytes(work.num_ranks)
    if fits and traffic.algorithm != "two_shot":
        # By default a thread sends one word, and the blocks together as fast as the link takes it.
        rate = hardware.ll_bandwidth
        if num_blocks is not None:
            rate = min(rate, _rate(hardware, "register", num_blocks) / 2)
        moving = traffic.link_bytes / rate
        seconds = _seconds(hardware, moving, traffic.hbm_bytes, _LL_TRIPS, num_blocks or 0)
        yield Choice("register", "ll", num_blocks or 0, seconds, traffic.algorithm)
    block_counts = {0: hardware.num_sms}
    if work.op not in _SUMS:
        block_counts |= {blocks: blocks for blocks in _BLOCKS}
    if num_blocks is not None:
        block_counts = {num_blocks: num_blocks}
    for mechanism in ("register", "tma"):
        if mechanism not in MECHANISMS[work.op]:
            continue
        share, most = 1.0, hardware.link_bandwidth
        aligned = work.op == "psum" or work.inner_bytes % hardware.tma_alignment == 0
        if work.op in _SUMS:
            if aligned != (mechanism == "tma"):
                continue
            most = hardware.reduce_bandwidth
        elif mechanism == "tma":
            if not aligned:
                continue
            # A tile is longer than what the full rate needs, so the row sets the length of copies.
            share = min(1.0, work.inner_bytes / hardware.tma_full_rate_bytes)
        for asked, blocks in block_counts.items():
            rate = share * min(most, _rate(hardware, mechanism, blocks))
            moving = traffic.link_bytes / rate if traffic.link_bytes else 0.0
            seconds = _seconds(hardware, moving, traffic.hbm_bytes, traffic.trips, blocks)
            yield Choice(
                mechanism, "simple", asked, seconds, traffic.algorithm, traffic.scratch_bytes
            )


def _copies(hardware: Hardware, work: Work, traffic: Traffic, num_blocks: int | None) -> Choice:
    """The candidate in which copy engines move the data, chunk after chunk, and SMs place it."""
    part, peers = traffic.peer_bytes, work.num_ranks - 1
    # The walk of cuda/mechanism/copy_engine.h, without its rounding.
    chunk = min(max(part / CHUNKS, CHUNK_BYTES[0]), CHUNK_BYTES[1])
    one = _copy_seconds(hardware.copy_engine_bandwidth, chunk) + hardware.copy_overhead
    pushes = peers * max(part / chunk, 1.0)
    # The drain goes on beside the copies. A block reads and writes its own memory at least as fast
    # as it stores to a peer, and no link holds many of them back.
    first_blocks, first_rate = hardware.store_bandwidth["register"][0]
    drain_rate = first_rate / first_blocks * (num_blocks or _DRAIN_BLOCKS)
    moved = max(pushes * one, part * work.num_ranks / drain_rate)
    # Every received part passes the landing buffer: written by the copy, read and written again
    # by the drain.
    local = traffic.hbm_bytes + 2 * traffic.link_bytes
    seconds = _seconds(hardware, moved, local, traffic.trips, num_blocks or 0)
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

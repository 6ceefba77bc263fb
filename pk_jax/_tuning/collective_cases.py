"""Named shapes of the collectives that benchmarks time: sizes, layouts, what is to be reached."""

import dataclasses
import math

from pk_jax._tuning.hardware import GIB, KIB, MIB

PREFIXES = {
    "all_gather": "ag",
    "psum": "ar",
    "psum_scatter": "rs",
    "all_to_all": "a2a",
    "ppermute": "pp",
    "ragged_all_to_all": "ra2a",
}

# 1 KiB to 1 GiB in powers of four, and sizes between them that have a target.
SWEEP_BYTES = tuple(
    sorted({KIB << shift for shift in range(0, 21, 2)} | {8 * KIB, 512 * KIB, 32 * MIB})
)
QUICK_BYTES = (16 * KIB, MIB, 32 * MIB, 256 * MIB)


@dataclasses.dataclass(frozen=True)
class CollectiveCase:
    """One collective: shape and dtype of a rank's operand, and where the call cuts and joins it.

    Attributes:
        name: the case's name in ids and tables.
        op: the public function.
        shape: shape of one rank's operand.
        dtype: its dtype.
        axis: the dimension gathered, scattered or split.
        concat_axis: all_to_all: the dimension along which the received parts lie.
        updates: ragged_all_to_all: slices for each rank.
        leading: name of the case of the same bytes along the leading dimension, for one that
            works on another.
        reach_us: the time of a call to reach, where the target is a time.
        reach_gbps: the rate to reach, where it is a rate.
        tags: "sweep" (a size along the leading dimension) or "strided" (along another one), and
            "quick" (the few of a short run) and "target" (something is to be reached).
    """

    name: str
    op: str
    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    axis: int = 0
    concat_axis: int = 0
    updates: int = 1
    leading: str | None = None
    reach_us: float | None = None
    reach_gbps: float | None = None
    tags: frozenset[str] = frozenset()

    @property
    def nbytes(self) -> int:
        """Bytes of a rank's operand."""
        return math.prod(self.shape) * 2

    @property
    def strided(self) -> bool:
        """Whether the call works on another dimension than the leading one."""
        return self.axis != 0 or self.concat_axis != 0


# Time or rate to reach, by the bytes of a rank's operand.
_REACH_US = {
    ("psum", 8 * KIB): 4.5,
    ("all_gather", 16 * KIB): 4.5,
    ("psum", 512 * KIB): 8.0,
    ("psum", 4 * MIB): 20.0,
}
_REACH_GBPS = {("psum", 64 * MIB): 330.0} | {
    (op, size): 350.0
    for op in ("all_gather", "psum_scatter", "all_to_all", "ppermute")
    for size in (32 * MIB, 256 * MIB)
}


def _size_name(num_bytes: int) -> str:
    unit, suffix = next(u for u in ((GIB, "G"), (MIB, "M"), (KIB, "K")) if num_bytes >= u[0])
    return f"{num_bytes // unit}{suffix}"


def _sweep(op: str, num_bytes: int) -> CollectiveCase:
    # Rows of 2 KiB for the op that moves rows, else one dimension.
    elements = num_bytes // 2
    width = min(1024, max(16, elements // 64))
    shape = (elements // width, width) if op == "ragged_all_to_all" else (elements,)
    reach_us, reach_gbps = _REACH_US.get((op, num_bytes)), _REACH_GBPS.get((op, num_bytes))
    tags = {"sweep"}
    tags |= {"quick"} if num_bytes in QUICK_BYTES else set()
    tags |= {"target"} if reach_us or reach_gbps else set()
    name = f"{PREFIXES[op]}-{_size_name(num_bytes)}"
    return CollectiveCase(
        name, op, shape, reach_us=reach_us, reach_gbps=reach_gbps, tags=frozenset(tags)
    )


def _strided(
    op: str, suffix: str, shape: tuple[int, ...], axis: int, concat_axis: int | None = None
) -> CollectiveCase:
    size = _size_name(math.prod(shape) * 2)
    leading = f"{PREFIXES[op]}-{size}"
    tags = {"strided"} | ({"quick"} if suffix == "axis1" and size == "32M" else set())
    both = axis if concat_axis is None and op == "all_to_all" else concat_axis or 0
    return CollectiveCase(
        f"{leading}-{suffix}",
        op,
        shape,
        axis=axis,
        concat_axis=both,
        leading=leading,
        tags=frozenset(tags),
    )


_HEADS = (2, 2048, 16, 128)  # [B, S, H, D]

_STRIDED = (
    *(
        _strided(op, suffix, shape, axis)
        for op in ("all_gather", "psum_scatter", "all_to_all")
        for suffix, shape, axis in (
            ("axis1-narrow", (8192, 64), 1),  # rows of 128 bytes
            ("heads", _HEADS, 2),
            ("axis1", (4096, 4096), 1),
            ("axis1", (8192, 16384), 1),
        )
    ),
    # What attention over sequence-sharded heads asks for, and its way back.
    _strided("all_to_all", "heads-to-sequence", _HEADS, 2, 1),
    _strided("all_to_all", "sequence-to-heads", _HEADS, 1, 2),
)

COLLECTIVES = (*(_sweep(op, size) for op in PREFIXES for size in SWEEP_BYTES), *_STRIDED)


def collective_cases(op: str | None = None, tag: str | None = None) -> tuple[CollectiveCase, ...]:
    """The cases of an op and with a tag; of all ops, or with any tags, without one."""
    return tuple(
        case
        for case in COLLECTIVES
        if (op is None or case.op == op) and (tag is None or tag in case.tags)
    )

"""Named shapes: tests, benchmarks and the tuner all read them from here."""

import dataclasses

from pk_jax._tuning.hardware import GIB, KIB, MIB


@dataclasses.dataclass(frozen=True)
class AllGatherCase:
    """One all_gather: shape and dtype of a rank's operand, and the call's arguments.

    Attributes:
        name: the case's name in ids and tables.
        shape: shape of one rank's operand.
        dtype: its dtype.
        axis: as in all_gather.
        tiled: as in all_gather.
        tags: "ci" (small, every corner of the layout), "bench" (a size to time, along the leading
            axis) or "strided" (to time, along another axis), the last two also "quick" (the few
            that a short run times).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    axis: int = 0
    tiled: bool = True
    tags: tuple[str, ...] = ("ci",)


def _bench(num_bytes: int) -> AllGatherCase:
    unit, suffix = next(u for u in ((GIB, "G"), (MIB, "M"), (KIB, "K")) if num_bytes >= u[0])
    tags = ("bench", "quick") if num_bytes in _QUICK_BYTES else ("bench",)
    return AllGatherCase(f"ag-{num_bytes // unit}{suffix}", (num_bytes // 2,), tags=tags)


def _strided(name: str, shape: tuple[int, ...], axis: int, *more: str) -> AllGatherCase:
    return AllGatherCase(name, shape, axis=axis, tags=("strided", *more))


_QUICK_BYTES = (16 * KIB, 32 * MIB, 256 * MIB)
_BENCH_BYTES = (
    *(KIB << shift for shift in range(0, 20, 2)),  # 1 KiB, 4 KiB, ... 256 MiB
    32 * MIB,
    128 * MIB,
    GIB,
)

ALL_GATHER = (
    AllGatherCase("ag-scalar", (), "float32", tiled=False),
    AllGatherCase("ag-one", (1,), "float32"),
    AllGatherCase("ag-stacked", (5, 3), "float32", axis=0, tiled=False),
    AllGatherCase("ag-stacked-last", (5, 3), "float32", axis=2, tiled=False),
    AllGatherCase("ag-rows", (7, 64), "bfloat16"),
    AllGatherCase("ag-columns", (13, 40), "bfloat16", axis=1),
    AllGatherCase("ag-odd-columns", (7, 13), "float32", axis=1),
    AllGatherCase("ag-middle", (3, 4, 33), "float16", axis=1),
    AllGatherCase("ag-bytes", (4, 19), "int8", axis=1),
    AllGatherCase("ag-bools", (129,), "bool"),
    AllGatherCase("ag-complex", (6, 10), "complex64", axis=-1),
    AllGatherCase("ag-fp8", (31, 48), "float8_e4m3fn"),
    AllGatherCase("ag-ll-limit", (64 * KIB,), "bfloat16"),
    AllGatherCase("ag-past-ll", (64 * KIB + 1,), "bfloat16"),
    *(_bench(num_bytes) for num_bytes in sorted(_BENCH_BYTES)),
    _strided("ag-1M-axis1-narrow", (8192, 64), 1),  # rows of 128 bytes
    _strided("ag-16M-heads", (2, 2048, 16, 128), 2),  # [B, S, H, D] by H
    _strided("ag-32M-axis1", (4096, 4096), 1, "quick"),
    _strided("ag-256M-axis1", (8192, 16384), 1),
)


def all_gather_cases(tag: str | None = None) -> tuple[AllGatherCase, ...]:
    """The all_gather cases with a tag; all of them without one."""
    return tuple(case for case in ALL_GATHER if tag is None or tag in case.tags)


def all_gather_case(name: str) -> AllGatherCase:
    """The all_gather case of a name."""
    for case in ALL_GATHER:
        if case.name == name:
            return case
    raise KeyError(f"no all_gather case {name!r}; there are {[case.name for case in ALL_GATHER]}")

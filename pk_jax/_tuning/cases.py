"""Named shapes of small calls, every corner of the layout; what is timed: collective_cases.py."""

import dataclasses

from pk_jax._tuning.hardware import KIB


@dataclasses.dataclass(frozen=True)
class AllGatherCase:
    """One all_gather: shape and dtype of a rank's operand, and the call's arguments.

    Attributes:
        name: the case's name in ids and tables.
        shape: shape of one rank's operand.
        dtype: its dtype.
        axis: as in all_gather.
        tiled: as in all_gather.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "bfloat16"
    axis: int = 0
    tiled: bool = True


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
)

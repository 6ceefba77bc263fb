"""Named shapes of matrix products fused with a collective, that benchmarks time."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class GatherCase:
    """One all_gather_matmul: [m, k] of all ranks together, times [k, p] of each.

    Attributes:
        name: the case's name in ids and tables.
        m: rows of all ranks.
        p: columns of a rank's weight.
        k: what is summed over.
        tags: "target" (the speed to reach is fixed for it).
    """

    name: str
    m: int
    p: int
    k: int
    tags: frozenset[str] = frozenset({"target"})


ALL_GATHER_MATMULS = (
    GatherCase("agmm-70b-qkv", 8192, 1280, 8192),
    GatherCase("agmm-70b-up", 8192, 7168, 8192),
    GatherCase("agmm-8b-up", 8192, 3584, 4096),
    GatherCase("agmm-8192", 8192, 4096, 8192),
    GatherCase("agmm-2048", 2048, 4096, 4096),
    GatherCase("agmm-m512", 512, 7168, 8192),
)


@dataclasses.dataclass(frozen=True)
class ReduceCase:
    """One matmul_reduce_scatter or matmul_all_reduce: [m, k] of each rank, times its [k, p].

    Attributes:
        name: the case's name in ids and tables.
        m: rows of the product.
        p: its columns.
        k: a rank's share of what is summed over.
        all_reduce: every rank gets all rows.
        tags: "target" (the speed to reach is fixed for it).
    """

    name: str
    m: int
    p: int
    k: int
    all_reduce: bool = False
    tags: frozenset[str] = frozenset({"target"})


MATMUL_REDUCE_SCATTERS = (
    ReduceCase("mmrs-70b-o", 8192, 8192, 1024),
    ReduceCase("mmrs-70b-down", 8192, 8192, 3584),
    ReduceCase("mmrs-8b-down", 8192, 4096, 1792),
    ReduceCase("mmrs-8192", 8192, 8192, 4096),
)
MATMUL_ALL_REDUCES = (
    ReduceCase("mmar-70b-o", 8192, 8192, 1024, all_reduce=True),
    ReduceCase("mmar-70b-down", 8192, 8192, 3584, all_reduce=True),
    ReduceCase("mmar-m1", 1, 8192, 3584, all_reduce=True),
    ReduceCase("mmar-m32", 32, 8192, 3584, all_reduce=True),
    ReduceCase("mmar-m128", 128, 8192, 3584, all_reduce=True),
)

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

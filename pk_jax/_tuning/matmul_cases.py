"""Named shapes of matrix products, plain and grouped, that benchmarks time."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class MatmulCase:
    """One product [m, k] @ [k, n].

    Attributes:
        name: the case's name in ids and tables.
        m: rows of the result.
        n: its columns.
        k: what is summed over.
        transpose_a: the first operand lies as [k, m].
        transpose_b: the second one lies as [n, k].
        activation: its name, with a bias before it; None for the product alone.
        dtype: of the operands; with "float8_e4m3fn" there are scales, a number for each row and
            column.
        tags: "plain" (many rows), "layout" (an operand transposed), "decode" (few rows),
            "epilogue", "float8".
    """

    name: str
    m: int
    n: int
    k: int
    transpose_a: bool = False
    transpose_b: bool = False
    activation: str | None = None
    dtype: str = "bfloat16"
    tags: frozenset[str] = frozenset()


_PLAIN = (
    (2048, 4096, 4096),
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (8192, 1280, 8192),
    (8192, 3584, 4096),
    (8192, 4096, 8192),
    (8192, 8192, 1024),
    (8192, 4096, 1792),
    (8192, 7168, 8192),
    (16384, 7168, 4096),
    (512, 7168, 8192),
)
_LAYOUTS = ((4096, 4096, 4096), (8192, 1280, 8192), (8192, 8192, 1024), (8192, 7168, 8192))
_EPILOGUES = ((8192, 8192, 1024), (8192, 3584, 4096), (16, 8192, 3584))
_FLOAT8 = (
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (8192, 7168, 8192),
    (8192, 1280, 8192),
    (8192, 8192, 1024),
    (16, 8192, 3584),
    (128, 8192, 3584),
)
_DECODE = tuple((m, 8192, 3584) for m in (1, 16, 32, 64, 128))


def _case(
    sizes: tuple[int, int, int],
    tag: str,
    transpose_a: bool = False,
    transpose_b: bool = False,
    activation: str | None = None,
    dtype: str = "bfloat16",
) -> MatmulCase:
    layout = "-" + "nt"[transpose_a] + "nt"[transpose_b] if tag == "layout" else ""
    kind = (f"-{activation}" if activation else "") + ("-fp8" if tag == "float8" else "")
    name = "mm-" + "x".join(map(str, sizes)) + layout + kind
    return MatmulCase(name, *sizes, transpose_a, transpose_b, activation, dtype, frozenset({tag}))


MATMULS = (
    *(_case(sizes, "plain") for sizes in _PLAIN),
    *(
        _case(sizes, "layout", *transposed)
        for sizes in _LAYOUTS
        for transposed in ((False, True), (True, False), (True, True))
    ),
    *(_case(sizes, "decode") for sizes in _DECODE),
    *(_case(sizes, "epilogue", activation="gelu") for sizes in _EPILOGUES),
    *(_case(sizes, "float8", transpose_b=True, dtype="float8_e4m3fn") for sizes in _FLOAT8),
)


@dataclasses.dataclass(frozen=True)
class GroupedCase:
    """One product of [m, k] and [groups, k, n] by groups of rows, all m of them in some group.

    Attributes:
        name: the case's name in ids and tables.
        m: rows of the result.
        n: its columns.
        k: what is summed over.
        num_groups: how many.
        sizes: how likely a row is to be in each: "uniform", "zipf" (the i-th largest group as
            1 / i), "half-empty" (uniform in one half, never in the other).
        tags: "grouped".
    """

    name: str
    m: int
    n: int
    k: int
    num_groups: int
    sizes: str = "uniform"
    tags: frozenset[str] = frozenset({"grouped"})


_DSV3 = (32768, 2048, 7168, 128)

GROUPED = (
    GroupedCase("gmm-dsv3", *_DSV3),
    GroupedCase("gmm-dsv3-zipf", *_DSV3, "zipf"),
    GroupedCase("gmm-dsv3-half-empty", *_DSV3, "half-empty"),
)

"""The custom calls of matmul_reduce_scatter and matmul_all_reduce, on the operands of one rank."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from pk_jax._primitives.matmul import ALIGNMENT, MOST_SIZE, padded
from pk_jax._tuning import matmul_reduce_model as model


def call(
    x: Any,
    w: Any,
    *,
    site: Mapping[str, Any],
    plan: model.Plan,
    transpose_w: bool,
    all_reduce: bool,
    outer: int = 1,
) -> Any:
    """The product of x and w, summed over ranks, inside a lowering rule.

    Args:
        x: [m, k], this rank's part along k; bfloat16 or float16.
        w: [k, p], or [p, k] with `transpose_w`; of the same dtype.
        site: what rules.call_site() says of the ranks.
        plan: what the model chose.
        transpose_w: whether w lies transposed.
        all_reduce: every rank gets the sum, and not its share of the rows alone.
        outer: matrices that x has one after the other, of whose rows each rank gets its share.

    Returns:
        [m, p], or [m / ranks, p], of all matrices one after the other: onto the part of the rank
        that adds up, in fp32, those of the others in rank order, rounded to the operands' dtype;
        the sum is rounded once.
    """
    (m, k), p = x.shape, w.shape[0] if transpose_w else w.shape[1]
    rows = m if all_reduce else m // int(site["group_size"])
    results = (
        jax.ShapeDtypeStruct((rows, p + -p % ALIGNMENT), x.dtype),
        jax.ShapeDtypeStruct((plan.scratch_bytes,), np.uint8),
    )
    target = "pk_jax_matmul_all_reduce" if all_reduce else "pk_jax_matmul_reduce_scatter"
    y, _ = jax.ffi.ffi_call(target, results)(
        padded(x),
        padded(w),
        **site,
        mechanism="tma",
        protocol="simple",
        num_blocks=np.int64(plan.num_blocks),
        lead=np.int64(plan.lead),
        outer=np.int64(outer),
        m=np.int64(m),
        k=np.int64(k),
        p=np.int64(p),
        transpose_w=np.bool_(transpose_w),
    )
    return y if p % ALIGNMENT == 0 else y[:, :p]


def why_not(
    m: int,
    k: int,
    p: int,
    num_ranks: int,
    dtypes: tuple[Any, Any, Any],
    all_reduce: bool,
    outer: int = 1,
) -> str | None:
    """Why the kernel cannot take these sizes, and dtypes of x, w and the result; None if it can."""
    if num_ranks > model.MOST_RANKS:
        return f"{num_ranks} ranks; the kernel adds up at most {model.MOST_RANKS}"
    if len({np.dtype(dtype) for dtype in dtypes}) > 1:
        names = ", ".join(np.dtype(dtype).name for dtype in dtypes)
        return f"dtypes {names} of x, w and the result; the kernel has one for all"
    share = m // outer // num_ranks
    if outer > 1 and share % model.TILE.rows:
        return (
            f"a rank's share of {share} rows in each of {outer} matrices; the kernel takes whole "
            f"tiles of {model.TILE.rows} rows there"
        )
    largest = max(m, k, p, num_ranks * model.rows_of_rank(m, num_ranks, all_reduce))
    if largest > MOST_SIZE:
        return f"a dimension of {largest} elements; the kernel counts to {MOST_SIZE}"
    return None

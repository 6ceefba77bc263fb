"""The custom calls of matmul_all_reduce and matmul_reduce_scatter for few rows of one rank."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from pk_jax._primitives.matmul import ALIGNMENT, padded
from pk_jax._tuning import few_rows_model as model


def call(
    x: Any,
    w: Any,
    *,
    site: Mapping[str, Any],
    plan: model.Plan,
    transpose_w: bool,
    all_reduce: bool,
) -> Any:
    """The product of x and w, summed over ranks, inside a lowering rule.

    Args:
        x: [m, k], this rank's part along k, of at most model.MOST_ROWS; bfloat16 or float16.
        w: [k, p], or [p, k] with `transpose_w`; of the same dtype.
        site: what rules.call_site() says of the ranks.
        plan: what the model chose.
        transpose_w: whether w lies transposed.
        all_reduce: every rank gets the sum, and not its share of the rows alone.

    Returns:
        [m, p], or [m / ranks, p]: partials rounded to the operands' dtype, added in fp32 in rank
        order, rounded once.
    """
    (m, k), p = x.shape, w.shape[0] if transpose_w else w.shape[1]
    rows = m if all_reduce else m // int(site["group_size"])
    results = [jax.ShapeDtypeStruct((rows, p + -p % ALIGNMENT), x.dtype)]
    if plan.protocol == "simple":
        results.append(jax.ShapeDtypeStruct((plan.scratch_bytes,), np.uint8))
    op = "matmul_all_reduce" if all_reduce else "matmul_reduce_scatter"
    y, *_ = jax.ffi.ffi_call(f"pk_jax_{op}_few_rows", results)(
        padded(x),
        padded(w),
        **site,
        mechanism="register",
        protocol=plan.protocol,
        num_blocks=np.int64(plan.num_blocks),
        split_tiles=np.int64(plan.split_tiles),
        split=np.int64(plan.split),
        m=np.int64(m),
        k=np.int64(k),
        p=np.int64(p),
        transpose_w=np.bool_(transpose_w),
    )
    return y if p % ALIGNMENT == 0 else y[:, :p]

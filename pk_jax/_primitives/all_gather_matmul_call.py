"""The custom call of all_gather_matmul, on the operands of one rank, and of several weights."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from pk_jax._primitives import matmul
from pk_jax._primitives.matmul import ALIGNMENT, MOST_SIZE, padded
from pk_jax._tuning import all_gather_matmul_model as model
from pk_jax._tuning import matmul_model

# Of a channel, for all peers together; each matrix needs one at least.
TILE_FLAGS = 16384


def call(
    x: Any,
    weights: Sequence[Any],
    *,
    site: Mapping[str, Any],
    plan: model.Plan,
    transpose_w: bool,
    dtype: Any,
    num_sms: int,
    own_rows: bool = True,
) -> tuple[Any, list[Any]]:
    """Gathers x and multiplies it by each weight, inside a lowering rule.

    The widest weight is the one that the gathering hides behind; the products with the others
    follow, on a gathered matrix that is there.

    Args:
        x: [outer, m, k], this rank's rows of each of `outer` matrices.
        weights: [k, p] each, or [p, k] with `transpose_w`; at least one.
        site: what rules.call_site() says of the ranks.
        plan: of the widest weight.
        transpose_w: whether the weights lie transposed.
        dtype: of the products: that of the operands, or float32.
        num_sms: SMs that the products of further weights may use.
        own_rows: whether the rows of this rank are wanted in the gathered matrices. Without them
            these hold nothing of use where they would be.

    Returns:
        The gathered matrices [outer, n m, k], and the products [outer, n m, p].
    """
    (outer, m, k), num_ranks = x.shape, int(site["group_size"])
    widths = [w.shape[0] if transpose_w else w.shape[1] for w in weights]
    fused = int(np.argmax(widths))
    gathered, product = _fused(
        x,
        weights[fused],
        site=site,
        plan=plan,
        transpose_w=transpose_w,
        dtype=dtype,
        own_rows=own_rows or len(weights) > 1,
    )
    products = []
    for i, w in enumerate(weights):
        if i == fused:
            products.append(product)
            continue
        later = matmul_model.choose(len(gathered), widths[i], k, num_sms)
        products.append(
            matmul.call(
                gathered, w, transpose_a=False, transpose_b=transpose_w, dtype=dtype, plan=later
            )
        )
    shape = (outer, num_ranks * m)
    return gathered.reshape(*shape, k), [y.reshape(*shape, y.shape[1]) for y in products]


def why_not(outer: int, m: int, k: int, widths: Sequence[int], num_ranks: int) -> str | None:
    """Why the kernel cannot take these sizes; None if it can."""
    if outer > TILE_FLAGS // num_ranks:
        return (
            f"rows in {outer} matrices; with {num_ranks} ranks the kernel has flags for "
            f"{TILE_FLAGS // num_ranks}"
        )
    largest = max(num_ranks * outer * m, k, *widths)
    if largest > MOST_SIZE:
        return f"a dimension of {largest} elements; the kernel counts to {MOST_SIZE}"
    vectors = m * -(-k // ALIGNMENT)
    if vectors > MOST_SIZE:
        return f"{vectors} vectors of 16 bytes on a rank; the kernel counts to {MOST_SIZE}"
    return None


def _fused(
    x: Any,
    w: Any,
    *,
    site: Mapping[str, Any],
    plan: model.Plan,
    transpose_w: bool,
    dtype: Any,
    own_rows: bool,
) -> tuple[Any, Any]:
    (outer, m, k), p = x.shape, w.shape[0] if transpose_w else w.shape[1]
    rows = int(site["group_size"]) * outer * m
    results = (
        jax.ShapeDtypeStruct((rows, k + -k % ALIGNMENT), x.dtype),
        jax.ShapeDtypeStruct((rows, p + -p % ALIGNMENT), dtype),
    )
    gathered, product = jax.ffi.ffi_call("pk_jax_all_gather_matmul", results)(
        padded(x.reshape(outer * m, k)),
        padded(w),
        **site,
        mechanism="tma",
        protocol="simple",
        num_blocks=np.int64(plan.num_blocks),
        num_comm_blocks=np.int64(plan.num_comm_blocks),
        tile=plan.tile,
        outer=np.int64(outer),
        m=np.int64(m),
        k=np.int64(k),
        p=np.int64(p),
        transpose_w=np.bool_(transpose_w),
        own_rows=np.bool_(own_rows),
    )
    return _columns(gathered, k), _columns(product, p)


def _columns(x: Any, count: int) -> Any:
    return x if x.shape[1] == count else x[:, :count]

"""The product by groups of rows, for `products.py`: each plan against XLA's jax.lax.ragged_dot.

The sizes of the groups are drawn on the host with one seed and are device arrays, as a router
leaves them. A product in fp32 of all rows would take longer than the timing, so six groups are
checked, the largest among them, and that every number is finite.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import products

from pk_jax._primitives import ragged_dot as primitive
from pk_jax._reference import ragged_dot as reference
from pk_jax._tuning import ragged_dot_model
from pk_jax._tuning.matmul_cases import GroupedCase

CHECKED_GROUPS = 6


@functools.cache
def group_sizes(case: GroupedCase) -> tuple[int, ...]:
    """Rows of each group, m in all, with the largest group anywhere."""
    rng = np.random.default_rng(0)
    weights = np.ones(case.num_groups)
    if case.sizes == "zipf":
        weights /= np.arange(1, case.num_groups + 1)
    elif case.sizes == "half-empty":
        weights[case.num_groups // 2 :] = 0
    weights = rng.permutation(weights)
    return tuple(rng.multinomial(case.m, weights / weights.sum()).tolist())


def operands(case: GroupedCase) -> tuple[list[jax.Array], Any]:
    """Several first operands; the matrices and the sizes."""
    firsts = products.draw((case.m, case.k), seed=0)
    rhs = products.draw_one((case.num_groups, case.k, case.n), seed=1)
    return firsts, (rhs, jnp.asarray(group_sizes(case), jnp.int32))


def plans_of(case: GroupedCase) -> list[ragged_dot_model.Plan]:
    """The chosen plan, then the others; none where there are no kernels."""
    sms = products.num_sms()
    if sms is None:
        return []
    best = ragged_dot_model.choose(case.m, case.num_groups, sms)
    return [best, *(plan for plan in ragged_dot_model.candidates(sms) if plan != best)]


def ways(
    case: GroupedCase, plans: list[ragged_dot_model.Plan], forced: bool
) -> dict[str, Callable[[Any, Any], Any]]:
    """The ways to make the product, by name; "default" is what the model chooses."""
    params = {"transpose_b": False, "dtype": np.dtype(products.DTYPE)}

    def xla(lhs: Any, others: Any) -> Any:
        return reference.ragged_dot(lhs, *others, precision=None, **params)

    def call(lhs: Any, others: Any, plan: ragged_dot_model.Plan) -> Any:
        return primitive.call(lhs, *others, plan=plan, **params)

    return products.ways(xla, call, plans if forced else plans[:1], label)


def label(plan: ragged_dot_model.Plan) -> str:
    """Its tile."""
    return plan.tile


def checked(case: GroupedCase) -> list[int]:
    """The groups that are checked: the largest and others of all sizes down to the least rows."""
    by_size = sorted(range(case.num_groups), key=lambda i: -group_sizes(case)[i])
    filled = [i for i in by_size if group_sizes(case)[i]]
    places = np.linspace(0, len(filled) - 1, min(CHECKED_GROUPS, len(filled)))
    return [filled[round(place)] for place in places]


def error(case: GroupedCase, result: Any, first: Any, second: Any) -> float:
    """The largest relative norm of the error of a group; NaN if any number is not finite."""
    if not bool(_finite(result)):
        return float("nan")
    sizes = group_sizes(case)
    starts = np.cumsum((0, *sizes))
    return max(
        float(_error_of_group(result, first, second[0], int(starts[i]), i, sizes[i]))
        for i in checked(case)
    )


@jax.jit
def _finite(result: Any) -> Any:
    return jnp.isfinite(result).all()


@functools.partial(jax.jit, static_argnums=5)
def _error_of_group(result: Any, first: Any, rhs: Any, start: Any, group: Any, size: int) -> Any:
    rows, got = (jax.lax.dynamic_slice_in_dim(x, start, size) for x in (first, result))
    matrix = jax.lax.dynamic_index_in_dim(rhs, group, keepdims=False)
    want = jnp.matmul(rows.astype(jnp.float32), matrix.astype(jnp.float32), precision="highest")
    return jnp.linalg.norm(got.astype(jnp.float32) - want) / jnp.linalg.norm(want)


def about(case: GroupedCase) -> tuple[list[int], dict[str, Any]]:
    """What a record says of a case."""
    sizes = group_sizes(case)
    more = {
        "sizes": case.sizes,
        "largest_group": max(sizes),
        "empty_groups": sizes.count(0),
        "checked_groups": len(checked(case)),
    }
    return [case.m, case.n, case.k, case.num_groups], more


RAGGED_DOT = products.Op("ragged_dot", operands, plans_of, ways, label, error, about)

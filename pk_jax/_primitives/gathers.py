"""The primitives pk_all_gather and pk_psum_scatter, each the other's transpose.

Typing (shape, manual axis type, effects) is lax's: the abstract eval asks lax's primitive of the
same meaning. What is ours is the lowering. Both are pure, data in and data out, so that JAX and XLA
may drop, merge and replay them: all ranks run one program and do so alike.
"""

import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from pk_jax import _compat
from pk_jax._primitives import checks, hierarchical
from pk_jax._primitives.rules import Rules, choose, define, emit, inside, of_transpose, possible
from pk_jax._reference import collectives as reference
from pk_jax._tuning import cost_model
from pk_jax.config import Config, resolve

all_gather_p = Primitive("pk_all_gather")
psum_scatter_p = Primitive("pk_psum_scatter")


# all_gather


def all_gather(
    x: Any,
    axis_name: tuple[Any, ...],
    *,
    axis_index_groups: tuple[tuple[int, ...], ...] | None,
    axis: int,
    tiled: bool,
    to: str,
    implementation: str | None,
    config: Config,
    strict: bool = False,
) -> Any:
    """Binds pk_all_gather to one array; the arguments are checked.

    Args:
        x: the array.
        axis_name: the axes.
        axis_index_groups: the groups, if any.
        axis: dimension of the result, not negative.
        tiled: as in lax.
        to: as in lax.
        implementation: as in the public function.
        config: the resolved Config.
        strict: config.mechanism was asked for in the call, so that it must be able to move x.
    """
    size = checks.bound_size(axis_name, axis_index_groups)
    if not _compat.check_vma():
        # Without types there is one all_gather, the one whose transpose sums: results of an
        # untyped shard_map carry a cotangent on every rank.
        to = "varying"
    if to != "reduced":
        x = _compat.vary_over(axis_name, x)
    dtype = jnp.result_type(x)
    work = _all_gather_work(jnp.shape(x), dtype, axis, size)
    return all_gather_p.bind(
        x,
        axis_name=axis_name,
        axis_index_groups=axis_index_groups,
        axis_size=size,
        all_gather_dimension=axis,
        tiled=tiled,
        to=to,
        implementation=implementation,
        config=possible(config, work, dtype, strict),
    )


_LAX_ALL_GATHER = {
    "varying": _compat.all_gather_p,
    "invarying": _compat.all_gather_invariant_p,
    "reduced": _compat.all_gather_reduced_p,
}


def _as_lax(params: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The lax primitive of the same meaning and its parameters."""
    names = ["axis_name", "axis_size", "all_gather_dimension", "tiled"]
    if params["to"] == "varying":
        names.append("axis_index_groups")
    return _LAX_ALL_GATHER[params["to"]], {name: params[name] for name in names}


def _all_gather_abstract_eval(x: Any, **params: Any) -> Any:
    primitive, lax_params = _as_lax(params)
    return primitive.abstract_eval(x, **lax_params)


def _all_gather_transpose(cotangent: Any, x: Any, **params: Any) -> Any:
    if params["to"] != "varying":
        # A slice, or a sum left undone: nothing that pk could do better.
        primitive, lax_params = _as_lax(params)
        return ad.primitive_transposes[primitive](cotangent, x, **lax_params)
    return (
        psum_scatter(
            cotangent,
            params["axis_name"],
            scatter_dimension=params["all_gather_dimension"],
            axis_index_groups=params["axis_index_groups"],
            tiled=params["tiled"],
            implementation=of_transpose(params),
            # What holds where the transpose is taken: the config given speaks of the op itself.
            config=resolve("psum_scatter", None),
        ),
    )


def _all_gather_batch(axis_data: Any, operands: Any, dims: Any, **params: Any) -> Any:
    (x,), (d,) = operands, dims
    if axis_data.name in params["axis_name"]:
        # The gathered axis is the mapped one: no data crosses devices.
        primitive, lax_params = _as_lax(params)
        return batching.fancy_primitive_batchers[primitive](axis_data, operands, dims, **lax_params)
    if d is not None:
        axis = params["all_gather_dimension"]
        if d <= axis:
            params["all_gather_dimension"] = axis + 1
        elif not params["tiled"]:
            d += 1
    return all_gather_p.bind(x, **params), d


def _all_gather_reference(x: Any, **params: Any) -> Any:
    return reference.all_gather(
        x,
        params["axis_name"],
        axis_index_groups=params["axis_index_groups"],
        axis=params["all_gather_dimension"],
        tiled=params["tiled"],
        to=params["to"],
    )


def _all_gather_across_hosts(x: Any, *, inner: tuple[Any, ...], **params: Any) -> Any:
    return hierarchical.all_gather(
        x,
        params["axis_name"],
        inner,
        axis=params["all_gather_dimension"],
        tiled=params["tiled"],
        to=params["to"],
        gather_inside=functools.partial(all_gather, **inside(params)),
    )


def _all_gather_cuda(ctx: Any, x: Any, *, groups: list[list[int]], **params: Any) -> Any:
    """Emits the custom call: x seen as [outer, inner], the result as [outer, ranks, inner]."""
    (aval,) = ctx.avals_in
    axis = params["all_gather_dimension"]
    work = _all_gather_work(aval.shape, aval.dtype, axis, params["axis_size"])
    return emit(
        ctx,
        "all_gather",
        [x],
        groups,
        choose(ctx, work, params["config"]),
        {"outer": np.int64(math.prod(aval.shape[:axis]))},
    )


def _all_gather_work(
    shape: tuple[int, ...], dtype: Any, axis: int, num_ranks: int
) -> cost_model.Work:
    num_bytes = math.prod(shape) * dtype.itemsize
    return cost_model.Work(
        "all_gather", num_bytes, num_ranks, inner_bytes=math.prod(shape[axis:]) * dtype.itemsize
    )


# psum_scatter


def psum_scatter(
    x: Any,
    axis_name: tuple[Any, ...],
    *,
    scatter_dimension: int,
    axis_index_groups: tuple[tuple[int, ...], ...] | None,
    tiled: bool,
    implementation: str | None,
    config: Config,
) -> Any:
    """Binds pk_psum_scatter to one array; the arguments are checked."""
    axis_name = _compat.without_size_one_axes(axis_name)
    if not axis_name:
        return x
    if _compat.state_over(x, axis_name, "psum_scatter") == "unreduced":
        return _compat.parallel.psum_scatter(
            x,
            axis_name,
            scatter_dimension=scatter_dimension,
            axis_index_groups=axis_index_groups,
            tiled=tiled,
        )
    return psum_scatter_p.bind(
        _compat.vary_over(axis_name, x),
        axis_name=axis_name,
        axis_index_groups=axis_index_groups,
        axis_size=checks.bound_size(axis_name, axis_index_groups),
        scatter_dimension=scatter_dimension,
        tiled=tiled,
        implementation=implementation,
        config=config,
    )


def _psum_scatter_as_lax(params: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in params.items() if k not in ("implementation", "config")}


def _psum_scatter_abstract_eval(x: Any, **params: Any) -> Any:
    return _compat.reduce_scatter_p.abstract_eval(x, **_psum_scatter_as_lax(params))


def _psum_scatter_transpose(cotangent: Any, x: Any, **params: Any) -> Any:
    return (
        all_gather(
            cotangent,
            params["axis_name"],
            axis_index_groups=params["axis_index_groups"],
            axis=params["scatter_dimension"],
            tiled=params["tiled"],
            to="varying",
            implementation=of_transpose(params),
            config=resolve("all_gather", None),
        ),
    )


def _psum_scatter_batch(axis_data: Any, operands: Any, dims: Any, **params: Any) -> Any:
    (x,), (d,) = operands, dims
    if axis_data.name in params["axis_name"]:
        rule = batching.fancy_primitive_batchers[_compat.reduce_scatter_p]
        return rule(axis_data, operands, dims, **_psum_scatter_as_lax(params))
    if d is not None:
        axis = params["scatter_dimension"]
        if d <= axis:
            params["scatter_dimension"] = axis + 1
        elif not params["tiled"]:
            d -= 1
    return psum_scatter_p.bind(x, **params), d


def _psum_scatter_reference(x: Any, **params: Any) -> Any:
    return reference.psum_scatter(
        x,
        params["axis_name"],
        scatter_dimension=params["scatter_dimension"],
        axis_index_groups=params["axis_index_groups"],
        tiled=params["tiled"],
    )


def _psum_scatter_across_hosts(x: Any, *, inner: tuple[Any, ...], **params: Any) -> Any:
    return hierarchical.psum_scatter(
        x,
        params["axis_name"],
        inner,
        scatter_dimension=params["scatter_dimension"],
        tiled=params["tiled"],
        scatter_inside=functools.partial(psum_scatter, **inside(params)),
    )


def _psum_scatter_cuda(ctx: Any, x: Any, *, groups: list[list[int]], **params: Any) -> Any:
    """Emits the custom call: x seen as [outer, ranks, inner], the result as [outer, inner]."""
    (aval,) = ctx.avals_in
    dimension, size = params["scatter_dimension"], params["axis_size"]
    itemsize = aval.dtype.itemsize
    inner = math.prod(aval.shape[dimension:]) // size
    num_bytes = math.prod(aval.shape) * itemsize
    work = cost_model.Work("psum_scatter", num_bytes, size, inner * itemsize)
    return emit(
        ctx,
        "psum_scatter",
        [x],
        groups,
        choose(ctx, work, params["config"]),
        {"outer": np.int64(math.prod(aval.shape[:dimension])), "reduction": "sum"},
    )


define(
    all_gather_p,
    Rules(
        op="all_gather",
        abstract_eval=_all_gather_abstract_eval,
        transpose=_all_gather_transpose,
        batch=_all_gather_batch,
        reference=_all_gather_reference,
        emit_cuda=_all_gather_cuda,
        across_hosts=_all_gather_across_hosts,
    ),
)
define(
    psum_scatter_p,
    Rules(
        op="psum_scatter",
        abstract_eval=_psum_scatter_abstract_eval,
        transpose=_psum_scatter_transpose,
        batch=_psum_scatter_batch,
        reference=_psum_scatter_reference,
        emit_cuda=_psum_scatter_cuda,
        across_hosts=_psum_scatter_across_hosts,
    ),
)

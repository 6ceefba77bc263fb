"""The primitives pk_all_to_all and pk_ppermute: what one rank has is had by another afterwards.

Each is linear, and its transpose is the same op the other way.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching

from pk_jax import _compat
from pk_jax._primitives import checks
from pk_jax._primitives.rules import Rules, choose, define, emit, of_transpose, possible
from pk_jax._reference import collectives as reference
from pk_jax._tuning import cost_model
from pk_jax.config import Config

all_to_all_p = Primitive("pk_all_to_all")
ppermute_p = Primitive("pk_ppermute")


# all_to_all


class View(NamedTuple):
    """An all_to_all as the kernel sees it: what goes to one rank, as [batch, rows, inner].

    The parts for all ranks lie one behind another before `rows` in the operand and before `inner`
    in the result if split_first, else the other way round.
    """

    batch: int
    rows: int
    inner: int
    split_first: bool


def view(shape: tuple[int, ...], num_ranks: int, split_axis: int, concat_axis: int) -> View:
    """The view of a tiled all_to_all."""
    part = list(shape)
    part[split_axis] //= num_ranks
    low, high = sorted((split_axis, concat_axis))
    return View(
        math.prod(part[:low]),
        math.prod(part[low:high]),
        math.prod(part[high:]),
        split_axis <= concat_axis,
    )


def all_to_all(
    x: Any,
    axis_name: tuple[Any, ...],
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: tuple[tuple[int, ...], ...] | None,
    tiled: bool,
    implementation: str | None,
    config: Config,
    strict: bool = False,
) -> Any:
    """Binds pk_all_to_all to one array; the arguments are checked.

    The primitive is the tiled form: both dimensions are there before and after. The other form has
    a dimension of one element put in where the result gets its new one, and taken out where the
    operand had the one that is split.

    Args:
        x: the array.
        axis_name: the axes.
        split_axis: dimension that is cut, not negative.
        concat_axis: dimension of the result, not negative.
        axis_index_groups: the groups, if any.
        tiled: as in lax.
        implementation: as in the public function.
        config: the resolved Config.
        strict: config.mechanism was asked for in the call, so that it must be able to move x.
    """
    size = checks.bound_size(axis_name, axis_index_groups)
    checks.check_parts("all_to_all", "split_axis", jnp.shape(x), split_axis, size, axis_name, tiled)
    squeezed = not tiled and split_axis != concat_axis
    if squeezed:
        # concat_axis counts without the dimension that is split.
        if split_axis < concat_axis:
            concat_axis += 1
        else:
            split_axis += 1
        x = lax.expand_dims(x, (concat_axis,))
    dtype = jnp.result_type(x)
    work = _all_to_all_work(jnp.shape(x), dtype, size, split_axis, concat_axis)
    out = all_to_all_p.bind(
        _compat.vary_over(axis_name, x),
        axis_name=axis_name,
        axis_index_groups=axis_index_groups,
        axis_size=size,
        split_axis=split_axis,
        concat_axis=concat_axis,
        implementation=implementation,
        config=possible(config, work, dtype, strict),
    )
    return lax.squeeze(out, (split_axis,)) if squeezed else out


def _as_lax(params: dict[str, Any]) -> dict[str, Any]:
    names = ("axis_name", "axis_index_groups", "split_axis", "concat_axis")
    return {name: params[name] for name in names} | {"tiled": True}


def _all_to_all_abstract_eval(x: Any, **params: Any) -> Any:
    return _compat.all_to_all_p.abstract_eval(x, **_as_lax(params))


def _all_to_all_transpose(cotangent: Any, x: Any, **params: Any) -> Any:
    return (
        all_to_all(
            cotangent,
            params["axis_name"],
            params["concat_axis"],
            params["split_axis"],
            axis_index_groups=params["axis_index_groups"],
            tiled=True,
            implementation=of_transpose(params),
            config=params["config"],
        ),
    )


def _all_to_all_batch(axis_data: Any, operands: Any, dims: Any, **params: Any) -> Any:
    (x,), (d,) = operands, dims
    if axis_data.name in params["axis_name"]:
        rule = batching.fancy_primitive_batchers[_compat.all_to_all_p]
        return rule(axis_data, operands, dims, **_as_lax(params))
    if d is not None:
        for name in ("split_axis", "concat_axis"):
            params[name] += d <= params[name]
    return all_to_all_p.bind(x, **params), d


def _all_to_all_reference(x: Any, **params: Any) -> Any:
    return reference.all_to_all(x, **_as_lax(params))


def _all_to_all_cuda(ctx: Any, x: Any, *, groups: list[list[int]], **params: Any) -> Any:
    """Emits the custom call, which puts strided tiles straight in their place."""
    (aval,) = ctx.avals_in
    where = (params["axis_size"], params["split_axis"], params["concat_axis"])
    work = _all_to_all_work(aval.shape, aval.dtype, *where)
    seen = view(aval.shape, *where)
    attributes = {
        "batch": np.int64(seen.batch),
        "rows": np.int64(seen.rows),
        "split_first": np.int64(seen.split_first),
    }
    choice = choose(ctx, work, params["config"])
    return emit(ctx, "all_to_all", [x], groups, choice, attributes)


def _all_to_all_work(
    shape: tuple[int, ...], dtype: Any, num_ranks: int, split_axis: int, concat_axis: int
) -> cost_model.Work:
    inner = view(shape, num_ranks, split_axis, concat_axis).inner
    num_bytes = math.prod(shape) * dtype.itemsize
    return cost_model.Work("all_to_all", num_bytes, num_ranks, inner * dtype.itemsize)


# ppermute


def ppermute(
    x: Any,
    axis_name: tuple[Any, ...],
    perm: tuple[tuple[int, int], ...],
    *,
    implementation: str | None,
    config: Config,
    strict: bool = False,
) -> Any:
    """Binds pk_ppermute to one array; the arguments are checked."""
    dtype = jnp.result_type(x)
    work = _ppermute_work(jnp.shape(x), dtype, checks.bound_size(axis_name))
    return ppermute_p.bind(
        _compat.vary_over(axis_name, x),
        axis_name=axis_name,
        perm=perm,
        implementation=implementation,
        config=possible(config, work, dtype, strict),
    )


def _ppermute_abstract_eval(x: Any, *, axis_name: Any, perm: Any, **_: Any) -> Any:
    return _compat.ppermute_p.abstract_eval(x, axis_name=axis_name, perm=perm)


def _ppermute_transpose(cotangent: Any, x: Any, **params: Any) -> Any:
    back = tuple((to, source) for source, to in params["perm"])
    return (
        ppermute_p.bind(
            cotangent, **params | {"perm": back, "implementation": of_transpose(params)}
        ),
    )


def _ppermute_batch(axis_data: Any, operands: Any, dims: Any, **params: Any) -> Any:
    axis_name = params["axis_name"]
    if axis_data.name not in axis_name:
        return ppermute_p.bind(*operands, **params), *dims
    rest = tuple(axis for axis in axis_name if axis != axis_data.name)
    if rest:
        raise NotImplementedError(
            f"ppermute over the mapped axis {axis_data.name!r} of jax.vmap together with {rest} is "
            "not available; permute over one and then over the other"
        )
    # Not lax's rule, which knows only permutations of all ranks.
    x = batching.bdim_at_front(operands[0], dims[0], axis_data.size)
    sources = {to: source for source, to in params["perm"]}
    moved = x[np.array([sources.get(rank, 0) for rank in range(axis_data.size)])]
    for rank in set(range(axis_data.size)) - set(sources):
        moved = moved.at[rank].set(lax.full_like(moved[rank], 0))
    return moved, 0


def _ppermute_reference(x: Any, **params: Any) -> Any:
    return reference.ppermute(x, params["axis_name"], params["perm"])


def _ppermute_alone(x: Any, shape: tuple[int, ...], **params: Any) -> Any:
    return x if params["perm"] else lax.full_like(x, 0)


def _ppermute_cuda(ctx: Any, x: Any, *, groups: list[list[int]], **params: Any) -> Any:
    """Emits the custom call; the operand's shape does not matter to it."""
    if jax.config.jax_raise_on_ppermute_sort_diff and any(sorted(g) != g for g in groups):
        # As lax, whose ranks once were in the mesh's order whatever the tuple's.
        raise RuntimeError(
            f"ppermute: axis_name {params['axis_name']} is not in the order of the mesh's axes; "
            "name them in that order, or let ranks go by axis_name with "
            "jax.config.update('jax_raise_on_ppermute_sort_diff', False)"
        )
    (aval,) = ctx.avals_in
    size = len(groups[0])
    destinations = np.full(size, -1, np.int64)
    for source, to in params["perm"]:
        destinations[source] = to
    work = _ppermute_work(aval.shape, aval.dtype, size)
    choice = choose(ctx, work, params["config"])
    return emit(ctx, "ppermute", [x], groups, choice, {"destinations": destinations})


def _ppermute_work(shape: tuple[int, ...], dtype: Any, num_ranks: int) -> cost_model.Work:
    num_bytes = math.prod(shape) * dtype.itemsize
    return cost_model.Work("ppermute", num_bytes, num_ranks, num_bytes)


define(
    all_to_all_p,
    Rules(
        op="all_to_all",
        abstract_eval=_all_to_all_abstract_eval,
        batch=_all_to_all_batch,
        reference=_all_to_all_reference,
        emit_cuda=_all_to_all_cuda,
        transpose=_all_to_all_transpose,
    ),
)
define(
    ppermute_p,
    Rules(
        op="ppermute",
        abstract_eval=_ppermute_abstract_eval,
        batch=_ppermute_batch,
        reference=_ppermute_reference,
        emit_cuda=_ppermute_cuda,
        transpose=_ppermute_transpose,
        alone=_ppermute_alone,
    ),
)

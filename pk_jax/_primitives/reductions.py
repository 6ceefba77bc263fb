"""The primitives pk_psum, pk_pmax and pk_pmin: a reduction whose result every rank has.

As in lax, the sum is linear, and the others have no derivative. What its transpose is depends on
whether shard_map checks types. With types the result is known to be equal on all ranks, and the
transpose is a cast; without, every rank's result counts for itself, and it is the sum again.
"""

import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from pk_jax import _compat
from pk_jax._primitives import gathers, hierarchical
from pk_jax._primitives.rules import Rules, choose, define, emit, inside, of_transpose
from pk_jax._reference import collectives as reference
from pk_jax._tuning import cost_model
from pk_jax.config import Config

psum_p = Primitive("pk_psum")
pmax_p = Primitive("pk_pmax")
pmin_p = Primitive("pk_pmin")

_PRIMITIVES = {"psum": psum_p, "pmax": pmax_p, "pmin": pmin_p}
_LAX_PRIMITIVES = {"pmax": _compat.pmax_p, "pmin": _compat.pmin_p}
_REFERENCES = {"psum": reference.psum, "pmax": reference.pmax, "pmin": reference.pmin}


def reduce(
    op: str,
    x: Any,
    axes: tuple[Any, ...],
    *,
    asked: str | None = None,
    axis_index_groups: tuple[tuple[int, ...], ...] | None,
    implementation: str | None,
    config: Config,
) -> Any:
    """Binds the primitive of "psum", "pmax" or "pmin" to one array; the arguments are checked.

    What has a meaning in lax alone goes there: the sum of a constant, which stays one; array axes
    among the axes; an operand that is the unreduced sum of its ranks. A psum may have been `asked`
    for as a "pmean", which is what messages name then.
    """
    in_lax = functools.partial(getattr(_compat.parallel, op), axis_index_groups=axis_index_groups)
    if op == "psum" and not isinstance(x, Tracer):
        return in_lax(x, axes)
    positions = tuple(axis for axis in axes if isinstance(axis, int))
    if positions and (_compat.check_vma() or len(positions) == len(axes)):
        return in_lax(x, axes)
    if positions:
        x = in_lax(x, positions)
        axes = tuple(axis for axis in axes if not isinstance(axis, int))
    axes = _compat.without_size_one_axes(axes)
    if not axes:
        return x
    if _compat.state_over(x, axes, asked or op) == "unreduced":
        return in_lax(x, axes)
    params: dict[str, Any] = {"axes": axes, "axis_index_groups": axis_index_groups}
    params["asked"] = asked or op
    if op == "psum":
        params["typed"] = _compat.check_vma()
        if jnp.result_type(x) == jnp.bool_:
            x = lax.convert_element_type(x, jnp.int32)
    return _PRIMITIVES[op].bind(
        _compat.vary_over(axes, x), **params, implementation=implementation, config=config
    )


def _as_lax(op: str, params: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The lax primitive of the same meaning and its parameters."""
    if op == "psum" and params["typed"]:
        return _compat.psum_invariant_p, {"axes": params["axes"]}
    names = ("axes", "axis_index_groups")
    return _LAX_PRIMITIVES.get(op, _compat.psum_p), {name: params[name] for name in names}


def _abstract_eval(x: Any, *, op: str, **params: Any) -> Any:
    primitive, lax_params = _as_lax(op, params)
    return primitive.abstract_eval(x, **lax_params)


def _psum_transpose(cotangent: Any, x: Any, **params: Any) -> Any:
    if params["typed"]:
        primitive, lax_params = _as_lax("psum", params)
        return ad.primitive_transposes[primitive](cotangent, x, **lax_params)
    return (psum_p.bind(cotangent, **params | {"implementation": of_transpose(params)}),)


def _batch(axis_data: Any, operands: Any, dims: Any, *, op: str, **params: Any) -> Any:
    axes = params["axes"]
    if axis_data.name not in axes:
        return _PRIMITIVES[op].bind(*operands, **params), *dims
    # The mapped axis is reduced on each device, by lax's rule, before the others are across them.
    primitive, lax_params = _as_lax(op, params | {"axes": (axis_data.name,)})
    rule = batching.fancy_primitive_batchers[primitive]
    x, d = rule(axis_data, operands, dims, **lax_params)
    rest = tuple(axis for axis in axes if axis != axis_data.name)
    return (_PRIMITIVES[op].bind(x, **params | {"axes": rest}) if rest else x), d


def _reference(x: Any, *, op: str, **params: Any) -> Any:
    return _REFERENCES[op](x, params["axes"], axis_index_groups=params["axis_index_groups"])


def _across_hosts(x: Any, *, op: str, inner: tuple[Any, ...], **params: Any) -> Any:
    return hierarchical.reduce(
        op,
        x,
        params["axes"],
        inner,
        reduce_inside=functools.partial(reduce, op, **inside(params)),
        scatter_inside=functools.partial(gathers.psum_scatter, **inside(params)),
        gather_inside=functools.partial(gathers.all_gather, **inside(params)),
    )


def _cuda(ctx: Any, x: Any, *, op: str, groups: list[list[int]], **params: Any) -> Any:
    """Emits the custom call; the operand's shape does not matter to it."""
    (aval,) = ctx.avals_in
    num_bytes = math.prod(aval.shape) * aval.dtype.itemsize
    work = cost_model.Work("psum", num_bytes, len(groups[0]), num_bytes)
    choice = choose(ctx, work, params["config"])
    reduction = {"psum": "sum", "pmax": "max", "pmin": "min"}[op]
    attributes = {"reduction": reduction, "algorithm": choice.algorithm}
    return emit(ctx, "psum", [x], groups, choice, attributes)


for _op, _primitive in _PRIMITIVES.items():
    define(
        _primitive,
        Rules(
            op=_op,
            abstract_eval=functools.partial(_abstract_eval, op=_op),
            batch=functools.partial(_batch, op=_op),
            reference=functools.partial(_reference, op=_op),
            emit_cuda=functools.partial(_cuda, op=_op),
            across_hosts=functools.partial(_across_hosts, op=_op),
            transpose=_psum_transpose if _op == "psum" else None,
        ),
    )

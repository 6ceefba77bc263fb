"""The primitives pk_attention, pk_attention_tangent and pk_attention_backward.

The first gives a result and its log-sum-exp; the other two are its derivative, given these two, and
are linear: in the tangents of query, key and value, and in the cotangents of result and
log-sum-exp. Each is the other's transpose. So a gradient is one pk_attention and one
pk_attention_backward, each of which is a kernel where `attention_call.py` has one, with nothing
kept but the operands and the results of the first; and there are derivatives of every order and
both directions, which jax.custom_vjp would not give: those of the two linear ones, by what they are
linear in, are themselves, and by all else those of the reference.

`define` registers such a family, which ring attention is as well. Operands lead with the batch, so
that a map makes it longer: query, key, value, then for the linear ones result, log-sum-exp and the
(co)tangents, then the arrays of a `Places` that `given` names.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pk_jax import _compat, _selection
from pk_jax._primitives import attention_call, matmul, product_maps
from pk_jax._primitives.rules import fall_back, is_zero, no_tangent, of_transpose
from pk_jax._reference import attention as reference
from pk_jax._reference.attention import Places
from pk_jax.config import Config, resolve

OP = "attention"

# Of the linear ones: those in which they are not.
NUM_FIXED = 5


@dataclasses.dataclass(frozen=True)
class Family:
    """An attention and its two derivatives.

    Attributes:
        op: name of the op.
        rules: the three in JAX, of operands and parameters.
        forward: the primitive of the op.
        tangent: the linear one of tangents.
        backward: its transpose.
    """

    op: str
    rules: tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]
    forward: Primitive
    tangent: Primitive
    backward: Primitive


def make(op: str, *rules: Callable[..., Any]) -> Family:
    """The primitives of an op, not yet registered."""
    primitives = [Primitive(f"pk_{op}{suffix}") for suffix in ("", "_tangent", "_backward")]
    for primitive in primitives:
        primitive.multiple_results = True
    attend, tangent, backward = rules
    return Family(op, (attend, tangent, backward), *primitives)


def present(places: Places) -> tuple[tuple[str, ...], list[Any]]:
    """The names and the arrays of the places that there are: a parameter, and last operands."""
    found = {name: x for name, x in places._asdict().items() if x is not None}
    return tuple(found), list(found.values())


def places_of(given: tuple[str, ...], operands: Any) -> Places:
    return Places(**dict(zip(given, operands, strict=True)))


def _derived(family: Family, params: dict[str, Any], dtype: Any) -> dict[str, Any]:
    # Asking for "cuda", or for a knob, speaks of the op itself alone.
    return params | {
        "dtype": np.dtype(dtype),
        "implementation": of_transpose(params),
        "config": resolve(family.op, None),
    }


def _jvp(primals: Any, tangents: Any, *, family: Family, bind: Any, **params: Any) -> Any:
    outs = family.forward.bind(*primals, **params)
    if all(map(is_zero, tangents[:3])):
        return outs, list(map(no_tangent, outs))
    changes = map(ad.instantiate_zeros, tangents[:3])
    derived = _derived(family, params, params["dtype"])
    operands = (*primals[:3], *outs, *changes, *primals[3:])
    return outs, bind(family.tangent, *operands, **derived)


def _jvp_of_linear(
    primals: Any, tangents: Any, *, family: Family, bind: Any, primitive: Primitive, **params: Any
) -> Any:
    outs = primitive.bind(*primals, **params)
    fixed, linear, places = _parts(primals, params)
    changes, nonlinear_changes = tangents[NUM_FIXED : NUM_FIXED + len(linear)], tangents[:NUM_FIXED]
    rule = family.rules[1 if primitive is family.tangent else 2]
    results: list[Any] = list(map(no_tangent, outs))
    if not all(map(is_zero, changes)):
        results = bind(primitive, *fixed, *map(ad.instantiate_zeros, changes), *places, **params)
    if not all(map(is_zero, nonlinear_changes)):
        _, more = jax.jvp(
            lambda *xs: list(rule(*xs, *linear, *places, **params)),
            tuple(fixed),
            tuple(map(ad.instantiate_zeros, nonlinear_changes)),
        )
        results = list(map(ad.add_tangents, results, more))
    return outs, results


def _transpose(
    cotangents: Any, *operands: Any, family: Family, bind: Any, primitive: Primitive, **params: Any
) -> Any:
    fixed, linear, places = _parts(operands, params)
    wanted = [ad.is_undefined_primal(x) for x in linear]
    found: Any = [
        ad.Zero(x.aval.to_ct_aval()) if ad.is_undefined_primal(x) else None for x in linear
    ]
    if not all(map(is_zero, cotangents)):
        other = family.backward if primitive is family.tangent else family.tangent
        like = linear[0].aval if wanted[0] else jax.typeof(linear[0])
        cotangents = map(ad.instantiate_zeros, cotangents)
        derived = _derived(family, params, like.dtype)
        outs = bind(other, *fixed, *cotangents, *places, **derived)
        found = [out if each else None for out, each in zip(outs, wanted, strict=True)]
    return [*(None for _ in fixed), *found, *(None for _ in places)]


def _parts(operands: Any, params: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Of the operands of a linear primitive: what is fixed, what it is linear in, the places."""
    end = len(operands) - len(params["given"])
    return operands[:NUM_FIXED], operands[NUM_FIXED:end], operands[end:]


def _batch(
    axis_data: Any,
    operands: Any,
    dims: Any,
    *,
    family: Family,
    primitive: Primitive,
    rule: Callable[..., Any],
    **params: Any,
) -> Any:
    """A map makes the batch longer, or the groups of heads if only the query is mapped."""
    axes, size = params.get("axis_name", ()), axis_data.size
    if not product_maps.maps_any(axis_data, dims, axes):
        outs = primitive.bind(*operands, **params)
        return outs, [None] * len(outs)
    if product_maps.takes_parts(axis_data, axes, False, False):
        outs = product_maps.map_parts(rule, axis_data, operands, dims, params)
        return outs, [0] * len(outs)
    if primitive is family.forward and all(d is None for d in dims[1:]):
        query, key, *rest = operands
        outs = primitive.bind(_more_heads(query, dims[0], key.shape[2]), key, *rest, **params)
        return [_fewer_heads(out, size, key.shape[2]) for out in outs], [0] * len(outs)
    longer = [product_maps.longer_x(x, d, size) for x, d in zip(operands, dims, strict=True)]
    outs = primitive.bind(*longer, **params)
    return [product_maps.split(out, 0, size) for out in outs], [0] * len(outs)


def _more_heads(query: Any, d: int, num_heads: int) -> Any:
    """[B, T, K, G, D], mapped along d of [B, T, K * G, D], with the map's size times the groups."""
    query = jnp.moveaxis(query, d, 2)
    batch, length, size, heads, width = query.shape
    query = query.reshape(batch, length, size, num_heads, heads // num_heads, width)
    return jnp.moveaxis(query, 2, 3).reshape(batch, length, size * heads, width)


def _fewer_heads(out: Any, size: int, num_heads: int) -> Any:
    """The map in front again, of a result with its groups of heads."""
    batch, length, heads, *rest = out.shape
    groups = heads // num_heads // size
    out = out.reshape(batch, length, num_heads, size, groups, *rest)
    return jnp.moveaxis(out, 3, 0).reshape(size, batch, length, num_heads * groups, *rest)


def _types_of_rows(query: Any, key: Any, value: Any, *_: Any, dtype: Any, **params: Any) -> Any:
    shape = (*query.shape[:3], value.shape[3])
    exact = reference.accumulator(query.dtype)
    types = [_compat.type_like(query, shape, dtype), _compat.type_like(query, shape[:3], exact)]
    return types, _effects(query, **params)


def _types_of_operands(*operands: Any, dtype: Any, **params: Any) -> Any:
    types = [_compat.type_like(operands[0], x.shape, dtype) for x in operands[:3]]
    return types, _effects(operands[0], **params)


def _effects(query: Any, axis_name: Any = (), **_: Any) -> Any:
    """As lax types what it sends along the axes, if there are any."""
    if not axis_name:
        return set()
    return _compat.ppermute_p.abstract_eval(query, axis_name=axis_name, perm=())[1]


def _lower(
    ctx: Any,
    *operands: Any,
    number: int,
    family: Family,
    choose: Callable[..., Any],
    path: str,
    **params: Any,
) -> Any:
    """The lowering rule, for all platforms, of one of the primitives of a family."""
    rule = family.rules[number]
    if params["implementation"] != "reference":
        op, platforms = name_of(family, number), tuple(ctx.module_context.platforms)
        decision = _selection.Decision(path, _selection.why_platform(op, *platforms))
        if platforms == ("cuda",):
            rule, decision = choose(number, ctx, params)
        if decision.path != "cuda":
            fall_back(op, params["implementation"], decision)
    return mlir.lower_fun(rule, multiple_results=True)(ctx, *operands, **params)


def name_of(family: Family, number: int) -> str:
    """What one of the three is called, as its custom call is if it has one."""
    primitive = (family.forward, family.tangent, family.backward)[number]
    return primitive.name.removeprefix("pk_")


def define(family: Family, bind: Callable[..., Any], choose: Callable[..., Any], path: str) -> None:
    """Registers the primitives of an op.

    Args:
        family: the op.
        bind: binds one of them, with operands cast to vary alike.
        choose: (which of the three, lowering context, parameters) -> its rule on CUDA, and the
            Decision that says why.
        path: what its rules are on other platforms.
    """
    primitives = (family.forward, family.tangent, family.backward)
    types = (_types_of_rows, _types_of_rows, _types_of_operands)
    all_three = zip(primitives, family.rules, types, strict=True)
    for number, (primitive, rule, abstract_eval) in enumerate(all_three):
        which = {"family": family, "primitive": primitive}
        primitive.def_impl(functools.partial(_compat.run_eagerly, primitive))
        primitive.def_effectful_abstract_eval(abstract_eval)
        ad.primitive_jvps[primitive] = functools.partial(_jvp_of_linear, bind=bind, **which)
        ad.primitive_transposes[primitive] = functools.partial(_transpose, bind=bind, **which)
        batching.fancy_primitive_batchers[primitive] = functools.partial(_batch, rule=rule, **which)
        lower = functools.partial(_lower, number=number, family=family, choose=choose, path=path)
        # Not cacheable: what a ring sends has channels of its own, as in rules.define().
        mlir.register_lowering(primitive, lower, cacheable=False)
    ad.primitive_jvps[family.forward] = functools.partial(_jvp, family=family, bind=bind)
    del ad.primitive_transposes[family.forward]


# Attention on one device.


def in_lax(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the reference, of operands and parameters of a primitive."""

    def rule(*operands: Any, given: Any, spec: Any, dtype: Any, **_: Any) -> Any:
        end = len(operands) - len(given)
        places = places_of(given, operands[end:])
        return function(*operands[:end], places, spec=spec, dtype=dtype)

    return rule


def bind(primitive: Primitive, *operands: Any, **params: Any) -> Any:
    return primitive.bind(*_compat.vary_as_operands(*operands), **params)


FAMILY = make(OP, *map(in_lax, (reference.attention, reference.tangent, reference.backward)))

# Of the three: whether there is a kernel for some operands, and the kernel.
_KERNELS: tuple[Any, ...] = (
    (attention_call.why_not, attention_call.forward),
    None,
    (attention_call.why_not_backward, attention_call.backward),
)


def decide(number: int, ctx: Any, params: dict[str, Any]) -> _selection.Decision:
    """The path of one of the three, of the operands being lowered for CUDA."""
    if _KERNELS[number] is None:
        return _selection.Decision("reference", _selection.NO_TANGENT)
    why_not, _ = _KERNELS[number]
    reason = in_lax(why_not)(*ctx.avals_in, **params)
    if reason is not None:
        return _selection.Decision("reference", reason)
    if _compat.is_partitioned(ctx):
        return _selection.Decision("reference", _selection.PARTITIONED)
    devices = _compat.program_devices(ctx)
    alone = [[i] for i in range(len(devices or ()))]
    dtype, auto = ctx.avals_in[0].dtype, _compat.auto_axes(ctx)
    return _selection.decide(name_of(FAMILY, number), dtype, alone, devices, auto)


def _choose(number: int, ctx: Any, params: dict[str, Any]) -> tuple[Any, _selection.Decision]:
    rule = FAMILY.rules[number]
    if any(0 in aval.shape for aval in (*ctx.avals_in, *ctx.avals_out)):
        return rule, _selection.Decision("cuda")  # there is nothing to compute
    decision = decide(number, ctx, params)
    if decision.path == "cuda":
        _, kernel = _KERNELS[number]
        rule = in_lax(functools.partial(kernel, num_sms=matmul.num_sms(ctx)))
    return rule, decision


define(FAMILY, bind, _choose, "reference")


def attention(
    query: Any,
    key: Any,
    value: Any,
    places: Places,
    *,
    spec: reference.Spec,
    implementation: str | None,
    config: Config,
) -> Any:
    """Binds pk_attention: the result in the query's dtype, and its log-sum-exp.

    The arguments are checked.
    """
    given, arrays = present(places)
    params = {"spec": spec, "dtype": np.dtype(query.dtype), "given": given, "config": config}
    operands = (query, key, value, *arrays)
    return bind(FAMILY.forward, *operands, **params, implementation=implementation)

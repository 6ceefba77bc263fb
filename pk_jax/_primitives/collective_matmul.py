"""The primitives pk_all_gather_matmul, pk_matmul_reduce_scatter and pk_matmul_all_reduce.

An operand x is [outer, rows, k], its ranks' parts lying along the rows (or along k); a w is [k, p],
or [p, k] with transpose_w. So every gathered or scattered dimension is one of rows, and a map over
x makes `outer` longer, one over w its p.

The gather has one x and several w, and its results are the gathered x and a product with each w.
The sums have pairs x, w, x, w, ... and add up the products of all of them. That closes the three
under differentiation: the tangent of a sum is one sum of twice the pairs, and its transpose one
gather, which serves the gradients of x and of w; the transpose of a gather with several w is one
sum of as many pairs. All x of a sum have one dtype, and so have all w.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pk_jax import _compat, _selection
from pk_jax._primitives import (
    checks,
    fused,
    gathers,
    matmul,
    product_maps,
    product_types,
    reductions,
    unfused,
)
from pk_jax._primitives.rules import fall_back, is_zero, no_tangent, of_transpose
from pk_jax._reference import collective_matmul as reference
from pk_jax.config import Config, resolve

GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"

all_gather_matmul_p = Primitive("pk_all_gather_matmul")
all_gather_matmul_p.multiple_results = True
matmul_reduce_scatter_p = Primitive("pk_matmul_reduce_scatter")
matmul_all_reduce_p = Primitive("pk_matmul_all_reduce")


def all_gather_matmul(
    x: Any,
    ws: Sequence[Any],
    axis_name: tuple[Any, ...],
    *,
    dtype: Any,
    precision: Any,
    implementation: str | None,
    config: Config,
    transpose_w: bool = False,
    save_gathered: bool = True,
    strict: bool = False,
) -> list[Any]:
    """Binds pk_all_gather_matmul; the arguments are checked.

    Args:
        x: [outer, rows, k].
        ws: several [k, p], or [p, k] if transpose_w.
        axis_name: the axes.
        dtype: that of the products.
        precision: that of the reference's products, as in lax.dot_general.
        implementation: as in the public function.
        config: the resolved Config.
        transpose_w: see ws.
        save_gathered: the gradients of ws read the gathered x; without, they gather x again.
        strict: config.schedule is the call's own, and no default that gives way.

    Returns:
        The gathered x, and its products [outer, ranks * rows, p].
    """
    return all_gather_matmul_p.bind(
        *_compat.vary_alike(axis_name, x, *ws),
        axis_name=axis_name,
        axis_size=checks.bound_size(axis_name),
        transpose_w=transpose_w,
        dtype=np.dtype(dtype),
        precision=precision,
        save_gathered=save_gathered,
        reads_gathered=True,  # until JAX has found that nobody does: see when_read() below
        strict=strict,
        implementation=implementation,
        config=config,
    )


def matmul_reduce_scatter(pairs: Sequence[Any], axis_name: tuple[Any, ...], **params: Any) -> Any:
    """Binds pk_matmul_reduce_scatter to x, w, x, w, ...; the rest as in all_gather_matmul."""
    return _bind_sum(matmul_reduce_scatter_p, pairs, axis_name, **params)


def matmul_all_reduce(pairs: Sequence[Any], axis_name: tuple[Any, ...], **params: Any) -> Any:
    """Binds pk_matmul_all_reduce to x, w, x, w, ...; the rest as in all_gather_matmul."""
    return _bind_sum(matmul_all_reduce_p, pairs, axis_name, typed=_compat.check_vma(), **params)


def _bind_sum(
    primitive: Primitive,
    pairs: Sequence[Any],
    axis_name: tuple[Any, ...],
    *,
    dtype: Any,
    config: Config,
    transpose_w: bool = False,
    strict: bool = False,
    **params: Any,
) -> Any:
    dtype = np.dtype(dtype)
    params |= {"transpose_w": transpose_w, "dtype": dtype, "config": config, "strict": strict}
    params["wire"] = product_types.wire_dtype(config, dtype)
    axis_name = _compat.without_size_one_axes(axis_name)
    if not axis_name:
        return unfused.local(*_compat.vary_as_operands(*pairs), **params | {"wire": dtype})
    return primitive.bind(
        *_compat.vary_alike(axis_name, *pairs),
        axis_name=axis_name,
        axis_size=checks.bound_size(axis_name),
        **params,
    )


# Derivatives. Asking for "cuda", or for a knob, speaks of the op itself alone.


def _inherited(params: dict[str, Any], op: str) -> dict[str, Any]:
    """What an op in a derivative takes over from the parameters of the one it is derived from."""
    return {
        "precision": params["precision"],
        "implementation": of_transpose(params),
        "config": resolve(op, None),
    }


def _moved(params: dict[str, Any], op: str) -> dict[str, Any]:
    """The same for a collective without a product."""
    inherited = _inherited(params, op) | {"axis_index_groups": None}
    return {name: value for name, value in inherited.items() if name != "precision"}


def _product(params: dict[str, Any], x: Any, w: Any, dtype: Any, *, transpose_w: bool) -> Any:
    """The local x @ w of [outer, rows, k]."""
    inherited = _inherited(params, matmul.OP)
    multiply = functools.partial(matmul.matmul, transpose_b=transpose_w, dtype=dtype, **inherited)
    return reference.in_rows(multiply, x, w)


def _to_w(params: dict[str, Any], x: Any, cotangent: Any, w: Any) -> Any:
    """The cotangent of w, as it lies, from [outer, rows, k] and [outer, rows, p]."""
    x, cotangent = (y.reshape(y.shape[0] * y.shape[1], y.shape[2]) for y in (x, cotangent))
    factors = (cotangent, x) if params["transpose_w"] else (x, cotangent)
    inherited = _inherited(params, matmul.OP)
    return matmul.matmul(*factors, transpose_a=True, dtype=w.aval.dtype, **inherited)


def _gathered(params: dict[str, Any], x: Any) -> Any:
    moved = _moved(params, "all_gather")
    return gathers.all_gather(x, params["axis_name"], axis=1, tiled=True, to="varying", **moved)


def _jvp_of_gather(primals: Any, tangents: Any, **params: Any) -> Any:
    (x, *ws), (tx, *tws) = primals, tangents
    outs = all_gather_matmul_p.bind(x, *ws, **params)
    results: list[Any] = list(map(no_tangent, outs))
    if not is_zero(tx):
        results = all_gather_matmul_p.bind(tx, *ws, **params)
    changed = [i for i, tw in enumerate(tws) if not is_zero(tw)]
    if not changed:
        return outs, results
    if params["save_gathered"]:
        dtype, transpose_w = params["dtype"], params["transpose_w"]
        multiply = functools.partial(_product, params, dtype=dtype, transpose_w=transpose_w)
        products = [multiply(outs[0], tws[i]) for i in changed]
    else:
        _, *products = all_gather_matmul_p.bind(x, *(tws[i] for i in changed), **params)
    for i, product in zip(changed, products, strict=True):
        results[1 + i] = ad.add_tangents(results[1 + i], product)
    return outs, results


def _transpose_of_gather(cotangents: Any, x: Any, *ws: Any, **params: Any) -> Any:
    gathered_ct, *cts = cotangents
    if not ad.is_undefined_primal(x):
        gathered = None if all(map(is_zero, cts)) else _gathered(params, x)
        return None, *(
            ad.Zero(w.aval.to_ct_aval()) if is_zero(ct) else _to_w(params, gathered, ct, w)
            for ct, w in zip(cts, ws, strict=True)
        )
    to_x: Any = ad.Zero(x.aval.to_ct_aval())
    pairs = [y for ct, w in zip(cts, ws, strict=True) if not is_zero(ct) for y in (ct, w)]
    if pairs:
        to_x = matmul_reduce_scatter(
            pairs,
            params["axis_name"],
            transpose_w=not params["transpose_w"],
            dtype=x.aval.dtype,
            **_inherited(params, SCATTER),
        )
    if not is_zero(gathered_ct):
        moved = _moved(params, "psum_scatter")
        part = gathers.psum_scatter(
            gathered_ct, params["axis_name"], scatter_dimension=1, tiled=True, **moved
        )
        to_x = ad.add_tangents(to_x, part)
    return to_x, *(None for _ in ws)


def _pairs_of(operands: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(operands[::2], operands[1::2], strict=True)


def _jvp_of_sum(primals: Any, tangents: Any, *, primitive: Primitive, **params: Any) -> Any:
    out = primitive.bind(*primals, **params)
    pairs = []
    for (x, w), (tx, tw) in zip(_pairs_of(primals), _pairs_of(tangents), strict=True):
        pairs += [] if is_zero(tx) else [tx, w]
        pairs += [] if is_zero(tw) else [x, tw]
    tangent = primitive.bind(*pairs, **params) if pairs else no_tangent(out)
    return out, tangent


def _transpose_of_scatter(cotangent: Any, *operands: Any, **params: Any) -> Any:
    """One gather of the cotangent, for all that is to be found."""
    found = [(x, w) for x, w in _pairs_of(operands) if ad.is_undefined_primal(x)]
    if not found:
        gathered, to_x = _gathered(params, cotangent), []
    else:
        gathered, *to_x = all_gather_matmul(
            cotangent,
            [w for _, w in found],
            params["axis_name"],
            transpose_w=not params["transpose_w"],
            dtype=found[0][0].aval.dtype,
            **_inherited(params, GATHER),
        )
    return _to_pairs(params, gathered, iter(to_x), operands)


def _transpose_of_reduce(cotangent: Any, *operands: Any, **params: Any) -> Any:
    """Products alone: a typed cotangent is the same on all ranks, and an untyped one their sum."""
    axes = params["axis_name"]
    if params["typed"]:
        cotangent = _compat.vary_over(axes, cotangent)
    else:
        cotangent = reductions.reduce("psum", cotangent, axes, **_moved(params, "psum"))
    transpose_w = not params["transpose_w"]
    to_x = (
        _product(params, cotangent, w, x.aval.dtype, transpose_w=transpose_w)
        for x, w in _pairs_of(operands)
        if ad.is_undefined_primal(x)
    )
    return _to_pairs(params, cotangent, to_x, operands)


def _to_pairs(
    params: dict[str, Any], cotangent: Any, to_x: Iterator[Any], operands: Sequence[Any]
) -> list[Any]:
    """The cotangents of all operands: the next of to_x for an x, a product for a w."""
    found: list[Any] = []
    for x, w in _pairs_of(operands):
        found.append(next(to_x) if ad.is_undefined_primal(x) else None)
        found.append(_to_w(params, x, cotangent, w) if ad.is_undefined_primal(w) else None)
    return found


# Maps. Over x alone or w alone the op is itself, only larger; else it is made of its parts.


def _batch_gather(axis_data: Any, operands: Any, dims: Any, **params: Any) -> Any:
    (x, *ws), (d, *ds) = operands, dims
    size, maps_w = axis_data.size, any(each is not None for each in ds)
    if not product_maps.maps_any(axis_data, dims, params["axis_name"]):
        outs = all_gather_matmul_p.bind(*operands, **params)
        return outs, [None] * len(outs)
    if product_maps.takes_parts(axis_data, params["axis_name"], d is not None, maps_w):
        outs = product_maps.map_parts(unfused.all_gather_matmul, axis_data, operands, dims, params)
        return outs, [0] * len(outs)
    if not maps_w:
        outs = all_gather_matmul_p.bind(product_maps.longer_x(x, d, size), *ws, **params)
        return [product_maps.split(out, 0, size) for out in outs], [0] * len(outs)
    transpose_w = params["transpose_w"]
    wider = [
        w if each is None else product_maps.wider_w(w, each, size, transpose_w)
        for w, each in zip(ws, ds, strict=True)
    ]
    gathered, *ys = all_gather_matmul_p.bind(x, *wider, **params)
    ys = [
        y if each is None else product_maps.split(y, 2, size)
        for y, each in zip(ys, ds, strict=True)
    ]
    return [gathered, *ys], [None, *(None if each is None else 2 for each in ds)]


def _batch_sum(
    axis_data: Any,
    operands: Any,
    dims: Any,
    *,
    primitive: Primitive,
    parts: Callable[..., Any],
    **params: Any,
) -> Any:
    size, transpose_w = axis_data.size, params["transpose_w"]
    maps_x, maps_w = (any(d is not None for d in dims[i::2]) for i in (0, 1))
    if not product_maps.maps_any(axis_data, dims, params["axis_name"]):
        return primitive.bind(*operands, **params), None
    if product_maps.takes_parts(axis_data, params["axis_name"], maps_x, maps_w):
        return product_maps.map_parts(parts, axis_data, operands, dims, params), 0
    larger = []
    for (x, w), (dx, dw) in zip(_pairs_of(operands), _pairs_of(dims), strict=True):
        larger.append(product_maps.longer_x(x, dx, size) if maps_x else x)
        larger.append(product_maps.wider_w(w, dw, size, transpose_w) if maps_w else w)
    at = 0 if maps_x else 2
    return product_maps.split(primitive.bind(*larger, **params), at, size), at


# How the ops run.


def _candidate(ctx: Any, op: str, params: dict[str, Any]) -> Any:
    """The candidate that an op which is being lowered runs by: a name of a rule, or a Fused."""
    platforms = tuple(ctx.module_context.platforms)
    implementation, config = params["implementation"], params["config"]
    if implementation == "reference":
        return "reference"
    if platforms != ("cuda",):
        reason = _selection.why_platform(op, *platforms)
        fall_back(op, implementation, _selection.Decision("reference", reason))
        return "reference"
    if config.schedule == "sequential" or fused.nothing_moves(ctx, params):
        return "unfused"
    found = fused.find(ctx, op, params)
    if isinstance(found, str):
        fused.refuse(op, implementation if params["strict"] else None, config, found)
        return "unfused"
    slower = config.schedule is None and found.seconds >= found.unfused_seconds
    return "unfused" if slower else found


def _lower(ctx: Any, *operands: Any, op: str, rules: dict[str, Any], **params: Any) -> Any:
    candidate = _candidate(ctx, op, params)
    if isinstance(candidate, fused.Fused):
        return candidate.rule(ctx, *operands)
    return rules[candidate](ctx, *operands, **params)


def _define(
    primitive: Primitive, op: str, *, abstract_eval: Any, jvp: Any, transpose: Any, batch: Any
) -> None:
    """Registers a primitive, and the candidates of its op."""
    several = primitive.multiple_results
    names = ["axis_name", "transpose_w", "dtype", "precision"]
    names += [] if primitive is all_gather_matmul_p else ["axis_size", "wire"]

    def in_lax(*operands: Any, **params: Any) -> Any:
        return getattr(reference, op)(*operands, **{name: params[name] for name in names})

    rules = {
        "reference": mlir.lower_fun(in_lax, multiple_results=several),
        "unfused": mlir.lower_fun(getattr(unfused, op), multiple_results=several),
    }
    primitive.def_effectful_abstract_eval(abstract_eval)
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    batching.fancy_primitive_batchers[primitive] = batch
    # Not cacheable: each call site has channels of its own, as in rules.define().
    lower = functools.partial(_lower, op=op, rules=rules)
    mlir.register_lowering(primitive, lower, cacheable=False)


_define(
    all_gather_matmul_p,
    GATHER,
    abstract_eval=product_types.of_gather,
    jvp=_jvp_of_gather,
    transpose=_transpose_of_gather,
    batch=_batch_gather,
)
# A rank's own rows of the gathered x are copied by the kernel where somebody reads them.
_compat.when_read(all_gather_matmul_p, lambda used: {"reads_gathered": used[0]})
for _primitive, _op, _type, _transpose in (
    (matmul_reduce_scatter_p, SCATTER, product_types.of_scatter, _transpose_of_scatter),
    (matmul_all_reduce_p, REDUCE, product_types.of_reduce, _transpose_of_reduce),
):
    _define(
        _primitive,
        _op,
        abstract_eval=_type,
        jvp=functools.partial(_jvp_of_sum, primitive=_primitive),
        transpose=_transpose,
        batch=functools.partial(_batch_sum, primitive=_primitive, parts=getattr(unfused, _op)),
    )

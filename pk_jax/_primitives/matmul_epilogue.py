"""The primitive pk_matmul_epilogue: a product with what becomes of it before it is rounded.

`activation(a @ b * scale_x * scale_w + bias)`, in fp32 where the product was accumulated. Products
of float8 are all made by it. It is not linear; its derivative is that of the unfused ops, in terms
of pk_matmul, so there are gradients of any order. Where an activation, or scales that move, need
the product's value it is saved, in fp32 (jax.remat makes it again); else nothing but the operands.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pk_jax import _compat
from pk_jax._primitives import matmul
from pk_jax._reference import matmul as reference
from pk_jax._tuning import matmul_model
from pk_jax.config import Config

matmul_epilogue_p = Primitive("pk_matmul_epilogue")


def matmul_epilogue(
    a: Any,
    b: Any,
    *,
    bias: Any,
    scale_x: Any,
    scale_w: Any,
    activation: str | None,
    dtype: Any,
    precision: Any,
    implementation: str | None,
    config: Config,
) -> Any:
    """Binds pk_matmul_epilogue to [m, k] and [k, n]; the arguments are checked.

    `bias` is [n] or None, the scales are [m] or [1] and [n] or [1], or both None.
    """
    more = {"scale_x": scale_x, "scale_w": scale_w, "bias": bias}
    more = {name: value for name, value in more.items() if value is not None}
    # Cotangents of 16 bits lose nothing of what float8 operands are worth.
    float8 = a.dtype == jnp.float8_e4m3fn
    return _bind(
        a,
        b,
        *more.values(),
        names=tuple(more),
        activation=activation,
        dtype=np.dtype(dtype),
        tangent_dtype=np.dtype(jnp.bfloat16 if float8 else dtype),
        precision=precision,
        implementation=implementation,
        config=config,
    )


def _bind(*operands: Any, **params: Any) -> Any:
    return matmul_epilogue_p.bind(*_compat.vary_as_operands(*operands), **params)


def _abstract_eval(a: Any, b: Any, *_: Any, dtype: Any, **params: Any) -> Any:
    return matmul.abstract_eval(a, b, transpose_a=False, transpose_b=False, dtype=dtype)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    (a, b, *more), (da, db, *dmore) = primals, tangents
    names, dtype, activation = (params[name] for name in ("names", "dtype", "activation"))
    values = dict(zip(names, more, strict=True))
    moving = dict(zip(names, dmore, strict=True))
    moving = {name: t for name, t in moving.items() if not isinstance(t, ad.Zero)}
    accumulated = reference.accumulated(a.dtype, dtype)
    factors = [pair for pair, t in (((da, b), da), ((a, db), db)) if not isinstance(t, ad.Zero)]
    if factors:
        products = [_product_of_tangent(*pair, params) for pair in factors]
        products = [lax.convert_element_type(each, accumulated) for each in products]
        moving["product"] = functools.reduce(lax.add, products)
    if activation is None and not moving.keys() & {"scale_x", "scale_w"}:
        # Linear in what moves.
        y = _bind(*primals, **params)
        if not factors:
            bias = lax.convert_element_type(moving["bias"], dtype)
            return y, lax.broadcast_in_dim(bias, y.shape, (1,))
        scales = {name: value for name, value in values.items() if name != "bias"}
        return y, reference.finish(**scales, **moving, activation=None, dtype=dtype)
    plain = {"names": (), "activation": None, "dtype": accumulated}
    values["product"] = _bind(a, b, **params | plain)
    fixed = {name: value for name, value in values.items() if name not in moving}

    def unfused(some: Any) -> Any:
        return reference.finish(**fixed, **some, activation=activation, dtype=dtype)

    return jax.jvp(unfused, ({name: values[name] for name in moving},), (moving,))


def _product_of_tangent(a: Any, b: Any, params: dict[str, Any]) -> Any:
    same = ("precision", "implementation", "config")
    a, b = reference.widened(a), reference.widened(b)
    return matmul.matmul(
        a, b, dtype=params["tangent_dtype"], **{name: params[name] for name in same}
    )


def _batch(operands: Any, dims: Any, **params: Any) -> Any:
    """A map over one matrix makes it longer, as that of pk_matmul; any other is the reference."""
    (a, b, *more), (da, db, *dmore) = operands, dims
    named = dict(zip(params["names"], zip(more, dmore, strict=True), strict=True))
    mapped = {name for name, (_, d) in named.items() if d is not None}
    if da is not None and db is None and mapped <= {"scale_x"}:
        a, shape = matmul.longer(a, da, before=True)
        more = [
            _longer(name, *each, shape) if name == "scale_x" else each[0]
            for name, each in named.items()
        ]
        result = matmul_epilogue_p.bind(a, b, *more, **params)
        return result.reshape(*shape, result.shape[1]), 0
    if da is None and db is not None and mapped <= {"scale_w", "bias"}:
        b, shape = matmul.longer(b, db, before=False)
        more = [
            each[0] if name == "scale_x" else _longer(name, *each, shape)
            for name, each in named.items()
        ]
        result = matmul_epilogue_p.bind(a, b, *more, **params)
        return result.reshape(result.shape[0], *shape), 1
    if params["implementation"] == "cuda":
        raise NotImplementedError(
            f"{matmul.OP}: there are no kernels for a map over both operands, nor over one and "
            "what belongs to the other's rows or columns; map one, or use implementation=None"
        )
    return jax.vmap(functools.partial(_reference, **params), dims)(*operands), 0


def _longer(name: str, x: Any, d: int | None, shape: tuple[int, int]) -> Any:
    """The numbers of all rows, or columns, of a map: of `shape`, the map's size and theirs."""
    if d is None and name != "bias" and x.shape == (1,):
        return x  # one for all
    mapped = x[None] if d is None else jnp.moveaxis(x, d, 0)
    return jnp.broadcast_to(mapped, shape).reshape(-1)


def _reference(
    a: Any,
    b: Any,
    *more: Any,
    names: Any,
    activation: Any,
    dtype: Any,
    precision: Any,
    **_: Any,
) -> Any:
    product = reference.matmul(
        reference.widened(a),
        reference.widened(b),
        transpose_a=False,
        transpose_b=False,
        dtype=reference.accumulated(a.dtype, dtype),
        precision=precision,
    )
    named = dict(zip(names, more, strict=True))
    return reference.finish(product, **named, activation=activation, dtype=dtype)


def _cuda(a: Any, b: Any, *more: Any, num_sms: int, names: Any, **params: Any) -> Any:
    (m, k), n = a.shape, b.shape[1]
    return matmul.call(
        a,
        b,
        **dict(zip(names, more, strict=True)),
        transpose_a=False,
        transpose_b=False,
        activation=params["activation"],
        dtype=params["dtype"],
        plan=matmul_model.choose(m, n, k, num_sms, params["config"].tile, a.dtype.itemsize),
    )


matmul_epilogue_p.def_impl(functools.partial(_compat.run_eagerly, matmul_epilogue_p))
matmul_epilogue_p.def_effectful_abstract_eval(_abstract_eval)
ad.primitive_jvps[matmul_epilogue_p] = _jvp
batching.primitive_batchers[matmul_epilogue_p] = _batch
mlir.register_lowering(
    matmul_epilogue_p,
    functools.partial(
        matmul.lower, op=matmul.OP, reference=_reference, cuda=_cuda, most=matmul.MOST_SIZE
    ),
)

"""The primitive pk_matmul_epilogue: a product with what becomes of it before it is rounded.

`activation(a @ b + bias)`, in fp32 where the product was accumulated. It is not linear; its
derivative is that of the unfused ops, in terms of pk_matmul, so there are gradients of any order.
With an activation what the derivative needs of the forward pass is saved, the product in fp32
(jax.remat computes it again); without one that is nothing but the operands.
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
    bias: Any,
    *,
    activation: str | None,
    dtype: Any,
    precision: Any,
    implementation: str | None,
    config: Config,
) -> Any:
    """Binds pk_matmul_epilogue to [m, k], [k, n] and [n] or None; the arguments are checked."""
    more = {} if bias is None else {"bias": bias}
    return _bind(
        a,
        b,
        *more.values(),
        names=tuple(more),
        activation=activation,
        dtype=np.dtype(dtype),
        tangent_dtype=np.dtype(dtype),
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
    if activation is None:
        # Linear in the product and in the bias.
        y = _bind(*primals, **params)
        if not factors:
            bias = moving["bias"]
            return y, lax.convert_element_type(lax.broadcast_in_dim(bias, y.shape, (1,)), dtype)
        return y, reference.finish(**moving, activation=None, dtype=dtype)
    plain = {"names": (), "activation": None, "dtype": accumulated}
    values["product"] = _bind(a, b, **params | plain)
    fixed = {name: value for name, value in values.items() if name not in moving}

    def unfused(some: Any) -> Any:
        return reference.finish(**fixed, **some, activation=activation, dtype=dtype)

    return jax.jvp(unfused, ({name: values[name] for name in moving},), (moving,))


def _product_of_tangent(a: Any, b: Any, params: dict[str, Any]) -> Any:
    same = ("precision", "implementation", "config")
    return matmul.matmul(
        a, b, dtype=params["tangent_dtype"], **{name: params[name] for name in same}
    )


def _batch(operands: Any, dims: Any, **params: Any) -> Any:
    """A map over one matrix makes it longer, as that of pk_matmul; any other is the reference."""
    (a, b, *more), (da, db, *dmore) = operands, dims
    if da is not None and all(d is None for d in dims[1:]):
        a, shape = matmul.longer(a, da, before=True)
        result = matmul_epilogue_p.bind(a, b, *more, **params)
        return result.reshape(*shape, result.shape[1]), 0
    if da is None and db is not None:
        size = b.shape[db]
        b, shape = matmul.longer(b, db, before=False)
        more = [_longer(x, d, size) for x, d in zip(more, dmore, strict=True)]
        result = matmul_epilogue_p.bind(a, b, *more, **params)
        return result.reshape(result.shape[0], *shape), 1
    if params["implementation"] == "cuda":
        raise NotImplementedError(
            f"{matmul.OP}: there are no kernels for a map over both operands, nor over x and bias "
            "or bias alone; map one operand, or use implementation=None"
        )
    return jax.vmap(functools.partial(_reference, **params), dims)(*operands), 0


def _longer(x: Any, d: int | None, size: int) -> Any:
    """A number for each column, for the columns of all matrices of a map."""
    mapped = jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
    return mapped.reshape(-1)


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
        a,
        b,
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
        plan=matmul_model.choose(m, n, k, num_sms, params["config"].tile),
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

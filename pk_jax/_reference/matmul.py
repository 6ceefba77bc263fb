"""The matrix product in jax.lax, and what becomes of it before it is rounded."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
}


def dimension_numbers(transpose_a: bool, transpose_b: bool) -> Any:
    """What lax.dot_general contracts: k of [m, k] or [k, m], and of [k, n] or [n, k]."""
    return ((0 if transpose_a else 1,), (1 if transpose_b else 0,)), ((), ())


def contract_last(x: Any, w: Any, *, dtype: Any) -> Any:
    """[..., k] @ [k, n] in `dtype`, with the dimensions as they are."""
    numbers = (((x.ndim - 1,), (0,)), ((), ()))
    return lax.dot_general(x, w, numbers, preferred_element_type=dtype)


def matmul(
    a: Any, b: Any, *, transpose_a: bool, transpose_b: bool, dtype: Any, precision: Any
) -> Any:
    """[m, k] @ [k, n] in `dtype`; a is [k, m] if transpose_a, b is [n, k] if transpose_b."""
    # Two dtypes meet in gradients only: there lax computes in the wider and then rounds.
    product = lax.dot_general(
        a,
        b,
        dimension_numbers(transpose_a, transpose_b),
        precision=precision,
        preferred_element_type=dtype if a.dtype == b.dtype else None,
    )
    return lax.convert_element_type(product, dtype)


def widened(x: Any) -> Any:
    """An operand of float8_e4m3fn in bfloat16, which has all its values; any other as it is."""
    return x.astype(jnp.bfloat16) if x.dtype == jnp.float8_e4m3fn else x


def accumulated(operands: Any, dtype: Any) -> Any:
    """The dtype in which a product of floats of a dtype, to be rounded to another, is made."""
    return np.dtype("float64" if "float64" in (operands, dtype) else "float32")


def finish(
    product: Any,
    *,
    activation: str | None,
    dtype: Any,
    bias: Any = None,
    scale_x: Any = None,
    scale_w: Any = None,
) -> Any:
    """activation(product * scale_x * scale_w + bias), in the product's dtype, rounded to `dtype`.

    Args:
        product: [..., n].
        activation: its name, or None.
        dtype: of the result.
        bias: [n], or None.
        scale_x: [...], or 1 in each place; or None.
        scale_w: [n] or [1], or None.
    """
    if scale_x is not None:
        product *= lax.expand_dims(scale_x, (product.ndim - 1,))
    if scale_w is not None:
        product *= lax.expand_dims(scale_w, range(product.ndim - 1))
    if bias is not None:
        bias = lax.convert_element_type(bias, product.dtype)
        product += lax.broadcast_in_dim(bias, product.shape, (product.ndim - 1,))
    if activation is not None:
        product = ACTIVATIONS[activation](product)
    return lax.convert_element_type(product, dtype)

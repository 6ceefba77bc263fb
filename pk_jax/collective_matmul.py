"""Matrix products, to be fused with collectives; as yet the local one."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from pk_jax import config as _config
from pk_jax._primitives import matmul as _matmul
from pk_jax.config import Config


def matmul(
    x: Any,
    w: Any,
    *,
    preferred_element_type: Any = None,
    implementation: str | None = None,
    config: Config | None = None,
) -> jax.Array:
    """The product x @ w, accumulated in fp32 and rounded once.

    It runs where it is called, inside or outside ``jax.shard_map``, on one device's arrays; nothing
    is communicated. Its gradients are products of the same kind.

    Args:
        x: [..., k]; its leading dimensions are rows of one matrix.
        w: [k, n].
        preferred_element_type: dtype of the result; None is that of ``jnp.result_type(x, w)``.
        implementation: "cuda" runs the kernel: float16 or bfloat16 operands of one dtype, a result
            of that dtype or float32, Hopper GPUs; where it cannot run the reason is a
            NotImplementedError. "reference" is ``jax.lax.dot_general``. None is that too, as long
            as the kernel is not as fast at every shape, unless a tile is asked for.
        config: the knob ``tile``: rows and columns of the result that a worker makes at a time,
            (128, 256), (256, 256) by two thread blocks, (128, 128) or (64, 256).

    Returns:
        [..., n].

    Raises:
        TypeError: an operand is not an array of numbers.
        ValueError: shapes that do not fit, or a knob that the op does not have.

    A layer of a network::

        >>> x, w = jnp.ones((4, 7, 64), jnp.bfloat16), jnp.ones((64, 32), jnp.bfloat16)
        >>> pk.matmul(x, w).shape
        (4, 7, 32)
    """
    op = "matmul"
    _config.check_implementation(op, implementation)
    resolved = _config.resolve(op, config)
    for name, array in (("x", x), ("w", w)):
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise TypeError(f"{op}: {name} must be an array, got {type(array).__name__}")
        if not jnp.issubdtype(array.dtype, jnp.number):
            raise TypeError(f"{op}: {name} must hold numbers, got dtype {array.dtype}")
    if len(w.shape) != 2 or len(x.shape) < 1 or x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"{op} takes x [..., k] and w [k, n], got shapes {tuple(x.shape)} and {tuple(w.shape)}"
        )
    x, w = jnp.asarray(x), jnp.asarray(w)
    dtype = preferred_element_type or jnp.result_type(x, w)
    rows, (k, n) = x.shape[:-1], w.shape
    out = _matmul.matmul(
        x.reshape(math.prod(rows), k),
        w,
        dtype=dtype,
        implementation=implementation,
        config=resolved,
    )
    return out.reshape(*rows, n)

"""The matrix product of one device's arrays."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pk_jax import config as _config
from pk_jax._primitives import matmul as _matmul
from pk_jax._primitives import product_checks
from pk_jax._primitives.matmul_epilogue import matmul_epilogue
from pk_jax._primitives.rules import fall_back
from pk_jax._reference import matmul as reference
from pk_jax._selection import Decision
from pk_jax.config import Config


def matmul(
    x: Any,
    w: Any,
    *,
    bias: Any = None,
    activation: str | None = None,
    scale_x: Any = None,
    scale_w: Any = None,
    preferred_element_type: Any = None,
    implementation: str | None = None,
    config: Config | None = None,
) -> jax.Array:
    """The product activation(x @ w + bias), accumulated in fp32 and rounded once.

    It runs where it is called, inside or outside ``jax.shard_map``, on one device's arrays; nothing
    is communicated. Its gradients are products of the same kind; with operands of 16 bits and a
    float32 result they are ``jax.lax.dot_general`` in float32, as the cotangent is. Where there is
    an activation to differentiate, the product is saved in float32 before bias and activation,
    which then are XLA's; ``jax.remat`` makes it again. Where XLA is known to partition the program
    over several devices it is ``jax.lax.dot_general``.

    Operands of float8_e4m3fn stand for ``x * scale_x[:, None]`` and ``w * scale_w``, and the
    product is that of these in float32. Its gradients are products in bfloat16; those of the scales
    and the bias are float32, with the product saved for the former, those of x and w have their own
    dtype as in ``jax.lax``, where what is past 448 is NaN and what is below 0.001 is lost. To train
    through a quantisation, give that a derivative of its own (``jax.custom_vjp``).

    Args:
        x: [..., k]; its leading dimensions are rows of one matrix.
        w: [k, n].
        bias: [n], of the dtype in which the operands are multiplied (with float8_e4m3fn bfloat16 or
            float16), or float32; None for none.
        activation: "relu", "gelu" (the form with tanh, ``jax.nn.gelu``'s own) or "silu"; None for
            none.
        scale_x: float32, a scalar or a number for each row, [...]: that of x in float8_e4m3fn; None
            is 1.
        scale_w: float32, a scalar or a number for each column, [n]: that of w in float8_e4m3fn;
            None is 1.
        preferred_element_type: dtype of the result; None is that of ``jnp.result_type(x, w)``, in
            which operands of two dtypes are multiplied, but bfloat16 if that is float8_e4m3fn, as
            few sums of such products fit in float8.
        implementation: "cuda" runs the kernel: float16 or bfloat16 operands of one dtype, a result
            of that dtype or float32; or float8_e4m3fn operands, a result of 16 or 32 bits; Hopper
            GPUs. Where it cannot run the reason is a NotImplementedError. "reference" is
            ``jax.lax.dot_general``, on float8_e4m3fn in bfloat16. None is that too, as long as the
            kernel is not as fast at every shape, unless a tile is asked for.
        config: the knob ``tile``: rows and columns of the result that a block makes at a time,
            (128, 256), (128, 128), (64, 256), (64, 128) or (64, 64); with float8_e4m3fn (128, 128)
            or (64, 128).

    Returns:
        [..., n].

    Raises:
        TypeError: an operand is not an array of numbers, or they have no common dtype (of 8-bit
            floats and others there is none) or no product of the dtype.
        ValueError: shapes that do not fit, an unknown activation, or a knob that the op does not
            have.

    A layer of a network::

        >>> x, w = jnp.ones((4, 7, 64), jnp.bfloat16), jnp.ones((64, 32), jnp.bfloat16)
        >>> pk.matmul(x, w, bias=jnp.zeros(32), activation="gelu").shape
        (4, 7, 32)
    """
    op = "matmul"
    _config.check_implementation(op, implementation)
    resolved = _config.resolve(op, config)
    for name, operand in (("x", x), ("w", w)):
        product_checks.check_operand(op, name, operand)
    if np.ndim(x) < 1 or np.ndim(w) != 2:
        raise ValueError(
            f"{op}: x must be [..., k] and w [k, n], got shapes {x.shape} and {w.shape}; reshape "
            "them, or use jax.lax.dot_general for other contractions"
        )
    if x.shape[-1] != w.shape[0]:
        raise ValueError(
            f"{op}: the last dimension of x, {x.shape[-1]} of {x.shape}, must equal the first of "
            f"w, {w.shape[0]} of {w.shape}; transpose or slice one of them"
        )
    common = product_checks.common_dtype(op, x=x, w=w)
    float8 = common == jnp.float8_e4m3fn
    if float8 and preferred_element_type is None:
        preferred_element_type = jnp.bfloat16
    dtype = product_checks.result_dtype(op, common, preferred_element_type)
    product_checks.check_epilogue(op, bias, activation, w.shape[1], common)
    scales = product_checks.check_scales(op, scale_x, scale_w, x.shape, w.shape, common)
    if float8:
        resolved = product_checks.possible_tile(op, config, resolved)
    epilogue = {"bias": bias, "activation": activation, **scales}
    # What is not plain has derivatives of its own: float8, but to dtypes that lax alone has it in.
    plain = not any(each is not None for each in epilogue.values())
    plain &= not float8 or dtype not in (jnp.bfloat16, np.float16, np.float32)
    x, w = (lax.convert_element_type(operand, common) for operand in (x, w))
    partitioned = _matmul.why_partitioned(x, w)
    if partitioned is not None:
        if implementation == "cuda" or (implementation is None and resolved.tile is not None):
            fall_back(op, implementation, Decision("reference", partitioned))
        if plain:
            return reference.contract_last(x, w, dtype=dtype)
        product = reference.contract_last(
            *map(reference.widened, (x, w)), dtype=reference.accumulated(common, dtype)
        )
        return reference.finish(product, **epilogue, dtype=dtype)
    leading = x.shape[:-1]
    rows = x if len(leading) == 1 else lax.reshape(x, (math.prod(leading), x.shape[-1]))
    params = {
        "dtype": dtype,
        "precision": _matmul.precision_of_call(),
        "implementation": implementation,
        "config": resolved,
    }
    if plain:
        product = _matmul.matmul(rows, w, **params)
    else:
        if scales["scale_x"] is not None:
            epilogue["scale_x"] = lax.reshape(scales["scale_x"], (scales["scale_x"].size,))
        product = matmul_epilogue(rows, w, **epilogue, **params)
    return product if len(leading) == 1 else lax.reshape(product, (*leading, w.shape[1]))

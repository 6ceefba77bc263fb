"""Matrix products by groups of rows, as a mixture of experts has them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pk_jax import _compat
from pk_jax import config as _config
from pk_jax._primitives import checks, product_checks
from pk_jax._primitives import ragged_dot as _ragged_dot
from pk_jax.config import Config


def ragged_dot(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: Any = None,
    *,
    implementation: str | None = None,
    config: Config | None = None,
) -> jax.Array:
    """Each row of lhs times the matrix of its group, with the signature of jax.lax.ragged_dot.

    The first `group_sizes[0]` rows are multiplied by `rhs[0]`, the next ones by `rhs[1]`, and so
    on. Rows past the sum of the sizes give zeros; where the sizes go past the last row they are cut
    there, and one below 0 is 0. Sums of 16-bit operands are in fp32 and rounded once. It runs where
    it is called, inside or outside ``jax.shard_map``, on one device's arrays; nothing is
    communicated. Gradients are of any order; that of rhs is ``jax.lax``'s as yet. ``jax.vmap`` over
    all three arrays is lax's, over some of them a loop.

    A NaN or an infinity in the matrix of an empty group, or in another group's, stays there with
    the kernel; XLA's product on CPUs multiplies it by zeros, and it is everywhere.

    Args:
        lhs: [m, k].
        rhs: [g, k, n].
        group_sizes: [g], integers of any dtype. They may be known on the device alone.
        precision: that of ``jax.lax.ragged_dot``; the kernel has products of 16 bits, which are
            exact in fp32, and takes no heed of it.
        preferred_element_type: dtype of the result; None is that of ``jnp.result_type(lhs, rhs)``,
            in which operands of two dtypes are multiplied.
        group_offset: must be None; jax.lax.ragged_dot does not implement it either.
        implementation: "cuda" runs the kernel: float16 or bfloat16 operands of one dtype, a result
            of that dtype or float32, Hopper GPUs; where it cannot run, and under ``jax.vmap`` over
            all three arrays, the reason is a NotImplementedError. "reference" is
            ``jax.lax.ragged_dot``. None is that too, as long as the kernel is not as fast at every
            shape, unless a tile is asked for.
        config: the knob ``tile``: rows and columns of the result that a block makes at a time,
            (128, 256), (128, 128), (64, 256), (64, 128) or (64, 64).

    Returns:
        [m, n].

    Raises:
        TypeError: an operand is not an array of numbers, sizes are not integers, or the operands
            have no product of the dtype.
        ValueError: shapes that do not fit, or a knob that the op does not have.
        NotImplementedError: `group_offset`, or arrays whose types name mesh axes.

    Six tokens for three experts, of which the second has none, and the last token goes nowhere::

        >>> tokens = jnp.ones((6, 64), jnp.bfloat16)
        >>> experts = jnp.ones((3, 64, 32), jnp.bfloat16)
        >>> y = pk.ragged_dot(tokens, experts, jnp.array([1, 0, 4]))
        >>> y.shape, y[:, 0].tolist()
        ((6, 32), [64.0, 64.0, 64.0, 64.0, 64.0, 0.0])
    """
    op = "ragged_dot"
    _config.check_implementation(op, implementation)
    resolved = _config.resolve(op, config)
    for name, operand in (("lhs", lhs), ("rhs", rhs), ("group_sizes", group_sizes)):
        product_checks.check_operand(op, name, operand)
    _check_shapes(op, lhs, rhs, group_sizes)
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise TypeError(
            f"{op}: group_sizes must hold integers, got dtype {group_sizes.dtype}; convert them to "
            "int32"
        )
    if group_offset is not None:
        raise NotImplementedError(
            f"{op}: group_offset={group_offset!r} must be None, jax.lax.ragged_dot does not "
            "implement it either; slice the rows of lhs, rhs and group_sizes instead"
        )
    checks.check_no_explicit_axes(op, lhs, rhs, group_sizes)
    common = product_checks.common_dtype(op, lhs=lhs, rhs=rhs)
    dtype = product_checks.result_dtype(op, common, preferred_element_type)
    return _ragged_dot.ragged_dot(
        lax.convert_element_type(lhs, common),
        lax.convert_element_type(rhs, common),
        _narrowed(group_sizes, lhs.shape[0]),
        dtype=dtype,
        # As lax takes it when it is called; None would ask again when it is lowered.
        precision=_compat.canonicalize_precision(precision) or lax.Precision.DEFAULT,
        implementation=implementation,
        config=resolved,
    )


def _narrowed(group_sizes: Any, num_rows: int) -> Any:
    """The sizes in int32; what a wider dtype holds past the rows is cut before it wraps."""
    if jnp.iinfo(group_sizes.dtype).max > np.iinfo(np.int32).max:
        group_sizes = jnp.clip(group_sizes, 0, num_rows)
    return lax.convert_element_type(group_sizes, np.int32)


def _check_shapes(op: str, lhs: Any, rhs: Any, group_sizes: Any) -> None:
    if np.ndim(lhs) != 2 or np.ndim(rhs) != 3 or np.ndim(group_sizes) != 1:
        raise ValueError(
            f"{op}: lhs must be [m, k], rhs [g, k, n] and group_sizes [g], got shapes {lhs.shape}, "
            f"{rhs.shape} and {group_sizes.shape}; reshape them, or use "
            "jax.lax.ragged_dot_general for other contractions"
        )
    if lhs.shape[1] != rhs.shape[1]:
        raise ValueError(
            f"{op}: the last dimension of lhs, {lhs.shape[1]} of {lhs.shape}, must equal the "
            f"second of rhs, {rhs.shape[1]} of {rhs.shape}; transpose or slice one of them"
        )
    if rhs.shape[0] != group_sizes.shape[0]:
        raise ValueError(
            f"{op}: rhs has {rhs.shape[0]} matrices, its shape being {rhs.shape}, and group_sizes "
            f"{group_sizes.shape[0]} numbers; give each matrix the size of its group, 0 if it is "
            "empty"
        )

"""Checks of the operands and dtypes of matrix products, in the words of the public functions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pk_jax._primitives import matmul


def check_operand(op: str, name: str, operand: Any) -> None:
    """Raises TypeError unless an operand is an array of numbers."""
    if not isinstance(operand, (jax.Array, np.ndarray)):
        raise TypeError(
            f"{op}: {name} must be an array, got {operand!r} of type {type(operand).__name__}"
        )
    dtype = operand.dtype
    if not jnp.issubdtype(dtype, jnp.number) and dtype != jnp.bool_:
        raise TypeError(f"{op}: {name} must hold numbers, got dtype {dtype}; convert it first")


def result_dtype(op: str, common: Any, preferred: Any) -> Any:
    """The dtype of a product of operands of one dtype, as lax has it.

    Raises:
        TypeError: `preferred` is no dtype, or lax has no product in it.
    """
    if preferred is None:
        return common
    what = f"{op}: preferred_element_type={preferred!r}"
    try:
        dtype = jax.dtypes.canonicalize_dtype(preferred)
    except TypeError:
        raise TypeError(f"{what} must be a dtype or None") from None
    problem = matmul.why_not_dtypes(common, dtype)
    if problem is not None:
        raise TypeError(
            f"{what} does not go with operands of dtype {common}: {problem} Convert the operands "
            "or the result instead"
        )
    return dtype

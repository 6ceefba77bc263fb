"""Checks of the operands and dtypes of matrix products, in the words of the public functions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pk_jax._primitives import matmul
from pk_jax._reference.matmul import ACTIVATIONS


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


def check_epilogue(op: str, bias: Any, activation: Any, cols: int, common: Any) -> None:
    """Raises unless a bias and an activation go with a product of so many columns.

    Args:
        op: the op's name.
        bias: the bias, or None.
        activation: the name of the activation, or None.
        cols: of the product.
        common: the dtype in which the operands are multiplied.
    """
    if activation is not None and activation not in [*ACTIVATIONS]:
        raise ValueError(
            f"{op}: activation must be one of {[*ACTIVATIONS]} or None, got {activation!r}; call "
            "another one on the result"
        )
    if bias is None and activation is None:
        return
    if not jnp.issubdtype(common, jnp.floating):
        raise TypeError(
            f"{op}: bias and activation go with real floating-point operands, got {common}; add "
            "and call them on the result"
        )
    if bias is None:
        return
    check_operand(op, "bias", bias)
    if bias.shape != (cols,):
        raise ValueError(
            f"{op}: bias must be [n], a number for each of the {cols} columns of w, got shape "
            f"{bias.shape}; reshape it, or add it to the result"
        )
    if bias.dtype not in (common, np.dtype("float32")):
        raise TypeError(
            f"{op}: bias must be {common}, as the operands, or float32, got {bias.dtype}; convert "
            "it"
        )

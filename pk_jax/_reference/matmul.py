"""The matrix product in jax.lax."""

from typing import Any

from jax import lax


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

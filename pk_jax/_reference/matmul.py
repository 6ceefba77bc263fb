"""The matrix product in jax.lax."""

from typing import Any

from jax import lax


def matmul(a: Any, b: Any, *, transpose_a: bool, transpose_b: bool, dtype: Any) -> Any:
    """[m, k] @ [k, n] in `dtype`; a is [k, m] if transpose_a, b is [n, k] if transpose_b."""
    contracting = ((0 if transpose_a else 1,), (1 if transpose_b else 0,))
    return lax.dot_general(a, b, (contracting, ((), ())), preferred_element_type=dtype)

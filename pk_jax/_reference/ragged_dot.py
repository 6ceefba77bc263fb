"""The grouped matrix product in jax.lax: rows by the matrix of their group, and its transpose.

Rows past the sum of the sizes give zeros and add to nothing; sizes that go past the last row are
cut there. A map over all operands is a leading dimension of each; groups come before it.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax


def rows_numbers(maps: int, transpose_b: bool) -> lax.RaggedDotDimensionNumbers:
    """What `ragged_dot` contracts: k of [m, k], and of [g, k, n] or [g, n, k]."""
    k = maps + 2 if transpose_b else maps + 1
    return lax.RaggedDotDimensionNumbers(
        (((maps + 1,), (k,)), (range(maps), range(1, maps + 1))), [maps], [0]
    )


def groups_numbers(maps: int) -> lax.RaggedDotDimensionNumbers:
    """What `ragged_contract` contracts: the rows of each group of [m, p] and [m, q]."""
    return lax.RaggedDotDimensionNumbers(
        (((maps,), (maps,)), (range(maps), range(maps))), [maps], []
    )


def ragged_dot(
    lhs: Any, rhs: Any, group_sizes: Any, *, transpose_b: bool, dtype: Any, precision: Any
) -> Any:
    """[m, k] times [g, k, n] (or [g, n, k]) by groups of rows: [m, n] in `dtype`."""
    numbers = rows_numbers(lhs.ndim - 2, transpose_b)
    return _in_dtype(lhs, rhs, group_sizes, numbers, dtype, precision)


def ragged_contract(lhs: Any, rhs: Any, group_sizes: Any, *, dtype: Any, precision: Any) -> Any:
    """The product over the rows of each group of [m, p] and [m, q]: [g, p, q] in `dtype`."""
    numbers = groups_numbers(lhs.ndim - 2)
    return _in_dtype(lhs, rhs, group_sizes, numbers, dtype, precision)


def cut(group_sizes: Any, num_rows: int) -> Any:
    """The sizes as the kernel reads them: none below 0, and none past the last row.

    lax adds them up as they are, in their dtype.
    """
    sizes = jnp.clip(group_sizes, 0, num_rows)
    if num_rows * sizes.shape[-1] <= np.iinfo(np.int32).max:
        return sizes
    axis = sizes.ndim - 1
    ends = lax.associative_scan(lambda a, b: jnp.minimum(a, num_rows - b) + b, sizes, axis=axis)
    return jnp.diff(ends, axis=axis, prepend=0)


def _in_dtype(
    lhs: Any, rhs: Any, group_sizes: Any, numbers: Any, dtype: Any, precision: Any
) -> Any:
    group_sizes = cut(group_sizes, lhs.shape[lhs.ndim - 2])
    # Two dtypes meet in gradients only: there lax computes in the wider and then rounds.
    product = lax.ragged_dot_general(
        lhs,
        rhs,
        group_sizes,
        numbers,
        precision=precision,
        preferred_element_type=dtype if lhs.dtype == rhs.dtype else None,
    )
    return lax.convert_element_type(product, dtype)

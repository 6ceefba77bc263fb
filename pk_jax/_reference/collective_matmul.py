"""Matrix products with a collective before or after them, in jax.lax.

Operands are [outer, rows, k], of which the ranks have parts along the rows (or along k), and [k, p]
or, if transpose_w, [p, k]. Products are summed in fp32. What crosses the link is rounded once, the
parts are summed in rank order in fp32, and that sum is rounded once: on every rank the same bits.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pk_jax import _compat
from pk_jax._compat import parallel
from pk_jax._reference import collectives, matmul

AxisNames = tuple[Any, ...]


def all_gather_matmul(
    x: Any, *ws: Any, axis_name: AxisNames, transpose_w: bool, dtype: Any, precision: Any
) -> list[Any]:
    """The ranks' rows of x, [outer, ranks * rows, k], and their products with each w."""
    outer, rows, k = x.shape
    if x.size:
        gathered = collectives.all_gather(x, axis_name, axis=1, tiled=True)
    else:  # of nothing XLA has no gather
        gathered = x.reshape(outer, parallel.psum(1, axis_name) * rows, k)
    multiply = functools.partial(_multiply, transpose_w, dtype, precision)
    return [gathered, *(in_rows(multiply, gathered, w) for w in ws)]


def matmul_reduce_scatter(
    *pairs: Any,
    axis_name: AxisNames,
    axis_size: int,
    transpose_w: bool,
    dtype: Any,
    wire: Any,
    precision: Any,
) -> Any:
    """This rank's rows of the sum over ranks, and over pairs x, w, x, w, ..., of x @ w.

    `wire` is the dtype in which parts cross the link.
    """
    part = _part(pairs, transpose_w, dtype, wire, precision)
    exchange = functools.partial(_exchange, axis_name)
    return scattered_sum(part, axis_size, dtype, exchange)


def matmul_all_reduce(
    *pairs: Any,
    axis_name: AxisNames,
    axis_size: int,
    transpose_w: bool,
    dtype: Any,
    wire: Any,
    precision: Any,
) -> Any:
    """All rows of the sum over ranks and pairs; as in matmul_reduce_scatter."""
    part = _part(pairs, transpose_w, dtype, wire, precision)
    to = "invarying" if _compat.check_vma() else "varying"
    exchange = functools.partial(_exchange, axis_name)
    gather = functools.partial(collectives.all_gather, axis_name=axis_name, tiled=True, to=to)
    return whole_sum(part, axis_size, dtype, exchange, gather)


def accumulator(dtype: Any) -> Any:
    """The dtype in which numbers of a dtype are summed: fp32 for floats of 8 and 16 bits."""
    is_small = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return np.dtype("float32") if is_small else dtype


def in_rows(multiply: Callable[[Any, Any], Any], x: Any, w: Any) -> Any:
    """multiply(x, w) of an x [outer, rows, k] that it takes as one matrix."""
    outer, rows, k = x.shape
    y = multiply(x.reshape(outer * rows, k), w)
    return y.reshape(outer, rows, y.shape[1])


def scattered_sum(part: Any, num_ranks: int, dtype: Any, exchange: Callable[[Any], Any]) -> Any:
    """This rank's rows of the sum over ranks of [outer, ranks * rows, p].

    Args:
        part: what this rank has.
        num_ranks: how many there are.
        dtype: that of the sum.
        exchange: sends index r of dimension 1 to rank r, and has what comes in the same places.
    """
    outer, rows, p = part.shape
    if part.size == 0:  # XLA's compiler for CPUs ends the process over an exchange of nothing
        return lax.convert_element_type(part.reshape(outer, rows // num_ranks, p), dtype)
    parts = exchange(part.reshape(outer, num_ranks, rows // num_ranks, p))
    in_order = (lax.index_in_dim(parts, r, 1, keepdims=False) for r in range(num_ranks))
    exact = (lax.convert_element_type(each, accumulator(dtype)) for each in in_order)
    return lax.convert_element_type(functools.reduce(lax.add, exact), dtype)


def whole_sum(
    part: Any,
    num_ranks: int,
    dtype: Any,
    exchange: Callable[[Any], Any],
    gather: Callable[[Any], Any],
) -> Any:
    """The sum over ranks on all of them: each sums a share of the rows, and gathers the others'.

    `gather` concatenates the ranks' shares along dimension 0; the rest is as in scattered_sum.
    """
    if part.size == 0:
        return lax.convert_element_type(part, dtype)
    outer, rows, p = part.shape
    flat = jnp.pad(
        part.reshape(1, outer * rows, p), ((0, 0), (0, -outer * rows % num_ranks), (0, 0))
    )
    share = scattered_sum(flat, num_ranks, dtype, exchange)
    return gather(share[0])[: outer * rows].reshape(part.shape)


def _multiply(transpose_w: bool, dtype: Any, precision: Any, x: Any, w: Any) -> Any:
    return matmul.matmul(
        x, w, transpose_a=False, transpose_b=transpose_w, dtype=dtype, precision=precision
    )


def _part(pairs: Sequence[Any], transpose_w: bool, dtype: Any, wire: Any, precision: Any) -> Any:
    """The sum over pairs of x @ w, rounded to `wire` and not before."""
    exact = dtype if len(pairs) == 2 and wire == dtype else accumulator(dtype)
    multiply = functools.partial(_multiply, transpose_w, exact, precision)
    products = [in_rows(multiply, x, w) for x, w in zip(pairs[::2], pairs[1::2], strict=True)]
    return lax.convert_element_type(functools.reduce(lax.add, products), wire)


def _exchange(axis_name: AxisNames, parts: Any) -> Any:
    return collectives.all_to_all(parts, axis_name, 1, 1, tiled=True)

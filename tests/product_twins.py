"""What the tests of products with a collective share: each op, and the same on whole arrays."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import pk_jax as pk

RANKS = 4


class Twin(NamedTuple):
    """An op on each rank's parts, what it is on the whole operands, and where these lie."""

    op: Callable
    whole: Callable
    in_specs: tuple
    out_specs: P
    shapes: tuple


def gather(x, w):
    return pk.all_gather_matmul(x, w, "x")


def scatter(x, w):
    return pk.matmul_reduce_scatter(x, w, "x")


def reduce(x, w):
    return pk.matmul_all_reduce(x, w, "x")


def times(x, w):
    return x @ w


def times_on_each(x, w):
    """Every rank has the result."""
    return jnp.tile(x @ w, (RANKS, 1))


def times_alike(x, w):
    """Every rank multiplies its columns of x by the same w."""
    return x @ jnp.tile(w, (RANKS, 1))


ROWS, COLUMNS = P("x"), P(None, "x")
TWINS = {
    "gather": Twin(gather, times, (ROWS, COLUMNS), COLUMNS, ((12, 7), (7, 20))),
    "scatter": Twin(scatter, times, (COLUMNS, ROWS), ROWS, ((8, 12), (12, 5))),
    "reduce": Twin(reduce, times, (COLUMNS, ROWS), P(), ((3, 12), (12, 5))),
    "gather, w alike": Twin(gather, times_on_each, (ROWS, P()), ROWS, ((12, 7), (7, 5))),
    "scatter, w alike": Twin(scatter, times_alike, (COLUMNS, P()), ROWS, ((8, 12), (3, 5))),
}
OPS = ("gather", "scatter", "reduce")


def mapped(f, mesh, in_specs, out_specs, check_vma=True):
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


def on_mesh(twin, mesh, check_vma=True):
    """The op, as a function of the whole operands."""
    return mapped(twin.op, mesh, twin.in_specs, twin.out_specs, check_vma)


def rounded_sum(x, w, num_ranks, dtype, wire):
    """The sum of the ranks' products as it is to be rounded, in NumPy."""
    total = np.float32(0)
    for part, rows in zip(np.split(x, num_ranks, 1), np.split(w, num_ranks, 0), strict=True):
        product = np.asarray(part, "f4") @ np.asarray(rows, "f4")
        total = total + product.astype(jnp.dtype(wire)).astype("f4")
    return total.astype(jnp.dtype(dtype))

"""Programs that use every collective, for tests of the kernels among each other and beside XLA's.

All arithmetic is of 32-bit integers, so what kernels and lax give is equal bit by bit.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

import pk_jax as pk


def ours(implementation="cuda"):
    """The ops of pk_jax by name."""
    return lambda name: functools.partial(getattr(pk, name), implementation=implementation)


def theirs(name):
    """The ops of jax.lax by name; ragged_all_to_all, which CPUs lack, for slices of one size."""
    if name == "ragged_all_to_all":
        return lambda x, *_, axis_name: lax.all_to_all(x, axis_name, 0, 0, tiled=True)
    return getattr(lax, name)


def link(op, x, axis="x"):
    """One call of each op on x [4 n, 6 n], an int32 array; of the shape of x."""
    n = lax.axis_size(axis)
    ring = [(i, (i + 1) % n) for i in range(n)]
    parts = op("all_gather")(x, axis, axis=1)
    swapped = op("all_to_all")(x * 3, axis, 0, 1, tiled=True).reshape(x.shape)
    moved = op("ppermute")(x, axis, ring[:-1])
    total = op("psum")(x ^ 5, axis)
    share = op("psum_scatter")(x, axis, scatter_dimension=1, tiled=True)
    largest = op("pmax")(x, axis) - op("pmin")(x, axis)
    x = (parts.sum(1) + swapped) ^ moved ^ (total << 1) ^ largest ^ jnp.tile(share, (1, n))
    return x + op("ragged_all_to_all")(x, x, *even_slices(x, axis), axis_name=axis)


def even_slices(x, axis="x"):
    """Index arrays that make ragged_all_to_all a tiled all_to_all of rows."""
    n, rank = lax.axis_size(axis), lax.axis_index(axis)
    each = x.shape[0] // n
    sizes = lax.pcast(jnp.full(n, each, jnp.int32), axis, to="varying")
    return sizes * jnp.arange(n, dtype=jnp.int32), sizes, sizes * rank, sizes


def chain(op, x, length, axis="x"):
    for _ in range(length):
        x = link(op, x, axis)
    return x


def noise(step, rank, shape):
    """Deterministic noise that every rank can compute for every other."""
    size = 1
    for dimension in shape:
        size *= dimension
    i = lax.iota(jnp.uint32, size)
    seed = step.astype(jnp.uint32) * jnp.uint32(2654435761)
    seed = seed + rank.astype(jnp.uint32) * jnp.uint32(40503)
    h = (i ^ seed) * jnp.uint32(2246822519)
    return (h ^ (h >> 15)).reshape(shape)


def count_errors(op, steps, rows, columns, axis="x"):
    """Runs all ops `steps` times under scan on noise [n rows, columns]: wrong elements, and calls.

    What each call should give is computed on the spot from the noise of all ranks.
    """
    n = lax.axis_size(axis)
    shape = (n * rows, columns)
    perm = [(i, (i + 1) % n) for i in range(n)][:-1]

    def one(wrong, step):
        rank = lax.axis_index(axis)
        x = noise(step, rank, shape)
        all_x = jax.vmap(lambda r: noise(step, r, shape))(jnp.arange(n))
        own = lax.dynamic_slice_in_dim(all_x, rank * rows, rows, 1)
        source = jnp.where(rank > 0, all_x[rank - 1], jnp.zeros_like(x))
        kept = jnp.full_like(x, 7)
        pairs = (
            (op("psum")(x, axis), all_x.sum(0, dtype=jnp.uint32)),
            (op("psum_scatter")(x, axis, tiled=True), own.sum(0, dtype=jnp.uint32)),
            (op("all_gather")(x, axis), all_x),
            (op("pmax")(x, axis), all_x.max(0)),
            (op("all_to_all")(x, axis, 0, 0, tiled=True), own.reshape(shape)),
            (op("ppermute")(x, axis, perm), source),
            (op("pmin")(x, axis), all_x.min(0)),
            (
                op("ragged_all_to_all")(x, kept, *even_slices(x, axis), axis_name=axis),
                own.reshape(shape),
            ),
        )
        return wrong + sum((got != want).sum() for got, want in pairs), None

    start = lax.pcast(jnp.int32(0), axis, to="varying")
    return lax.scan(one, start, steps)[0]

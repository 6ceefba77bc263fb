"""The collectives in NumPy, on operands stacked by rank, and what tests of the kernels share."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pk_jax._tuning import cost_model


def put(mesh, x):
    """An array stacked by rank, on its ranks."""
    return jax.device_put(x, NamedSharding(mesh, P(mesh.axis_names)))


def on(mesh, f, check_vma=True, **jit):
    """Runs f on each rank's part of each operand; a pytree of results stacked by rank."""
    spec = P(mesh.axis_names)

    def body(*parts):
        return jax.tree.map(lambda y: y[None], f(*(part[0] for part in parts)))

    mapped = jax.shard_map(
        lambda parts: body(*parts), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
    )
    return jax.jit(lambda *parts: mapped(parts), **jit)


def bits(rng, shape, dtype):
    """Any bits at all: NaNs with payloads, signed zeros, denormals."""
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]


def normal(rng, shape, dtype):
    """Numbers that round when they are added; integers that wrap around."""
    dtype = jnp.dtype(dtype)
    if dtype.kind in "iub":
        return bits(rng, shape, dtype)
    x = rng.standard_normal(shape) * 4.0 ** rng.integers(-3, 4, shape)
    return (x + 1j * rng.standard_normal(shape) if dtype.kind == "c" else x).astype(dtype)


def total(x):
    """The sum over ranks, in rank order; 16-bit floats in float32 and rounded once."""
    narrow = x.dtype.itemsize == 2 and jnp.issubdtype(x.dtype, jnp.floating)
    terms = x.astype(np.float32) if narrow else x
    with np.errstate(over="ignore"):
        return functools.reduce(np.add, terms).astype(x.dtype)


def largest(x):
    """The maximum over ranks; a NaN goes into the result, as in XLA's maximum."""
    return x.any(0) if x.dtype == bool else np.maximum.reduce(x, 0)


def smallest(x):
    return x.all(0) if x.dtype == bool else np.minimum.reduce(x, 0)


def everywhere(reduce, x):
    """The result of a reduction on every rank."""
    return np.broadcast_to(reduce(x)[None], x.shape)


def scattered(x, dimension, tiled):
    """psum_scatter by rank."""
    parts = np.split(total(x), len(x), dimension)
    return np.stack(parts if tiled else [np.squeeze(part, dimension) for part in parts])


def exchanged(x, split, concat, tiled):
    """all_to_all by rank: part j of rank i is part i of rank j."""
    parts = [np.split(part, len(x), split) for part in x]
    join = np.concatenate
    if not tiled:
        parts = [[np.squeeze(p, split) for p in row] for row in parts]
        join = np.stack
    return np.stack([join([row[j] for row in parts], concat) for j in range(len(x))])


def permuted(x, perm):
    """Ppermute by rank: zeros where nothing arrives."""
    result = np.zeros_like(x)
    for source, to in perm:
        result[to] = x[source]
    return result


def moved(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes):
    """ragged_all_to_all by rank."""
    result = output.copy()
    updates = send_sizes.shape[1] // len(operand)
    for source, at in np.ndindex(send_sizes.shape):
        size, start = send_sizes[source, at], input_offsets[source, at]
        to = output_offsets[source, at]
        result[at // updates, to : to + size] = operand[source, start : start + size]
    return result


def slices(rng, n, updates, rows, room, dtype="int32"):
    """Index arrays by rank of slices that fill most of `room` rows and do not overlap there."""
    arrays = np.zeros((4, n, n * updates), dtype)
    input_offsets, send_sizes, output_offsets, recv_sizes = arrays
    for receiver in range(n):
        arrivals = rng.permutation([(i, u) for i in range(n) for u in range(updates)])
        cuts = np.sort(rng.integers(0, room + 1, 2 * len(arrivals)))
        for (source, u), start, stop in zip(arrivals, cuts[::2], cuts[1::2], strict=True):
            size, at = min(stop - start, rows), receiver * updates + u
            input_offsets[source, at] = rng.integers(0, rows - size + 1)
            send_sizes[source, at], output_offsets[source, at] = size, start
            recv_sizes[receiver, source * updates + u] = size
    return list(arrays)


@contextlib.contextmanager
def forced(*ways):
    """The cost model chooses by turns, for each op: one way for one call that is lowered.

    Args:
        *ways: words that the choice has as its mechanism, protocol or algorithm: {"ll"}, {"tma"}.
            A way that a call cannot go leaves it the cheapest.
    """
    turns = {}
    choose = cost_model.choose

    def chosen(hardware, work, mechanism=None, num_blocks=None):
        turn = turns.setdefault(work.op, itertools.cycle(ways))
        words = next(turn)
        for choice in cost_model.candidates(hardware, work, num_blocks):
            if words <= {choice.mechanism, choice.protocol, choice.algorithm}:
                return choice
        return choose(hardware, work, mechanism, num_blocks)

    cost_model.choose = chosen
    try:
        yield
    finally:
        cost_model.choose = choose


def same_bits(got, want, name=""):
    got = np.asarray(got)
    assert got.dtype == want.dtype and got.shape == want.shape, name
    assert got.tobytes() == np.ascontiguousarray(want).tobytes(), name


def same_values(got, want, name=""):
    """Equal, zeros of either sign and NaNs of any bits being one value."""
    got = np.asarray(got)
    assert got.dtype == want.dtype and got.shape == want.shape, name
    with np.errstate(invalid="ignore"):
        same = (got == want) | ((got != got) & (want != want))
    assert np.all(same), (name, np.argwhere(~same)[:3])

"""What the tests of products share: operands, the lax op to compare with, the comparison."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def values(shape, dtype="float32", seed=0):
    """Numbers that every dtype has, small enough for any sum of them."""
    numbers = np.random.default_rng(seed).integers(0 if dtype == "uint16" else -3, 4, shape)
    if dtype == "bool":
        return jnp.asarray(numbers > 0)
    if dtype == "complex64":
        return jnp.asarray(numbers + 1j * np.roll(numbers, 1), dtype)
    return jnp.asarray(numbers.astype(jnp.dtype(dtype)))


def reals(shape, dtype="float32", seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def lax_matmul(x, w, dtype=None):
    """The lax op of the same meaning, with the leading dimensions as they are."""
    numbers = (((x.ndim - 1,), (0,)), ((), ()))
    return lax.dot_general(x, w, numbers, preferred_element_type=dtype)


def check_equal(got, want, **tolerance):
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    exact = "complex128" if jnp.issubdtype(got.dtype, jnp.complexfloating) else "float64"
    np.testing.assert_allclose(
        np.asarray(got).astype(exact), np.asarray(want).astype(exact), **tolerance
    )


def grouped(lhs, rhs, sizes):
    """The grouped product by a loop over groups, in double precision."""
    lhs, rhs = (np.asarray(x).astype(np.complex128) for x in (lhs, rhs))
    out = np.zeros((len(lhs), rhs.shape[2]), np.complex128)
    first = 0
    for matrix, size in zip(rhs, sizes, strict=True):
        out[first : first + size] = lhs[first : first + size] @ matrix
        first += size
    return out


def grouped_contract(lhs, rhs, sizes):
    """The products over the rows of each group, in double precision."""
    lhs, rhs = (np.asarray(x).astype(np.complex128) for x in (lhs, rhs))
    ends = np.cumsum(sizes)
    return np.stack([lhs[e - s : e].T @ rhs[e - s : e] for e, s in zip(ends, sizes, strict=True)])


def compiled(f, *args):
    """A program of many products on a GPU, with the first algorithm at hand for XLA's."""
    return jax.jit(f).lower(*args).compile(compiler_options={"xla_gpu_autotune_level": 0})


def poison(results):
    """Fills the memory in which results of these types will lie with NaN."""
    arrays = [jnp.full(x.shape, jnp.nan, x.dtype) for x in results]
    jax.block_until_ready(arrays)
    for array in arrays:
        array.delete()


# Sizes of groups of 24 rows.
SIZES = {
    "random": (3, 5, 1, 7, 8),
    "skewed": (1, 0, 20, 2, 1),
    "empty ones": (0, 12, 0, 0, 12),
    "all in one": (0, 0, 24, 0, 0),
    "short sum": (2, 0, 3, 4, 1),
    "nothing": (0, 0, 0, 0, 0),
    "past the last row": (10, 10, 10, 10, 10),
}


def operands(m=24, k=9, n=11, g=5, dtype="float32"):
    return values((m, k), dtype), values((g, k, n), dtype, seed=1)


def sizes_of(*sizes, dtype="int32"):
    return jnp.asarray(sizes, dtype)


def by_slices(lhs, rhs, sizes):
    """The product by slices, which JAX can differentiate as often as it likes."""
    ends = np.minimum(np.cumsum(sizes), len(lhs))
    parts = [lhs[e - s : e] @ w for e, s, w in zip(ends, sizes, rhs, strict=True)]
    return jnp.concatenate([*parts, jnp.zeros((len(lhs) - ends[-1], rhs.shape[2]))])

"""pk.ragged_dot on CPU devices: derivatives of every order, maps, scan and remat."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from product_models import (
    SIZES,
    by_slices,
    grouped,
    grouped_contract,
    operands,
    reals,
    sizes_of,
    values,
)

import pk_jax as pk
from pk_jax._primitives.ragged_dot import ragged_dot_p
from pk_jax.config import Config


def bound(dtype="float32", transpose_b=False):
    """The primitive itself."""
    params = {"dtype": np.dtype(dtype), "precision": None, "implementation": None}
    return functools.partial(ragged_dot_p.bind, transpose_b=transpose_b, config=Config(), **params)


@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("out", ["bfloat16", "float32"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_transposes(sizes, out, transpose_b):
    """Each gradient lies as its operand does, in its dtype, and is exact."""
    lhs, rhs = operands(dtype="bfloat16")
    probe = values((24, 11), out, seed=2)
    stored = rhs.mT if transpose_b else rhs
    product = bound(out, transpose_b)
    y, pull = jax.vjp(lambda lhs, rhs: product(lhs, rhs, sizes_of(*sizes)), lhs, stored)
    assert y.dtype == out
    np.testing.assert_array_equal(np.asarray(y, np.complex128), grouped(lhs, rhs, sizes))
    to_lhs, to_rhs = pull(probe)
    assert to_lhs.dtype == to_rhs.dtype == jnp.bfloat16
    want = grouped(probe, rhs.mT, sizes)
    np.testing.assert_array_equal(np.asarray(to_lhs, np.complex128), want)
    got = to_rhs.mT if transpose_b else to_rhs
    want = grouped_contract(lhs, probe, sizes)
    np.testing.assert_array_equal(np.asarray(got, np.complex128), want)
    text = str(jax.make_jaxpr(pull)(probe))
    assert text.count("pk_ragged_dot[") == 1 and text.count("pk_ragged_contract[") == 1


def test_derivatives_of_second_and_third_order():
    """Where lax.ragged_dot has none."""
    lhs, rhs = reals((6, 3)), reals((3, 3, 2), seed=1)
    sizes = (2, 0, 3)

    def ours(lhs, rhs):
        return jnp.sum(pk.ragged_dot(lhs, rhs, sizes_of(*sizes)) ** 3)

    def theirs(lhs, rhs):
        return jnp.sum(by_slices(lhs, rhs, sizes) ** 3)

    for transform in (
        lambda f: jax.hessian(f, (0, 1)),
        lambda f: jax.jacrev(jax.grad(f, 1), (0, 1)),
        lambda f: jax.grad(
            lambda *xs: sum(jnp.sum(g**2) for g in jax.grad(f, (0, 1))(*xs)), (0, 1)
        ),
        lambda f: jax.jacfwd(jax.jacrev(jax.grad(f, 0), 1), 0),
    ):
        got, want = (jax.tree.leaves(jax.jit(transform(f))(lhs, rhs)) for f in (ours, theirs))
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)


def test_forward():
    lhs, rhs = operands()
    f = functools.partial(pk.ragged_dot, group_sizes=sizes_of(*SIZES["random"]))
    _, tangent = jax.jvp(f, (lhs, rhs), (lhs + 1, rhs - 1))
    np.testing.assert_allclose(tangent, f(lhs + 1, rhs) + f(lhs, rhs - 1))
    _, tangent = jax.jvp(lambda rhs: f(lhs, rhs), (rhs,), (rhs - 1,))
    np.testing.assert_allclose(tangent, f(lhs, rhs - 1))


# Transforms.


@pytest.mark.parametrize(
    "mapped",
    [(0, 0, 0), (1, 2, 1), (0, None, 0), (None, 3, None), (None, None, 0), (2, 1, None)],
    ids=str,
)
def test_vmap(mapped):
    """Of the product and of its gradients."""
    several = (
        np.stack([reals((6, 3), seed=i) for i in range(4)]),
        np.stack([reals((3, 3, 2), seed=i) for i in range(4)]),
        np.asarray([(1, 2, 3), (0, 6, 0), (2, 1, 1), (0, 0, 0)], np.int32),
    )

    def product(lhs, rhs, sizes):
        return pk.ragged_dot(lhs, rhs, sizes)

    def gradients(lhs, rhs, sizes):
        return jax.grad(lambda *xs: jnp.sum(product(*xs, sizes) ** 3), (0, 1))(lhs, rhs)

    xs = [x[0] if d is None else np.moveaxis(x, 0, d) for x, d in zip(several, mapped, strict=True)]
    each = [
        [x[0] if d is None else x[i] for x, d in zip(several, mapped, strict=True)]
        for i in range(4)
    ]
    for f in (product, gradients):
        got, alone = jax.tree.leaves(jax.jit(jax.vmap(f, mapped))(*xs)), jax.jit(f)
        want = jax.tree.leaves(jax.tree.map(lambda *ys: np.stack(ys), *(alone(*x) for x in each)))
        for one, other in zip(got, want, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    # The gradient of a map, too.
    total = jax.jit(jax.grad(lambda *xs: jnp.sum(jax.vmap(product, mapped)(*xs) ** 3), (0, 1)))(*xs)
    alone = jax.jit(gradients)
    for i, (d, one) in enumerate(zip(mapped[:2], total, strict=True)):
        parts = [np.asarray(alone(*x)[i]) for x in each]
        want = sum(parts) if d is None else np.stack(parts, d)
        np.testing.assert_allclose(one, want, rtol=1e-4, atol=1e-4)


def test_vmap_twice_and_over_nothing():
    lhs, rhs = operands()
    sizes = sizes_of(*SIZES["random"])
    f = jax.vmap(jax.vmap(pk.ragged_dot, (0, None, None)), (0, 0, 0))
    got = f(
        jnp.stack([jnp.stack([lhs, lhs + 1])] * 3), jnp.stack([rhs] * 3), jnp.stack([sizes] * 3)
    )
    np.testing.assert_array_equal(got[2, 1], pk.ragged_dot(lhs + 1, rhs, sizes))
    none = jax.vmap(pk.ragged_dot, (0, None, None))(jnp.zeros((0, 24, 9)), rhs, sizes)
    assert none.shape == (0, 24, 11)


def test_the_sizes_are_not_constants():
    """One compiled program for all of them."""
    lhs, rhs = operands()
    traces = []

    @jax.jit
    def f(sizes):
        traces.append(sizes)
        return pk.ragged_dot(lhs, rhs, sizes)

    for sizes in SIZES.values():
        got = np.asarray(f(sizes_of(*sizes)), np.complex128)
        np.testing.assert_array_equal(got, grouped(lhs, rhs, sizes))
    assert len(traces) == 1


def test_scan_and_remat():
    lhs, rhs = reals((6, 3)), reals((2, 3, 3), seed=1) / 3
    sizes = (2, 3)

    def loss(product, lhs, rhs):
        layer = jax.checkpoint(lambda y, _: (product(y, rhs), None))
        return jnp.sum(lax.scan(layer, lhs, length=3)[0] ** 2)

    ours = functools.partial(pk.ragged_dot, group_sizes=sizes_of(*sizes))
    theirs = functools.partial(by_slices, sizes=sizes)
    got, want = (
        jax.jit(jax.grad(functools.partial(loss, f), (0, 1)))(lhs, rhs) for f in (ours, theirs)
    )
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)

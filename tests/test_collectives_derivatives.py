"""The derivatives of all collectives against those of jax.lax, to second order, in both type modes.

What it would catch: a transpose that differs from lax's with or without types, one that leaves
pk_jax, a derivative where lax has none.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from transforms import LINEAR, RANKS, primitives_in, values

import pk_jax as pk

typed = pytest.mark.parametrize("check_vma", [True, False])
with_groups = [[0, 2], [3, 1]]

GROUPED = {
    "psum": lambda m, x: m.psum(x, "x", axis_index_groups=with_groups),
    "psum uneven": lambda m, x: m.psum(x, "x", axis_index_groups=[[1], [3, 0, 2]]),
    "psum_scatter": lambda m, x: m.psum_scatter(x, "x", axis_index_groups=with_groups, tiled=True),
    "all_to_all": lambda m, x: m.all_to_all(
        x, "x", 0, 1, axis_index_groups=with_groups, tiled=True
    ),
}


@pytest.fixture
def mapped(mesh_of):
    """Puts f under jit and shard_map on an axis "x", the first dimension split in and out."""

    def make(f, **kwargs):
        specs = {"in_specs": P("x"), "out_specs": P("x")} | kwargs
        return jax.jit(jax.shard_map(f, mesh=mesh_of(x=RANKS), **specs))

    return make


def orders(f, x):
    """Value, gradient and gradient of the gradient of a scalar made from f(x)."""

    def loss(x):
        y = f(x)
        weights = jnp.cos(jnp.arange(float(y.size))).reshape(y.shape)
        return jnp.vdot(weights, jnp.sin(y) * y)

    def second(x):
        return jnp.sum(jnp.sin(jax.grad(loss)(x)))

    return jax.jit(lambda x: (f(x), jax.grad(loss)(x), jax.grad(second)(x)))(x)


def body(op, module):
    # The operand varies, and the sum of the result with it makes it vary again.
    return lambda x: op(module, x).reshape(4, -1) * 1.5 + jnp.tile(x.sum(), (4, 1))


def assert_same_orders(op, mapped, check_vma):
    x = values(RANKS * 4, 8)
    got, want = (orders(mapped(body(op, m), check_vma=check_vma), x) for m in (pk, lax))
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
        assert np.abs(theirs).max() > 0


@typed
@pytest.mark.parametrize("name", LINEAR)
def test_derivatives_are_those_of_lax(name, check_vma, mapped):
    assert_same_orders(LINEAR[name], mapped, check_vma)


@pytest.mark.parametrize("name", GROUPED)
def test_derivatives_in_groups(name, mapped):
    assert_same_orders(GROUPED[name], mapped, check_vma=False)


@typed
def test_derivative_of_an_untiled_all_to_all(check_vma, mapped):
    """Against the derivative of a gather: lax cannot transpose its own."""
    pairs = [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2)]

    def untiled(x, split, concat):
        return pk.all_to_all(x, "x", split, concat).reshape(4, -1)

    def dense(x, split, concat):
        # The same by gathering all, and taking this rank's part of each.
        whole = jnp.moveaxis(lax.all_gather(x, "x"), split + 1, 0)
        mine = lax.dynamic_index_in_dim(whole, lax.axis_index("x"), keepdims=False)
        return jnp.moveaxis(mine, 0, concat).reshape(4, -1)

    x = values(RANKS * 4, 4, 4)

    def all_orders(f):
        parts = [functools.partial(f, split=split, concat=concat) for split, concat in pairs]
        return jax.jit(lambda x: [orders(mapped(part, check_vma=check_vma), x) for part in parts])

    for pair, got, want in zip(pairs, all_orders(untiled)(x), all_orders(dense)(x), strict=True):
        for ours, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5, err_msg=str(pair))


@typed
def test_derivative_of_a_replicated_operand(check_vma, mapped):
    x = values(4, 3)

    def loss(module):
        f = mapped(
            lambda x: module.psum(jnp.sin(x), "x"), in_specs=P(), out_specs=P(), check_vma=check_vma
        )
        return lambda x: jnp.sum(f(x) ** 2)

    np.testing.assert_allclose(jax.grad(loss(pk))(x), jax.grad(loss(lax))(x), rtol=1e-5)


@typed
def test_jvp(check_vma, mapped):
    @functools.partial(jax.jit, static_argnums=0)
    def both(f, x):
        return jax.jvp(f, (x,), (x + 1,))

    for name, op in LINEAR.items():
        x = values(RANKS * 4, 8)
        got, want = (both(mapped(body(op, m), check_vma=check_vma), x) for m in (pk, lax))
        for ours, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5, err_msg=name)


@typed
def test_transposes_are_of_pk(check_vma, mapped):
    ops = {
        "ppermute": ["pk_ppermute"],
        "all_to_all": ["pk_all_to_all"],
        "psum_scatter": ["pk_all_gather", "pk_psum_scatter"],
        # With types the transpose of a sum is a cast.
        "psum": ["pk_psum"],
    }
    for name, expected in ops.items():
        f = mapped(body(LINEAR[name], pk), check_vma=check_vma)
        names = primitives_in(jax.grad(lambda x, f=f: jnp.sum(f(x) ** 2)), values(RANKS * 4, 8))
        found = [n for n in names if n.startswith("pk_")]
        count = 1 if name == "psum_scatter" or (name == "psum" and check_vma) else 2
        assert sorted(found) == sorted(expected * count), name
        assert not {"psum", "reduce_scatter", "all_gather", "ppermute", "all_to_all"} & set(names)


@pytest.mark.parametrize("op", ["pmax", "pmin"])
@typed
def test_no_derivative_where_lax_has_none(op, check_vma, mapped):
    def loss(module, stopped):
        def f(x):
            y = lax.stop_gradient(x) if stopped else x
            return x - getattr(module, op)(y, "x")

        return lambda x: jnp.sum(mapped(f, check_vma=check_vma)(x) ** 2)

    x = values(8)
    for module in (pk, lax):
        with pytest.raises(NotImplementedError, match=f"rule for '(pk_)?{op}' not implemented"):
            jax.grad(loss(module, stopped=False))(x)
    got, want = (jax.grad(loss(module, stopped=True))(x) for module in (pk, lax))
    np.testing.assert_array_equal(got, want)

"""Products with a collective under JAX's transforms, against the product of the whole operands.

What it would catch: a derivative that is wrong with or without types, or not summed over an axis, a
backward pass that gathers twice, leaves pk_jax or keeps more than it says, a map whose elements are
mixed up.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from product_models import check_equal, reals
from product_twins import COLUMNS, OPS, RANKS, ROWS, TWINS, mapped, on_mesh
from transforms import primitives_in

import pk_jax as pk

FUSED = ("pk_all_gather_matmul", "pk_matmul_reduce_scatter", "pk_matmul_all_reduce")
typed = pytest.mark.parametrize("check_vma", [True, False])


def check_all(got, want, rtol=1e-4):
    for ours, theirs in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        check_equal(ours, theirs, rtol=rtol, atol=rtol * float(jnp.abs(theirs).max()))


def reals_of(twin):
    return tuple(reals(shape, seed=i) for i, shape in enumerate(twin.shapes))


def squares(f):
    return lambda *xs: sum(jnp.sum(y**2) for y in jax.tree.leaves(f(*xs)))


def cubes(f):
    return lambda *xs: jnp.sum(f(*xs) ** 3)


@typed
def test_derivatives(check_vma, mesh_of):
    """To second order; without types, where shard_map sums cotangents, to first."""
    twins = [TWINS[name] for name in (TWINS if check_vma else OPS)]
    num_seconds = 2 if check_vma else 0

    @functools.partial(jax.jit, static_argnums=0)
    def orders(ops, pairs):
        firsts = [jax.grad(cubes(f), (0, 1)) for f in ops]
        seconds = [jax.grad(squares(first), (0, 1)) for first in firsts[:num_seconds]]
        pairs = [*pairs, *pairs[:num_seconds]]
        return [f(*pair) for f, pair in zip([*firsts, *seconds], pairs, strict=True)]

    pairs = [reals_of(twin) for twin in twins]
    got = orders(tuple(on_mesh(twin, mesh_of(x=RANKS), check_vma) for twin in twins), pairs)
    check_all(got, orders(tuple(twin.whole for twin in twins), pairs))


# The ops of pk_jax in a program that takes both gradients of a sum of squares.
BACKWARD = {
    "gather": ["pk_all_gather_matmul", "pk_matmul", "pk_matmul_reduce_scatter"],
    "scatter": ["pk_all_gather_matmul", "pk_matmul", "pk_matmul_reduce_scatter"],
    "reduce": ["pk_matmul", "pk_matmul", "pk_matmul_all_reduce"],
}


@typed
@pytest.mark.parametrize("name", BACKWARD)
def test_the_backward_pass_is_made_of_these_ops(name, check_vma, mesh_of):
    twin = TWINS[name]
    loss = squares(on_mesh(twin, mesh_of(x=RANKS), check_vma))
    names = primitives_in(jax.grad(loss, (0, 1)), *reals_of(twin))
    want = BACKWARD[name] + (["pk_psum"] if name == "reduce" and not check_vma else [])
    assert sorted(n for n in names if n.startswith("pk_")) == sorted(want)
    assert not {"all_gather", "reduce_scatter", "psum", "dot_general", "transpose"} & set(names)
    alone = primitives_in(jax.grad(loss, 1), *reals_of(twin))  # no product for the gradient of x
    assert sorted(alone).count("pk_matmul_reduce_scatter") == (name == "scatter")


def test_several_weights(mesh_of):
    """One gather forward; backward one sum for all weights, which takes in the gathered x's."""
    x, ws = reals((8, 3)), tuple(reals((3, 4 * p), seed=p) for p in (2, 1, 3))

    def f(x, ws):
        *ys, gathered = pk.all_gather_matmul(x, ws, "x", return_gathered=True)
        return *ys[:2], gathered[None]

    loss = squares(mapped(f, mesh_of(x=RANKS), (ROWS, (COLUMNS,) * 3), (COLUMNS, COLUMNS, ROWS)))
    whole = squares(lambda x, ws: (x @ ws[0], x @ ws[1], *[x] * RANKS))
    got, want = (jax.jit(jax.grad(f, (0, 1)))(x, ws) for f in (loss, whole))
    check_all(got, want)
    names = primitives_in(jax.grad(loss, (0, 1)), x, ws)
    assert names.count("pk_all_gather_matmul") == names.count("pk_matmul_reduce_scatter") == 1
    assert names.count("pk_psum_scatter") == 1 and names.count("pk_matmul") == 2


def test_what_is_kept_for_the_backward_pass(mesh_of):
    """The gathered x of each rank, or its own part, which is then gathered again."""
    twin = TWINS["gather"]
    x, w = reals_of(twin)
    kept, results = {}, []
    for save in (True, False):
        f = functools.partial(pk.all_gather_matmul, axis_name="x", save_gathered=save)
        f = mapped(f, mesh_of(x=RANKS), twin.in_specs, twin.out_specs)
        y, pull = jax.vjp(jax.jit(f), x, w)
        kept[save] = sum(leaf.size for leaf in jax.tree.leaves(pull))
        results.append(pull(y))
        names = primitives_in(pull, y)
        assert names.count("pk_all_gather") == (not save)
    check_all(*results)
    assert kept == {True: RANKS * x.size + w.size, False: x.size + w.size}


def test_forward_mode(mesh_of):
    """Of both factors at once: for a sum that is one sum; of some, one of them mapped."""
    twins = [TWINS[name] for name in OPS]

    @functools.partial(jax.jit, static_argnums=0)
    def tangents(ops, pairs):
        results = []
        for f, (x, w) in zip(ops, pairs, strict=True):
            push = functools.partial(jax.jvp, f, (x, w))
            some = jnp.stack([x + 1, x - 2], -1)
            results.append(jax.vmap(lambda t, push=push, w=w: push((t, w - 1)), -1)(some))
        return results

    pairs = [reals_of(twin) for twin in twins]
    ops = tuple(on_mesh(twin, mesh_of(x=RANKS)) for twin in twins)
    check_all(tangents(ops, pairs), tangents(tuple(twin.whole for twin in twins), pairs))
    for name, f, pair in zip(OPS, ops, pairs, strict=True):
        names = primitives_in(lambda *xs, f=f: jax.jvp(f, xs, xs), *pair)
        fused = [n for n in names if n in FUSED]
        assert len(fused) == 2 and names.count("pk_matmul") == (name == "gather")


def test_vmap(mesh_of):
    """Over one factor it is the op, larger; over both it is made of its parts."""
    twins = [TWINS[name] for name in OPS]
    all_dims = ((1, None), (None, 2), (1, 2))
    cases = []
    for twin in twins:
        f, (x, w) = on_mesh(twin, mesh_of(x=RANKS)), reals_of(twin)
        xs, ws = np.stack([x, x + 1, x - 1]), np.stack([w, 2 * w, w - 1])
        for dx, dw in all_dims:
            moved = (
                x if dx is None else jnp.moveaxis(xs, 0, dx),
                w if dw is None else jnp.moveaxis(ws, 0, dw),
            )
            want = np.matmul(
                *(each if d is not None else each[0] for each, d in ((xs, dx), (ws, dw)))
            )
            cases.append((jax.vmap(f, (dx, dw)), moved, want))
    got = jax.jit(lambda operands: [g(*xs) for (g, *_), xs in zip(cases, operands, strict=True)])(
        [operands for _, operands, _ in cases]
    )
    check_all(got, [want for *_, want in cases])
    counts = [sum(n in FUSED for n in primitives_in(g, *xs)) for g, xs, _ in cases]
    assert counts == [1, 1, 0] * 3


def test_vmap_of_gradients(mesh_of):
    """The cotangent is mapped, and one factor is."""
    twin = TWINS["scatter"]
    x, w = reals_of(twin)

    def gradients(f):
        return jax.jit(jax.vmap(jax.grad(squares(f), (0, 1)), (1, None)))(
            jnp.stack([x, x + 1], 1), w
        )

    check_all(gradients(on_mesh(twin, mesh_of(x=RANKS))), gradients(twin.whole))


def test_vmap_over_an_axis_of_the_op(mesh_of):
    """The elements of the map are ranks then."""
    x, w = reals((2, 8, 4)), reals((2, 4, 5), seed=1)

    def one(x, w):
        return (
            pk.all_gather_matmul(x, w, "v"),
            pk.matmul_reduce_scatter(x, w, "v"),
            pk.matmul_all_reduce(x, w, ("v", "x")),
        )

    f = jax.vmap(one, axis_name="v", axis_size=2)
    g = mapped(f, mesh_of(x=1), P(), P(), check_vma=False)
    total = sum(np.matmul(x, w))
    want = (np.reshape(x, (16, 4)) @ w, np.reshape(total, (2, 4, 5)), np.stack([total] * 2))
    check_all(jax.jit(g)(x, w), want)


def test_vmap_over_nothing(mesh_of):
    twin = TWINS["gather"]
    f, (x, w) = on_mesh(twin, mesh_of(x=RANKS)), reals_of(twin)
    y = jax.eval_shape(jax.vmap(f, (0, None)), jnp.zeros((0, *x.shape)), w)
    assert y.shape == (0, 12, 20)


def layer(x, w_up, w_down):
    """A tensor-parallel layer of rows that are cut over "model"."""
    h = jnp.tanh(pk.all_gather_matmul(x, w_up, "model"))
    return x + pk.matmul_reduce_scatter(h, w_down, "model")


def test_scan_and_remat_on_two_axes(mesh_of):
    """Weights are the same over "data": their gradients are sums over it."""
    xs = reals((4, 4, 6)), reals((3, 6, 8), seed=1), reals((3, 8, 6), seed=2)

    def layers(layer, x, up, down):
        step = jax.checkpoint(lambda x, ws: (layer(x, *ws), None))
        return lax.scan(step, x, (up, down))[0]

    rows = P("data", "model")
    specs = (rows, P(None, None, "model"), P(None, "model"))
    f = mapped(functools.partial(layers, layer), mesh_of(data=2, model=4), specs, rows)
    whole = functools.partial(layers, lambda x, up, down: x + jnp.tanh(x @ up) @ down)
    got, want = (jax.jit(jax.value_and_grad(squares(f), (0, 1, 2)))(*xs) for f in (f, whole))
    check_all(got, want)


def test_donation(mesh_of):
    x, w = reals((8, 12)), reals((12, 12), seed=1)

    def f(x, w):
        return pk.matmul_reduce_scatter(jnp.tile(x, (4, 1)), w, "x")

    g = jax.jit(mapped(f, mesh_of(x=RANKS), (COLUMNS, ROWS), ROWS), donate_argnums=0)
    want = jnp.tile(x @ w, (4, 1))
    x = jax.device_put(x, jax.sharding.NamedSharding(mesh_of(x=RANKS), COLUMNS))
    check_all(g(x, w), want)

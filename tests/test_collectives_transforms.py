"""The collectives under grad, vmap, scan, remat, nested jit and the types of shard_map.

What it would catch: a transpose that forgets the other ranks (right for one rank, wrong by the
number of ranks beyond), a batching rule that moves the wrong dimension, a result typed as equal on
all ranks when it is not.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from transforms import RANKS, primitives_in

import pk_jax as pk


@pytest.fixture
def mapped(mesh_of):
    """Puts f under shard_map on an axis "x", the first dimension split in and out."""

    def make(f, **kwargs):
        specs = {"in_specs": P("x"), "out_specs": P("x")} | kwargs
        return jax.shard_map(f, mesh=mesh_of(x=RANKS), **specs)

    return make


def values(*shape):
    return jnp.asarray(np.sin(np.arange(np.prod(shape))).reshape(shape), jnp.float32)


def weighted(f, weights):
    """A scalar function whose gradient depends on every result and, twice, on every operand."""
    return lambda x: jnp.vdot(weights, jnp.sin(f(x)) * f(x))


# all_gather arguments, shape of a rank's part
GATHERS = {
    "tiled": ({"tiled": True}, (2, 3)),
    "stacked": ({"axis": 1}, (2, 3)),
    "columns": ({"axis": 1, "tiled": True}, (2, 3)),
    "groups": ({"tiled": True, "axis_index_groups": [[0, 2], [3, 1]]}, (2, 3)),
}


def dense(kwargs, x):
    """all_gather of the rows' parts of x by each rank, without collectives."""
    parts = jnp.split(x, RANKS)
    results = []
    for rank in range(RANKS):
        groups = kwargs.get("axis_index_groups") or [range(RANKS)]
        (group,) = [g for g in groups if rank in g]
        join = jnp.concatenate if kwargs.get("tiled") else jnp.stack
        results.append(join([parts[r] for r in group], kwargs.get("axis", 0)))
    return jnp.concatenate(results)


@pytest.mark.parametrize("name", GATHERS)
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_to_second_order(name, check_vma, mapped):
    kwargs, shape = GATHERS[name]
    f = mapped(lambda x: pk.all_gather(x, "x", **kwargs), check_vma=check_vma)
    x = values(RANKS * shape[0], shape[1])
    weights = jnp.cos(jnp.arange(float(f(x).size))).reshape(f(x).shape)

    def model(x):
        return dense(kwargs, x)

    for order in (jax.grad, lambda g: jax.grad(lambda x: jnp.sum(jnp.sin(jax.grad(g)(x))))):
        got = jax.jit(order(weighted(f, weights)))(x)
        want = jax.jit(order(weighted(model, weights)))(x)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_jvp(mapped):
    f = mapped(lambda x: pk.all_gather(x, "x", tiled=True))
    x, t = values(8, 2), values(8, 2) + 1.0
    primal, tangent = jax.jvp(f, (x,), (t,))
    np.testing.assert_array_equal(primal, np.tile(x, (4, 1)))
    np.testing.assert_array_equal(tangent, np.tile(t, (4, 1)))


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_of_an_invarying_gather(check_vma, mapped):
    # Whether or not types are checked, the result is one array and counts once.
    f = mapped(
        lambda x: pk.all_gather(x, "x", tiled=True, to="invarying"),
        out_specs=P(),
        check_vma=check_vma,
    )
    x = values(8)
    np.testing.assert_allclose(jax.grad(lambda x: jnp.sum(f(x) ** 2))(x), 2 * x, rtol=1e-6)


def test_gradient_of_a_replicated_operand(mapped):
    f = mapped(lambda x: pk.all_gather(x, "x", tiled=True), in_specs=P())
    x = values(3)
    # Gathered RANKS times on each of RANKS ranks.
    np.testing.assert_allclose(
        jax.grad(lambda x: jnp.sum(f(x) ** 2))(x), RANKS * RANKS * 2 * x, rtol=1e-6
    )


def test_psum_scatter_gradient(mapped):
    f = mapped(lambda x: pk.psum_scatter(x, "x", tiled=True))
    x = values(32)
    parts = x.reshape(RANKS, 8)
    grad = np.tile(2 * np.sum(parts, 0), RANKS)
    np.testing.assert_allclose(f(x), np.sum(parts, 0), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(lambda x: jnp.sum(f(x) ** 2))(x), grad, rtol=1e-5)


def test_transposes_stay_in_pk(mapped):
    gather = mapped(lambda x: pk.all_gather(x, "x", tiled=True))
    scatter = mapped(lambda x: pk.psum_scatter(x, "x", tiled=True))
    x = values(32)
    names = primitives_in(jax.grad(lambda x: jnp.sum(gather(x) ** 2)), x)
    assert "pk_psum_scatter" in names and "reduce_scatter" not in names
    names = primitives_in(jax.grad(lambda x: jnp.sum(scatter(x) ** 2)), x)
    assert "pk_all_gather" in names and "all_gather" not in names


def test_transposes_keep_the_reference(mapped):
    f = mapped(lambda x: pk.all_gather(x, "x", implementation="reference"))
    text = str(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(f(x) ** 2)))(values(8)))
    assert text.count("implementation=reference") == 2


@pytest.mark.parametrize("in_axis", [0, 1, 2])
@pytest.mark.parametrize("axis, tiled", [(0, True), (1, True), (0, False), (1, False), (2, False)])
def test_vmap_of_all_gather(in_axis, axis, tiled, mapped):
    def f(op):
        def body(x):
            inner = jax.vmap(lambda x: op(x, "x", axis=axis, tiled=tiled), in_axis, -1)
            return inner(x)

        return jax.jit(mapped(body))

    x = values(8, 3, 5)
    np.testing.assert_array_equal(f(pk.all_gather)(x), f(lax.all_gather)(x))


@pytest.mark.parametrize("in_axis", [0, 1, 2])
@pytest.mark.parametrize("dimension, tiled", [(0, True), (1, True), (0, False), (1, False)])
def test_vmap_of_psum_scatter(in_axis, dimension, tiled, mapped):
    # Against a loop: lax's own batching rule misplaces a batch dimension behind the scattered one.
    def scatter(x):
        return pk.psum_scatter(x, "x", scatter_dimension=dimension, tiled=tiled)

    def looped(x):
        return jnp.stack([scatter(part) for part in jnp.moveaxis(x, in_axis, 0)])

    x = values(4 * RANKS, 4, 4)
    got = jax.jit(mapped(jax.vmap(scatter, in_axis)))(x)
    np.testing.assert_array_equal(got, jax.jit(mapped(looped))(x))


def test_vmap_of_an_unmapped_operand(mapped):
    def body(x):
        return jax.vmap(lambda y: y + pk.all_gather(x, "x", tiled=True))(jnp.zeros((2, 8)))

    x = values(8)
    np.testing.assert_array_equal(mapped(body)(x), np.tile(x, (8, 1)))


@pytest.mark.parametrize("op", ["all_gather", "psum_scatter", "psum", "all_to_all"])
@pytest.mark.parametrize("in_axes", [0, None])
def test_collectives_over_a_vmapped_axis(op, in_axes):
    extra = (0, 0) if op == "all_to_all" else ()
    x = values(3, 3) if in_axes == 0 else values(3)

    def run(module):
        def f(x):
            return getattr(module, op)(x, "i", *extra)

        return jax.vmap(f, in_axes=in_axes, axis_name="i", axis_size=3)(x)

    np.testing.assert_array_equal(run(pk), run(lax))


def test_vmapped_and_mesh_axes_together(mapped):
    def body(x):
        return jax.vmap(lambda x: pk.all_gather(pk.psum(x, "i"), "x"), axis_name="i")(x)

    x = values(8)
    want = np.tile(np.asarray(x).reshape(RANKS, 2).sum(1), (8, 1))
    # lax has no types for vmapped axes inside a typed shard_map.
    np.testing.assert_allclose(mapped(body, check_vma=False)(x), want, rtol=1e-6)


def test_scan(mapped):
    def body(x):
        def step(carry, _):
            total = pk.all_gather(carry, "x", tiled=True).reshape(RANKS, -1).sum(0)
            return 0.5 * total, total

        return lax.scan(step, x, None, length=3)[1].reshape(-1)

    x = values(8)
    total = np.asarray(x).reshape(RANKS, 2).sum(0)
    want = np.concatenate([total * 2.0**step for step in range(3)])
    np.testing.assert_allclose(jax.jit(mapped(body))(x), np.tile(want, RANKS), rtol=1e-5)
    grad = jax.jit(jax.grad(lambda x: mapped(body)(x).sum()))(x)
    np.testing.assert_allclose(grad, np.full(8, RANKS * 7.0), rtol=1e-5)


def test_remat(mapped):
    def body(x):
        return jnp.sin(pk.all_gather(jnp.sin(x), "x", tiled=True))

    def loss(policy):
        wrapped = jax.checkpoint(body, policy=policy)
        return lambda x: jnp.sum(mapped(wrapped)(x))

    x = values(8)
    want = jax.grad(lambda x: jnp.sum(mapped(body)(x)))(x)
    for policy, gathers in (("nothing_saveable", 2), ("everything_saveable", 1)):
        grad = jax.grad(loss(getattr(jax.checkpoint_policies, policy)))
        np.testing.assert_allclose(jax.jit(grad)(x), want, rtol=1e-5)
        assert primitives_in(grad, x).count("pk_all_gather") == gathers


def test_cond_and_while(mapped):
    def body(x):
        y = lax.cond(x.size > 1, lambda x: pk.all_gather(x, "x"), lambda x: x[None].repeat(4, 0), x)
        return lax.fori_loop(0, 2, lambda _, y: pk.all_gather(y, "x").sum(0), y)

    x = values(8)
    want = np.tile(16.0 * np.asarray(x).reshape(RANKS, 2), (RANKS, 1))
    np.testing.assert_allclose(jax.jit(mapped(body))(x), want, rtol=1e-5)


def type_of(mapped, f, **kwargs):
    """Axes over which the result of f varies, as shard_map sees it."""
    seen = []

    def body(x):
        y = f(x)
        seen.append(jax.typeof(y).mat.varying)
        return x

    jax.eval_shape(mapped(body, **kwargs), values(8))
    return seen[0]


@pytest.mark.parametrize("to", ["varying", "invarying"])
def test_types_are_those_of_lax(to, mapped):
    got = type_of(mapped, lambda x: pk.all_gather(x, "x", to=to))
    assert got == type_of(mapped, lambda x: lax.all_gather(x, "x", to=to))
    assert got == (frozenset({"x"}) if to == "varying" else frozenset())


def test_a_varying_gather_is_no_replicated_result(mapped):
    with pytest.raises(ValueError, match=r"out_specs|replicat"):
        mapped(lambda x: pk.all_gather(x, "x"), out_specs=P())(values(8))


def test_reduced_gather():
    mesh = jax.make_mesh((4,), ("x",))  # explicit axes: "reduced" is for these
    x = jax.device_put(values(8), NamedSharding(mesh, P("x")))
    rows = jax.device_put(values(4, 8), NamedSharding(mesh, P("x")))

    def loss(op):
        def body(x, rows):
            return rows @ op(x, "x", tiled=True, to="reduced")

        specs = {"in_specs": (P("x"), P("x")), "out_specs": P("x")}
        return lambda x: jnp.sum(jax.shard_map(body, mesh=mesh, **specs)(x, rows))

    got = jax.jit(jax.value_and_grad(loss(pk.all_gather)))(x)
    want = jax.jit(jax.value_and_grad(loss(lax.all_gather)))(x)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    np.testing.assert_allclose(got[1], rows.sum(0), rtol=1e-5)


def test_partially_manual_mesh(mesh_of):
    mesh = mesh_of(dp=2, tp=4)
    f = jax.shard_map(
        lambda x: pk.all_gather(x, "tp", axis=1, tiled=True),
        mesh=mesh,
        in_specs=P(None, "tp"),
        out_specs=P(None, "tp"),
        axis_names={"tp"},
    )
    x = jax.device_put(values(4, 8), NamedSharding(mesh, P("dp", "tp")))
    np.testing.assert_array_equal(jax.jit(f)(x), np.tile(x, (1, 4)))


def test_nested_shard_map(mesh_of):
    mesh = mesh_of(a=2, b=2)

    def inner(x):
        return pk.all_gather(pk.all_gather(x, "a", tiled=True), "b", tiled=True)

    def outer(x):
        return jax.shard_map(inner, in_specs=P("b"), out_specs=P("b"), axis_names={"b"})(x)

    f = jax.shard_map(outer, mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
    x = values(8)
    b0, b1 = np.asarray(x).reshape(2, 2, 2).transpose(1, 0, 2).reshape(2, 4)
    np.testing.assert_array_equal(jax.jit(f)(x), np.tile(np.concatenate([b0, b1]), 4))


def test_donation(mapped):
    f = jax.jit(mapped(lambda x: pk.all_gather(x, "x").sum(0)), donate_argnums=0)
    x = values(8)
    want = np.tile(np.asarray(x).reshape(RANKS, 2).sum(0), RANKS)
    np.testing.assert_allclose(f(jnp.array(x)), want, rtol=1e-6)


def test_jit_caches(mapped):
    traces = []

    @jax.jit
    @mapped
    def f(x):
        traces.append(1)
        return pk.all_gather(x, "x", config=pk.Config(mechanism="register"))

    for _ in range(3):
        f(values(8))
    assert len(traces) == 1 and f._cache_size() == 1
    f(values(16))
    assert len(traces) == 2


@pytest.mark.parametrize("op", ["all_gather", "all_to_all", "ppermute"])
def test_gradient_of_four_bit_floats(mesh_of, op):
    """Moving small floats is as linear as moving others: the gradient is not lost on the way."""
    calls = {
        "all_gather": lambda m, x: m.all_gather(x, "x", tiled=True),
        "all_to_all": lambda m, x: m.all_to_all(x, "x", 0, 0, tiled=True),
        "ppermute": lambda m, x: m.ppermute(x, "x", [(0, 1), (1, 0)]),
    }

    def loss(module):
        def body(x):
            y = calls[op](module, x.astype(jnp.float4_e2m1fn))
            return y.astype(jnp.float32).sum()[None]

        mapped = jax.shard_map(body, mesh=mesh_of(x=2), in_specs=P("x"), out_specs=P("x"))
        return lambda x: mapped(x).sum()

    x = jnp.arange(8.0)
    got, want = jax.grad(loss(pk))(x), jax.grad(loss(jax.lax))(x)
    np.testing.assert_array_equal(got, want)
    assert (got != 0).all()


@pytest.mark.parametrize("perm", [[(0, 2), (2, 1)], [(1, 0), (0, 1), (2, 2)], []], ids=str)
@pytest.mark.parametrize("in_axis, dtype", [(0, "float32"), (1, "bool"), (None, "int4")])
def test_ppermute_over_a_mapped_axis(perm, in_axis, dtype):
    shape = (3, 3) if in_axis is not None else (3,)
    x = jnp.asarray(np.arange(1, 1 + np.prod(shape)).reshape(shape) % 5).astype(dtype)
    op = functools.partial(pk.ppermute, axis_name="v", perm=perm)
    got = jax.vmap(op, in_axis, axis_name="v", axis_size=3)(x)
    sent = np.stack([x] * 3) if in_axis is None else np.moveaxis(np.asarray(x), in_axis, 0)
    want = np.zeros_like(sent)
    for source, to in perm:
        want[to] = sent[source]
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, want)

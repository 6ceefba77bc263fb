"""All collectives against jax.lax under vmap, remat and jit, and by type and kind of operand.

What it would catch: a batching rule that moves the wrong dimension, a constant that became a
tracer, a primitive that policies or caches of JAX treat unlike lax's.
"""

import functools
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from transforms import LINEAR, RANKS, primitives_in, ring, values

import pk_jax as pk

typed = pytest.mark.parametrize("check_vma", [True, False])

# What a module (pk or lax) does to a rank's [4, 8].
ALL = LINEAR | {
    "pmax": lambda m, x: m.pmax(x, "x"),
    "pmin": lambda m, x: m.pmin(x, "x"),
    "all_to_all other": lambda m, x: m.all_to_all(x, "x", 0, 1, tiled=True),
    "all_to_all move": lambda m, x: m.all_to_all(x, "x", 0, 1),
    "pytree": lambda m, x: sum(m.psum({"a": x, "b": (x[0], 2 * x)}, "x")["b"]),
}


@pytest.fixture
def mapped(mesh_of):
    """Puts f under jit and shard_map on an axis "x", the first dimension split in and out."""

    def make(f, **kwargs):
        specs = {"in_specs": P("x"), "out_specs": P("x")} | kwargs
        return jax.jit(jax.shard_map(f, mesh=mesh_of(x=RANKS), **specs))

    return make


# vmap


@pytest.mark.parametrize("in_axis", [0, 1, 2])
@pytest.mark.parametrize("name", ALL)
def test_vmap(name, in_axis, mapped):
    # Against a loop: lax's batching rule of psum_scatter misplaces a batch dimension.
    def over(run):
        def f(x):
            x = jnp.moveaxis(x.reshape(3, 4, 8), 0, in_axis)
            return run(functools.partial(ALL[name], pk), x)[None]

        return jax.jit(mapped(f, out_specs=P("x")))(values(RANKS * 3, 4, 8))

    def loop(f, x):
        return jnp.stack([f(part) for part in jnp.moveaxis(x, in_axis, 0)])

    got = over(lambda f, x: jax.vmap(f, in_axis)(x) + 0 * x.sum())
    want = over(lambda f, x: loop(f, x) + 0 * x.sum())
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_vmap_of_an_unmapped_operand(name, mapped):
    def f(x):
        op = functools.partial(ALL[name], pk)
        return jax.vmap(lambda y: y + op(x).sum())(x[0])

    def unbatched(x):
        return x[0] + ALL[name](pk, x).sum()

    x = values(RANKS * 4, 8)
    np.testing.assert_allclose(mapped(f)(x), mapped(unbatched)(x), rtol=1e-6)


MAPPED_AXIS = {
    "psum": (lambda m, x, axis: m.psum(x, axis), (3, 5)),
    "pmax": (lambda m, x, axis: m.pmax(x, axis), (3, 5)),
    "pmin": (lambda m, x, axis: m.pmin(x, axis), (3, 5)),
    "pmean": (lambda m, x, axis: m.pmean(x, axis), (3, 5)),
    "psum_scatter": (lambda m, x, axis: m.psum_scatter(x, axis), (3, 3, 5)),
    "all_to_all": (lambda m, x, axis: m.all_to_all(x, axis, 0, 1), (3, 3, 5)),
    "all_to_all tiled": (lambda m, x, axis: m.all_to_all(x, axis, 1, 0, tiled=True), (3, 2, 6)),
    "ppermute": (lambda m, x, axis: m.ppermute(x, axis, [(0, 1), (1, 2), (2, 0)]), (3, 5)),
    "all_gather": (lambda m, x, axis: m.all_gather(x, axis), (3, 5)),
}


@pytest.mark.parametrize("in_axes", [0, None])
@pytest.mark.parametrize("name", MAPPED_AXIS)
def test_over_a_mapped_axis(name, in_axes):
    op, shape = MAPPED_AXIS[name]
    x = values(*shape) if in_axes == 0 else values(*shape)[0]
    got, want = (
        jax.vmap(lambda x, m=m: op(m, x, "i"), in_axes=in_axes, axis_name="i", axis_size=3)(x)
        for m in (pk, lax)
    )
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("axes", [("i", "x"), ("x", "i")])
@pytest.mark.parametrize("op", ["psum", "pmax", "pmin", "pmean", "all_to_all"])
@pytest.mark.parametrize("in_axes", [0, None])
def test_over_mapped_and_mesh_axes(op, axes, in_axes, mapped):
    # lax has no types for mapped axes inside a typed shard_map.
    def run(module):
        def call(x):
            more = {"split_axis": 0, "concat_axis": 1, "tiled": True} if op == "all_to_all" else {}
            return getattr(module, op)(x, axes, **more)

        def f(x):
            x = x if in_axes == 0 else x[0]
            return jax.vmap(call, in_axes=in_axes, axis_name="i", axis_size=2)(x)

        return mapped(f, check_vma=False)(values(RANKS * 2, 8, 3))

    np.testing.assert_allclose(run(pk), run(lax), rtol=1e-6)


def test_sums_over_mapped_and_mesh_axes_are_of_pk(mapped):
    def f(x):
        return jax.vmap(lambda x: pk.psum(x, ("i", "x")), axis_name="i")(x)

    names = primitives_in(mapped(f, check_vma=False), values(8, 2))
    assert names.count("pk_psum") == 1


def test_ppermute_over_mapped_and_mesh_axes(mapped):
    def f(x):
        return jax.vmap(lambda x: pk.ppermute(x, ("i", "x"), [(0, 1)]), axis_name="i")(x)

    with pytest.raises(NotImplementedError, match=r"mapped axis 'i' of jax.vmap together with"):
        mapped(f, check_vma=False)(values(8, 2))


@pytest.mark.parametrize("name", ALL)
def test_spmd_axis_name(name, mesh_of):
    mesh = mesh_of(dp=2, x=RANKS)

    def run(module):
        inner = jax.shard_map(
            lambda x: ALL[name](module, x) + 0 * x.sum(),
            mesh=mesh,
            in_specs=P("x"),
            out_specs=P("x"),
            axis_names={"x", "dp"},
        )
        return jax.jit(jax.vmap(inner, spmd_axis_name="dp"))(values(2, RANKS * 4, 8))

    np.testing.assert_allclose(run(pk), run(lax), rtol=1e-6)


# Types, constants, odd operands.


@pytest.mark.parametrize("name", ALL)
def test_types_are_those_of_lax(name, mesh_of):
    def type_of(module):
        seen = []

        def f(x):
            seen.append(jax.typeof(ALL[name](module, x)))
            return x

        mapped = jax.shard_map(
            f, mesh=mesh_of(a=2, x=RANKS), in_specs=P(("x", "a")), out_specs=P(("x", "a"))
        )
        jax.eval_shape(mapped, values(RANKS * 2 * 4, 8))
        return seen[0]

    assert type_of(pk) == type_of(lax)
    assert type_of(pk).mat == type_of(lax).mat


@typed
@pytest.mark.parametrize("op", ["psum", "pmax", "pmin", "pmean"])
def test_scalars_and_pytrees(op, check_vma, mapped):
    seen = {}

    def f(module, x):
        constants = {"int": 2, "float": 1.5, "array": np.arange(3.0), "none": None}
        seen[module] = getattr(module, op)(constants, "x")
        tree = getattr(module, op)({"x": x, "zero-d": x[0], "nothing": x[:0], "both": (x, 2)}, "x")
        return jax.tree.map(lambda y: jnp.atleast_1d(y) + 0 * x[0].astype(jnp.result_type(y)), tree)

    got, want = (mapped(functools.partial(f, m), check_vma=check_vma)(values(8)) for m in (pk, lax))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)
    ours, theirs = seen[pk], seen[lax]
    for name in ("int", "float", "array"):
        assert isinstance(ours[name], jax.core.Tracer) == isinstance(theirs[name], jax.core.Tracer)
        assert jax.typeof(ours[name]) == jax.typeof(theirs[name])
        if op == "psum":
            assert not isinstance(ours[name], jax.core.Tracer)
            np.testing.assert_array_equal(ours[name], theirs[name])


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint16", "bfloat16", "complex64"])
@pytest.mark.parametrize("op", ["psum", "pmax", "pmin", "all_to_all", "ppermute", "psum_scatter"])
def test_dtypes(op, dtype, mapped):
    if op == "psum_scatter" and dtype == "bool":
        pytest.skip("lax has no psum_scatter of booleans")
    if op in ("pmax", "pmin") and dtype == "complex64":
        pytest.skip(
            "XLA cannot compare complex numbers across devices; see test_collectives_reference.py"
        )
    more = {"all_to_all": (0, 0), "ppermute": (ring,)}.get(op, ())
    how = {"tiled": True} if op in ("all_to_all", "psum_scatter") else {}
    x = jnp.arange(RANKS * 8).astype(dtype)
    got, want = (mapped(lambda x, m=m: _varying(getattr(m, op)(x, "x", *more, **how), x))(x)
                 for m in (pk, lax))  # fmt: skip
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


def _varying(y, x):
    """y, typed to vary as x does."""
    return jnp.where((x == x).all(), y, y)


@pytest.mark.parametrize("op", ["psum", "pmax", "pmin"])
def test_positions_with_names(op, mesh_of):
    mesh = mesh_of(a=2, b=2)
    for axes in ((0, "a"), ("b", 1, "a"), (0, 1), [1, "a"]):
        got, want = (
            jax.shard_map(
                lambda x, m=m, axes=axes: getattr(m, op)(x, axes).reshape(1, -1),
                mesh=mesh,
                in_specs=P(("a", "b")),
                out_specs=P(("a", "b")),
                check_vma=False,
            )(values(8, 3))
            for m in (pk, lax)
        )
        np.testing.assert_allclose(got, want, rtol=1e-6)
    for module in (pk, lax):
        with pytest.raises(ValueError, match="state"):
            jax.eval_shape(
                jax.shard_map(
                    lambda x, m=module: getattr(m, op)(x, (0, "a")),
                    mesh=mesh,
                    in_specs=P("a"),
                    out_specs=P(),
                ),
                values(8),
            )


# remat, jit, the compilation cache


def primitives_of_gradient(policy, mapped):
    def f(x):
        y = jnp.sin(pk.psum(jnp.sin(x @ x.T), "x"))
        y = pk.ppermute(jnp.sin(pk.all_to_all(y, "x", 0, 1, tiled=True)), "x", ring)
        return jnp.sin(pk.psum_scatter(y, "x", scatter_dimension=1, tiled=True))

    def loss(x):
        return jnp.sum(mapped(jax.checkpoint(f, policy=policy))(x))

    names = primitives_in(jax.grad(loss), values(RANKS * 4, 8))
    return [names.count(f"pk_{op}") for op in ("psum", "all_to_all", "ppermute", "psum_scatter")]


@pytest.mark.parametrize(
    "policy, counts",
    [
        # Forward, recomputed, and transposed (that of a typed sum is a cast, that of psum_scatter
        # a gather).
        ("nothing_saveable", [2, 3, 3, 2]),
        ("dots_saveable", [2, 3, 3, 2]),
        ("dots_with_no_batch_dims_saveable", [2, 3, 3, 2]),
        ("everything_saveable", [1, 2, 2, 1]),
    ],
)
def test_remat_policies(policy, counts, mapped):
    assert primitives_of_gradient(getattr(jax.checkpoint_policies, policy), mapped) == counts


def test_remat_policies_see_names_and_params(mapped):
    seen = {}

    def policy(prim, *_, **params):
        if prim.name.startswith("pk_"):
            seen[prim.name] = set(params)
        return prim.name == "pk_all_to_all"

    assert primitives_of_gradient(policy, mapped) == [2, 2, 3, 2]
    ours = {"implementation", "config"}
    assert seen == {
        "pk_psum": {"axes", "axis_index_groups", "typed", "asked", *ours},
        "pk_all_to_all": {
            "axis_name", "axis_index_groups", "axis_size", "split_axis", "concat_axis", *ours,
        },
        "pk_ppermute": {"axis_name", "perm", *ours},
        "pk_psum_scatter": {
            "axis_name", "axis_index_groups", "axis_size", "scatter_dimension", "tiled", *ours,
        },
    }  # fmt: skip


def test_remat_by_name(mapped):
    from jax.ad_checkpoint import checkpoint_name

    def f(x):
        y = checkpoint_name(pk.psum(jnp.sin(x), "x"), "total")
        return jnp.sin(jnp.sin(y) * x)

    def count(policy):
        loss = lambda x: jnp.sum(mapped(jax.checkpoint(f, policy=policy))(x))  # noqa: E731
        return primitives_in(jax.grad(loss), values(8)).count("pk_psum")

    policies = jax.checkpoint_policies
    assert count(policies.save_only_these_names("total")) == 1
    # The name is not saved, but its operand, the sum itself, is: as with lax's.
    assert count(policies.save_anything_except_these_names("total")) == 1
    assert count(policies.save_only_these_names("other")) == 2


@pytest.mark.parametrize("name", ALL)
def test_jit_caches(name, mapped):
    traces = []

    @jax.jit
    @mapped
    def f(x):
        traces.append(1)
        return ALL[name](pk, x) + 0 * x.sum()

    for _ in range(3):
        f(values(RANKS * 4, 8))
    assert len(traces) == 1 and f._cache_size() == 1


def test_persistent_compilation_cache(tmp_path):
    """A second process finds what the first one compiled."""
    program = textwrap.dedent(f"""
        import jax, numpy as np, pk_jax as pk
        from jax.sharding import Mesh, PartitionSpec as P
        jax.config.update("jax_compilation_cache_dir", {str(tmp_path)!r})
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        hits = []
        jax.monitoring.register_event_listener(
            lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None)
        def f(x):
            x = pk.psum_scatter(pk.all_to_all(x, "x", 0, 0, tiled=True), "x", tiled=True)
            return pk.psum(pk.ppermute(x, "x", [(0, 1)]), "x")
        mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
        mapped = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P()))
        mapped.lower(np.zeros(16, np.float32)).compile()
        print(len(hits))
    """)
    counts = [
        int(
            subprocess.run(
                [sys.executable, "-c", program], capture_output=True, text=True, check=True
            ).stdout
        )
        for _ in range(2)
    ]
    assert counts[0] == 0 and counts[1] > 0

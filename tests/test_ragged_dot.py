"""pk.ragged_dot on CPU devices: values, types, meshes and refusals."""

import doctest
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from product_models import SIZES, by_slices, check_equal, grouped, operands, sizes_of, values

import pk_jax as pk
from pk_jax._reference import ragged_dot as reference
from pk_jax._tuning import matmul_model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "complex64"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_values(sizes, dtype):
    lhs, rhs = operands(dtype=dtype)
    got = pk.ragged_dot(lhs, rhs, sizes_of(*sizes))
    check_equal(got, lax.ragged_dot(lhs, rhs, sizes_of(*sizes)))
    np.testing.assert_array_equal(np.asarray(got, np.complex128), grouped(lhs, rhs, sizes))


@pytest.mark.parametrize("m, k, n, g", [(1, 1, 1, 1), (37, 65, 3, 7), (5, 8, 129, 30)])
def test_sizes(m, k, n, g):
    sizes = np.random.default_rng(m).multinomial(m, np.ones(g) / g)
    lhs, rhs = operands(m, k, n, g)
    got = pk.ragged_dot(lhs, rhs, jnp.asarray(sizes))
    np.testing.assert_array_equal(np.asarray(got, np.complex128), grouped(lhs, rhs, sizes))


@pytest.mark.parametrize("m, k, n, g", [(0, 3, 4, 2), (6, 0, 4, 2), (6, 3, 0, 2), (6, 3, 4, 0)])
def test_no_elements(m, k, n, g):
    got = pk.ragged_dot(jnp.ones((m, k)), jnp.ones((g, k, n)), jnp.ones(g, jnp.int32))
    np.testing.assert_array_equal(got, np.zeros((m, n)))


@pytest.mark.parametrize("preferred", ["float32", "float16", "bfloat16", "int32"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_preferred_element_type(dtype, preferred):
    """What lax refuses is refused; the rest has lax's dtype and value."""
    lhs, rhs = operands(dtype=dtype)
    sizes = sizes_of(*SIZES["random"])
    try:
        want = lax.ragged_dot(lhs, rhs, sizes, preferred_element_type=jnp.dtype(preferred))
    except TypeError:
        with pytest.raises(TypeError, match=r"ragged_dot: preferred_element_type=.* does not go"):
            pk.ragged_dot(lhs, rhs, sizes, preferred_element_type=preferred)
        return
    check_equal(pk.ragged_dot(lhs, rhs, sizes, preferred_element_type=preferred), want)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint32"])
def test_dtypes_of_sizes(dtype):
    """Their sums have room: 300 rows, which uint8 does not count."""
    lhs, rhs = operands(m=300)
    sizes = (100, 60, 0, 40, 100)
    got = pk.ragged_dot(lhs, rhs, sizes_of(*sizes, dtype=dtype))
    np.testing.assert_array_equal(np.asarray(got, np.complex128), grouped(lhs, rhs, sizes))


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64"])
def test_sizes_past_the_rows_and_below_zero(dtype):
    """They are cut at the last row before they can wrap, and below zero they are zero."""
    lhs, rhs = operands(m=6)
    most = int(np.iinfo(np.int32).max)
    several = [((5, most, most, 0, 0), (5, 1, 0, 0, 0))]
    if dtype != "int32":
        several.append(((2**32 - 1, 0, 0, 0, 0), (6, 0, 0, 0, 0)))
    if not dtype.startswith("u"):
        several.append(((2, -1, 3, 0, -most), (2, 0, 3, 0, 0)))
    with jax.enable_x64(dtype.endswith("64")):
        for sizes, want in several:
            got = pk.ragged_dot(lhs, rhs, np.array(sizes, dtype))
            np.testing.assert_array_equal(np.asarray(got, np.complex128), grouped(lhs, rhs, want))


def test_sizes_whose_sum_has_no_room_in_int32():
    """As many as that have no arrays here: the sizes alone."""
    sizes = sizes_of(2**30, 2**30, -5, 2**30, 7)
    cut = reference.cut(sizes, 2**30 + 9)
    np.testing.assert_array_equal(cut, (2**30, 9, 0, 0, 0))
    stacked = jnp.stack([sizes, sizes[::-1]])
    np.testing.assert_array_equal(reference.cut(stacked, 2**30 + 9)[1], (7, 2**30, 0, 2, 0))


def test_operands_of_numpy_and_of_two_dtypes():
    lhs, rhs = (np.asarray(x) for x in operands())
    check_equal(
        pk.ragged_dot(lhs, rhs, np.array(SIZES["skewed"])),
        lax.ragged_dot(lhs, rhs, sizes_of(*SIZES["skewed"])),
    )
    with jax.numpy_dtype_promotion("standard"):
        got = pk.ragged_dot(jnp.asarray(lhs, jnp.bfloat16), rhs, np.array(SIZES["skewed"]))
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, grouped(lhs, rhs, SIZES["skewed"]).real)


@pytest.mark.parametrize("where", ["the argument", "the default"])
def test_precision(where, lowered):
    def f(lhs, rhs, sizes):
        if where == "the argument":
            return pk.ragged_dot(lhs, rhs, sizes, "highest")
        with jax.default_matmul_precision("highest"):
            return pk.ragged_dot(lhs, rhs, sizes)

    args = (*operands(), sizes_of(*SIZES["random"]))
    gradient = jax.grad(lambda *xs: jnp.sum(f(*xs)), (0, 1))
    for function, count in ((f, 1), (gradient, 2)):
        text = lowered(function, *args, platform="cpu")
        assert text.count("precision = [HIGHEST, HIGHEST]") >= count
        assert "precision = [DEFAULT, DEFAULT]" not in text


# Derivatives.


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma, mesh_of):
    """Each rank has rows and sizes of its own; the gradient of shared matrices is the sum."""
    lhs, rhs = operands(m=8 * 6, g=3)
    sizes = np.random.default_rng(0).multinomial(5, np.ones(3) / 3, 8)

    def loss(lhs, rhs):
        f = jax.shard_map(
            pk.ragged_dot,
            mesh=mesh_of(x=8),
            in_specs=(P("x"), P(), P("x")),
            out_specs=P("x"),
            check_vma=check_vma,
        )
        return jnp.sum(f(lhs, rhs, jnp.asarray(sizes.ravel())) ** 2)

    def alone(lhs, rhs):
        parts = zip(lhs.reshape(8, 6, -1), sizes, strict=True)
        return sum(jnp.sum(by_slices(part, rhs, own) ** 2) for part, own in parts)

    got, want = (jax.jit(jax.grad(f, (0, 1)))(lhs, rhs) for f in (loss, alone))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_result_varies_where_an_operand_does(mesh_of):
    types = []

    def f(lhs, rhs, sizes):
        varying = lhs, rhs + lhs[0, 0], sizes + lhs[0, 0].astype(jnp.int32)
        for product in (pk.ragged_dot, lax.ragged_dot):
            for i in range(4):
                xs = [jnp.ones((2, 3)), rhs, sizes]
                if i < 3:
                    xs[i] = varying[i]
                types.append(jax.typeof(product(*xs)))
        return lhs

    specs = {"in_specs": (P("x"), P(), P()), "out_specs": P("x")}
    mapped = jax.shard_map(f, mesh=mesh_of(x=4), **specs)
    jax.make_jaxpr(mapped)(jnp.ones((8, 3)), jnp.ones((2, 3, 5)), sizes_of(1, 1))
    assert types[:4] == types[4:]
    assert [bool(t.mat.varying) for t in types[:4]] == [True, True, True, False]


@pytest.mark.parametrize("outside", ["an array", "a tracer"])
def test_matrices_from_outside_the_shard_map(outside, mesh_of, can_run, lowered):
    mesh = mesh_of(x=4)
    rhs = jax.device_put(values((2, 8, 5), "bfloat16"), NamedSharding(mesh, P()))
    lhs, sizes = values((8, 8), "bfloat16", seed=1), sizes_of(1, 1)

    def f(implementation, lhs, rhs):
        def body(lhs):
            return pk.ragged_dot(lhs, rhs, sizes, implementation=implementation)

        return jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(lhs)

    if outside == "an array":
        text = lowered(lambda lhs: f("cuda", lhs, rhs), lhs)
    else:
        text = lowered(functools.partial(f, "cuda"), lhs, rhs)
    assert text.count("@pk_jax_ragged_dot(") == 1
    got = jax.jit(functools.partial(f, None))(lhs, rhs)
    want = [grouped(part, rhs, (1, 1)) for part in np.asarray(lhs).reshape(4, 2, 8)]
    np.testing.assert_array_equal(np.asarray(got, np.complex128), np.concatenate(want))


# Refusals.


@pytest.mark.parametrize(
    "lhs, rhs, sizes, error, words",
    [
        ((3, 4), (2, 5, 6), (2,), ValueError, r"of lhs, 4 of \(3, 4\), must equal .* 5 of \(2,"),
        ((3, 4), (2, 4, 6), (3,), ValueError, r"rhs has 2 matrices, .*\(2, 4, 6\), .* 3 numbers"),
        ((2, 3, 4), (2, 4, 6), (2,), ValueError, r"lhs must be \[m, k\], rhs \[g, k, n\]"),
        ((3, 4), (4, 6), (2,), ValueError, r"got shapes \(3, 4\), \(4, 6\) and \(2,\)"),
        ((3, 4), (2, 4, 6), (2, 1), ValueError, "use jax.lax.ragged_dot_general"),
        ("keys", (2, 4, 6), (2,), TypeError, "lhs must hold numbers, got dtype key<fry>"),
        ("list", (2, 4, 6), (2,), TypeError, r"lhs must be an array, got \[\[1.0\]\] of type list"),
        ((3, 4), (2, 4, 6), "list", TypeError, r"group_sizes must be an array, got \[\[1.0\]\]"),
        ((3, 4), (2, 4, 6), "floats", TypeError, "must hold integers, got dtype float32; convert"),
        ((3, 4), (2, 4, 6), "bools", TypeError, "must hold integers, got dtype bool; convert"),
    ],
)
def test_what_does_not_fit(lhs, rhs, sizes, error, words):
    named = {
        "keys": jax.random.split(jax.random.key(0), (3, 4)),
        "list": [[1.0]],
        "floats": jnp.ones(2),
        "bools": jnp.ones(2, bool),
    }
    lhs = named[lhs] if isinstance(lhs, str) else jnp.ones(lhs)
    sizes = named[sizes] if isinstance(sizes, str) else jnp.ones(sizes, jnp.int32)
    with pytest.raises(error, match=f"ragged_dot: .*{words}"):
        pk.ragged_dot(lhs, jnp.ones(rhs), sizes)


def test_knobs_and_options():
    lhs, rhs = operands()
    f = functools.partial(pk.ragged_dot, lhs, rhs, sizes_of(*SIZES["random"]))
    for tile in matmul_model.SHAPES:
        assert f(config=pk.Config(tile=tile)).shape == (24, 11)
    with pytest.raises(ValueError, match=r"cannot honour config.tile=\(1, 2\): its knobs are tile"):
        f(config=pk.Config(tile=(1, 2)))
    with pytest.raises(ValueError, match=r"cannot honour config\.mechanism='tma'"):
        f(config=pk.Config(mechanism="tma"))
    with pytest.raises(ValueError, match="ragged_dot: implementation must be"):
        f(implementation="fast")
    with pytest.raises(TypeError, match=r"preferred_element_type='x' must be a dtype or None"):
        f(preferred_element_type="x")
    for implementation in (None, "reference", "cuda"):
        with pytest.raises(NotImplementedError, match=r"group_offset=1 must be None.*slice"):
            f(group_offset=1, implementation=implementation)


def test_no_kernel_here():
    x, w, sizes = jnp.ones((2, 2), jnp.bfloat16), jnp.ones((1, 2, 2), jnp.bfloat16), sizes_of(2)
    f = functools.partial(pk.ragged_dot, implementation="cuda")
    with pytest.raises(NotImplementedError, match="ragged_dot is lowered for platform 'cpu'"):
        f(x, w, sizes)
    with pytest.raises(
        NotImplementedError, match="ragged_dot: there are no kernels for a map over"
    ):
        jax.vmap(f)(x[None], w[None], sizes[None])


def test_types_that_name_axes(mesh_of):
    mesh = jax.sharding.Mesh(mesh_of(x=4).devices, ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        lhs = jax.device_put(jnp.ones((8, 3)), NamedSharding(mesh, P("x")))
        with pytest.raises(NotImplementedError, match=r"name the mesh axes \['x'\].*shard_map"):
            pk.ragged_dot(lhs, jnp.ones((2, 3, 4)), sizes_of(3, 4))


def test_arrays_that_xla_cuts(mesh_of, can_run, lowered):
    sharding = NamedSharding(mesh_of(x=4), P("x"))
    lhs, rhs = operands()
    cut = jax.device_put(lhs, sharding)
    sizes = sizes_of(*SIZES["random"])
    check_equal(jax.jit(pk.ragged_dot)(cut, rhs, sizes), lax.ragged_dot(lhs, rhs, sizes))
    x = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16, sharding=sharding)
    w = jax.ShapeDtypeStruct((2, 8, 8), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="partitions this program over several devices"):
        lowered(functools.partial(pk.ragged_dot, implementation="cuda"), x, w, sizes_of(1, 2))


def test_example_of_the_docstring():
    found = doctest.DocTestFinder().find(
        pk.ragged_dot, "ragged_dot", globs={"pk": pk, "jnp": jnp, "jax": jax}
    )
    assert doctest.DocTestRunner().run(found[0]) == doctest.TestResults(0, 4)

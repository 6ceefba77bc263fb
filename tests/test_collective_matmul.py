"""Products with a collective on CPU devices: values, rounding, layouts, types.

What it would catch: rows that a rank multiplies or keeps in another place than jax.lax does, a sum
that is rounded twice or in another order than that of the ranks, a composition of parts that
differs from the reference.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from product_models import check_equal, values
from product_twins import COLUMNS, RANKS, ROWS, TWINS, mapped, on_mesh, rounded_sum

import pk_jax as pk
from pk_jax._primitives import collective_matmul


@pytest.fixture(params=["reference", "unfused"])
def candidate(request, monkeypatch):
    """Either way to run an op; on CPU devices the parts of the second take jax.lax."""
    monkeypatch.setattr(collective_matmul, "_candidate", lambda *_: request.param)
    return request.param


def exact(x, w):
    return np.asarray(x).astype(complex) @ np.asarray(w).astype(complex)


def check_exact(got, want):
    np.testing.assert_array_equal(np.asarray(got).astype(complex), want)


def each_rank(mesh, f, in_specs, *xs, check_vma=True):
    """The results of all ranks, stacked."""
    g = mapped(
        lambda *xs: jax.tree.map(lambda y: y[None], f(*xs)),
        mesh,
        in_specs,
        P(mesh.axis_names),
        check_vma,
    )
    return jax.jit(g)(*xs)


def check_all(got, want, **tolerance):
    for ours, theirs in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        check_equal(ours, theirs, **tolerance)


@pytest.mark.parametrize(
    "how, dtype", [("reference", "float32"), ("reference", "complex64"), ("unfused", "float32")]
)
def test_values(how, dtype, mesh_of, monkeypatch):
    """Small integers, whose products and sums are exact."""
    monkeypatch.setattr(collective_matmul, "_candidate", lambda *_: how)
    twins = [TWINS[name] for name in (TWINS if dtype == "float32" else ["scatter"])]
    pairs = [tuple(values(s, dtype, seed=i) for i, s in enumerate(t.shapes)) for t in twins]

    @jax.jit
    def run(pairs):
        return [on_mesh(t, mesh_of(x=RANKS))(*pair) for t, pair in zip(twins, pairs, strict=True)]

    for twin, pair, y in zip(twins, pairs, run(pairs), strict=True):
        assert y.dtype == dtype
        check_exact(y, twin.whole(*(np.asarray(each).astype(complex) for each in pair)))


def test_any_dimension_of_rows(mesh_of, candidate):
    """One that has others before it and behind it."""
    x, v, w = values((2, 8, 3, 5)), values((2, 8, 3, 20), seed=1), values((20, 7), seed=2)

    def f(x, u, v, w):
        gathered = pk.all_gather_matmul(x, u, "x", axis=1)
        scattered = pk.matmul_reduce_scatter(v, w, "x", scatter_dimension=-3)
        return gathered, scattered, pk.matmul_all_reduce(v, w, "x")

    columns, u = P(None, None, None, "x"), values((5, 8), seed=3)
    specs, outs = (COLUMNS, COLUMNS, columns, ROWS), (columns, COLUMNS, P())
    gathered, *sums = jax.jit(mapped(f, mesh_of(x=RANKS), specs, outs))(x, u, v, w)
    check_exact(gathered, exact(x, u))
    for y in sums:
        check_exact(y, exact(v, w))


def test_axes_of_a_mesh(mesh_of, candidate):
    """Ranks are in row-major order of the tuple as given."""
    mesh, names = mesh_of(order=[3, 1, 4, 0, 5, 2, 7, 6], a=2, b=4), ("b", "a")
    x, u = values((16, 3)), values((3, 5), seed=1)
    v, w = values((8, 24), seed=2), values((24, 5), seed=3)

    def f(x, u, v, w):
        gathered = pk.all_gather_matmul(x, u, names)[None]
        return gathered, pk.matmul_reduce_scatter(v, w, names), pk.matmul_all_reduce(v, w, names)

    rows = P(names)
    specs = (rows, P(), P(None, names), rows)
    gathered, *sums = jax.jit(mapped(f, mesh, specs, (rows, rows, P())))(x, u, v, w)
    check_exact(gathered, np.stack([exact(x, u)] * 8))
    for y in sums:
        check_exact(y, exact(v, w))


def test_several_weights_share_a_gather(mesh_of):
    def f(x, ws):
        *ys, gathered = pk.all_gather_matmul(x, ws, "x", return_gathered=True)
        alone = pk.all_gather_matmul(x, ws[1], "x", return_gathered=True)
        one = pk.all_gather_matmul(x, (ws[1],), "x")
        assert isinstance(alone, tuple) and isinstance(one, tuple) and len(one) == 1
        pairs = zip((*alone, *one), (ys[1], gathered, ys[1]), strict=True)
        return ys, gathered, jnp.stack([jnp.array_equal(a, b) for a, b in pairs])

    x, ws = values((8, 3)), [values((3, p), seed=p) for p in (4, 1, 6)]
    ys, gathered, same = each_rank(mesh_of(x=RANKS), f, (ROWS, P()), x, ws)
    assert same.all()
    check_exact(gathered, np.stack([x] * RANKS))
    for y, w in zip(ys, ws, strict=True):
        check_exact(y, np.stack([exact(x, w)] * RANKS))
    text = str(jax.make_jaxpr(mapped(f, mesh_of(x=RANKS), (ROWS, P()), P("x")))(x, ws))
    assert text.count("pk_all_gather_matmul[") == 3


# The dtype of operands and result, and the one that crosses the link.
ROUNDED = {
    "reference": (
        ("bfloat16", None),
        ("float16", None),
        ("bfloat16", "float32"),
        ("float32", "bfloat16"),
    ),
    # The sum of the first two is jax.lax's here, in bfloat16; that of the others is in float32, or
    # of parts that are exchanged.
    "unfused": (("bfloat16", "float32"), ("float32", "bfloat16")),
}


def test_rounding(mesh_of, candidate):
    """What crosses the link is rounded once, and the sum in rank order once more: bit by bit."""
    # Of few bits: in float32 all products are exact, in what they are rounded to they are not.
    x, w = (values(shape, seed=i) * 1.0625 for i, shape in enumerate([(8, 12), (12, 5)]))

    def f(x, w):
        results = []
        for dtype, wire in ROUNDED[candidate]:
            some = {"axis_name": "x", "config": pk.Config(reduce_dtype=wire)}
            some |= {"x": x.astype(dtype), "w": w.astype(dtype)}
            scattered = pk.matmul_reduce_scatter(**some)
            some["x"] = some["x"][:7]
            results += [(scattered, pk.matmul_all_reduce(**some))]
        return results

    outs = [(ROWS, P())] * len(ROUNDED[candidate])
    results = jax.jit(mapped(f, mesh_of(x=RANKS), (COLUMNS, ROWS), outs))(x, w)
    for (dtype, wire), got in zip(ROUNDED[candidate], results, strict=True):
        parts = [np.asarray(each.astype(dtype)) for each in (x, w)]
        want = rounded_sum(*parts, RANKS, dtype, wire or dtype)
        assert not np.array_equal(want.astype("f4"), rounded_sum(*parts, RANKS, "f4", "f4"))
        check_all(got, (want, want[:7]))


def test_two_dtypes(mesh_of):
    """The gather moves x in its own dtype; each product has the dtype of its factors."""
    x, w, v = values((8, 3), "int8"), values((3, 5), "bfloat16"), values((3, 2), "float32")

    def f(x, w, v):
        y, z, gathered = pk.all_gather_matmul(x, [w, v], "x", return_gathered=True)
        return y, z, gathered, pk.matmul_all_reduce(x, v, "x")

    with jax.numpy_dtype_promotion("standard"):
        y, z, gathered, total = each_rank(mesh_of(x=RANKS), f, (ROWS, P(), P()), x, w, v)
    assert (y.dtype, z.dtype, gathered.dtype) == (jnp.bfloat16, jnp.float32, jnp.int8)
    exact = np.asarray(x, "f4") @ np.asarray(w, "f4"), np.asarray(x, "f4") @ np.asarray(v)
    np.testing.assert_array_equal(np.asarray(y[1], "f4"), exact[0])
    np.testing.assert_array_equal(z[1], exact[1])
    np.testing.assert_array_equal(total[0], exact[1].reshape(RANKS, 2, 2).sum(0))


SIZES = ((0, 3, 5), (8, 0, 5), (8, 3, 0))


def test_no_elements(mesh_of, candidate):
    def f(x, w):  # cut in here: XLA cannot compile a shard_map of empty operands alone
        ops = (pk.all_gather_matmul, pk.matmul_reduce_scatter, pk.matmul_all_reduce)
        return [[op(x[:, :m, :k], w[:k, :p], "x") for op in ops] for m, k, p in SIZES]

    x, w = jnp.ones((2, 8, 12)), jnp.ones((3, 5))
    results = each_rank(mesh_of(x=RANKS), f, (P(None, None, "x"), P()), x, w)
    for (m, k, p), (gathered, scattered, total) in zip(SIZES, results, strict=True):
        np.testing.assert_array_equal(gathered, np.full((4, 2, 4 * m, p), k))
        np.testing.assert_array_equal(scattered, np.full((4, 2, m // 4, p), 4 * k))
        np.testing.assert_array_equal(total, np.full((4, 2, m, p), 4 * k))


def test_one_rank(mesh_of, candidate):
    x, w = values((3, 4)), values((4, 5), seed=1)

    def f(x, w):
        return [
            (
                *pk.all_gather_matmul(x, w, names, return_gathered=True),
                pk.matmul_reduce_scatter(x, w, names),
                pk.matmul_all_reduce(x, w, names),
            )
            for names in ("x", ())
        ]

    got = jax.jit(mapped(f, mesh_of(x=1), P(), P(), check_vma=False))(x, w)
    check_all(got, [(x @ w, x, x @ w, x @ w)] * 2)


def test_axes_that_are_left_to_xla(mesh_of):
    """Dimensions are not folded then; the sum crosses in the dtype asked for."""
    x, w, v = values((8, 3)), values((3, 5), seed=1), values((8, 12), seed=2)

    def f(x, w, v):
        y, gathered = pk.all_gather_matmul(x, w, "a", return_gathered=True)
        config = pk.Config(reduce_dtype="float16")  # XLA ends the process over bfloat16
        z = pk.matmul_reduce_scatter(v, w, "a", config=config)
        return y, gathered, z, pk.matmul_all_reduce(v, w, "a")

    g = jax.shard_map(
        f,
        mesh=mesh_of(a=4, b=2),
        in_specs=(P("a"), P(), P(None, "a")),
        out_specs=(P(), P(), P("a"), P()),
        axis_names={"a"},
        check_vma=False,
    )
    y, gathered, z, total = jax.jit(g)(x, w, v)
    np.testing.assert_array_equal(y, x @ w)
    np.testing.assert_array_equal(gathered, x)
    np.testing.assert_array_equal(z, v @ jnp.tile(w, (4, 1)))
    np.testing.assert_array_equal(total, z)


def test_types_are_those_of_lax(mesh_of):
    """A result varies where the results of the lax ops do."""
    scatter_in_lax = functools.partial(lax.psum_scatter, scatter_dimension=0, tiled=True)
    ops = [
        (pk.all_gather_matmul, lambda x, w, a: lax.all_gather(x, a, tiled=True) @ w),
        (pk.matmul_all_reduce, lambda x, w, a: lax.psum(x @ w, a)),
        (pk.matmul_reduce_scatter, lambda x, w, a: scatter_in_lax(x @ w, a)),
    ]

    def f(x, w, v):
        for op, twin in ops:
            for case in ((x, w, "a"), (x, v, "a"), (x, v, ("a", "b"))):
                assert jax.typeof(op(*case)) == jax.typeof(twin(*case))
        return x

    specs = P("a"), P(), P(None, "b")
    xs = values((8, 3)), values((3, 5)), values((3, 10))
    jax.make_jaxpr(mapped(f, mesh_of(a=2, b=2), specs, P("a")))(*xs)

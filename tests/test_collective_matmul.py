"""Products with a collective on CPU devices: values, rounding, layouts, types, errors.

What it would catch: rows that a rank multiplies or keeps in another place than jax.lax does, a sum
that is rounded twice or in another order than that of the ranks, a composition of parts that
differs from the reference, an argument that is let through.
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


ERRORS = {
    "mismatch": (
        "gather",
        (4, 3),
        (5, 6),
        {},
        r"of x, 3 of \(4, 3\), must equal .* of w, 5 of \(5",
    ),
    "cut w": ("gather", (4, 12), (3, 6), {}, r"cut along k, .*: in_specs P\(None, 'x'\)$"),
    "whole w": (
        "scatter",
        (4, 3),
        (12, 6),
        {},
        r"; w has the rows of all ranks: give .*, in_specs P\('x', None\)$",
    ),
    "whole x": ("reduce", (4, 12), (3, 6), {}, r"its columns, in_specs P\(\.\.\., 'x'\)$"),
    "rows": ("scatter", (6, 3), (3, 6), {}, r"size 6, .* divisible by the 4 ranks .* zeros to 8"),
    "a row": ("gather", (3,), (3, 6), {}, r"x must be \[\.\.\., m, k\], got shape \(3,\)"),
    "a vector": ("reduce", (4, 3), (3,), {}, r"w \[k, p\], got shapes \(4, 3\) and \(3,\)"),
    "last": ("gather", (4, 3), (3, 6), {"axis": -1}, r"axis=-1 is the last dimension of x"),
    "beyond": ("gather", (4, 3), (3, 6), {"axis": 2}, r"axis=2 is out of bounds for 2"),
    "last of a sum": (
        "scatter",
        (4, 3),
        (3, 6),
        {"scatter_dimension": 1},
        "name one of rows, -2 to -2",
    ),
    "no dtype": (
        "gather",
        (4, 3),
        (3, 6),
        {"preferred_element_type": "x"},
        "must be a dtype or None",
    ),
    "flag": ("gather", (4, 3), (3, 6), {"return_gathered": "yes"}, "return_gathered must be True"),
    "knob": (
        "gather",
        (4, 3),
        (3, 6),
        {"config": pk.Config(mechanism="tma")},
        r"its knobs are num_comm",
    ),
    "dtype on the link": (
        "gather",
        (4, 3),
        (3, 6),
        {"config": pk.Config(reduce_dtype="float32")},
        "cannot honour",
    ),
    "implementation": ("reduce", (4, 3), (3, 6), {"implementation": "fast"}, "must be None or one"),
}
FUNCTIONS = {
    "gather": pk.all_gather_matmul,
    "scatter": pk.matmul_reduce_scatter,
    "reduce": pk.matmul_all_reduce,
}


def fails(mesh, f, *xs):
    jax.make_jaxpr(mapped(f, mesh, P(), P(), check_vma=False))(*xs)


@pytest.mark.parametrize("case", ERRORS)
def test_what_does_not_fit(case, mesh_of):
    name, x, w, more, words = ERRORS[case]
    op = FUNCTIONS[name]
    with pytest.raises((ValueError, TypeError), match=f"(?m){op.__name__}.*{words}"):
        fails(mesh_of(x=4), lambda x, w: op(x, w, "x", **more), jnp.ones(x), jnp.ones(w))


ROWS_OF_W = r"give each rank its rows, in_specs P\('x', None\)"
TRANSPOSED = r"w is \[p, k\]: pass w\.T"
# The whole operands and their specs; what the message says is wrong, from shapes and types.
CUT_WRONGLY = {
    "whole w": (
        "scatter",
        COLUMNS,
        (12, 6),
        P(),
        rf"; w is whole, .* equal .*\['x'\]: {ROWS_OF_W}$",
    ),
    "w by columns": ("reduce", COLUMNS, (12, 8), P(None, "x"), rf"; w is cut, .*: {ROWS_OF_W}$"),
    "whole x": ("reduce", P(), (12, 6), ROWS, "; x is whole, .* equal on all ranks .*, in_specs"),
    "x by rows": (
        "reduce",
        ROWS,
        (12, 6),
        ROWS,
        r"; x is cut, as .* all ranks: .* P\(\.\.\., 'x'\)$",
    ),
    "w.T by columns": ("scatter", COLUMNS, (6, 12), COLUMNS, f"; {TRANSPOSED}$"),
    "w.T by rows": ("scatter", COLUMNS, (8, 12), ROWS, r"is cut, .* P\(None, 'x'\), .* pass w\.T$"),
    "whole w.T": ("reduce", COLUMNS, (6, 12), P(), r"w is \[p, k\] .* equal .* pass w\.T$"),
    "square w by columns": ("reduce", COLUMNS, (12, 12), COLUMNS, f"{ROWS_OF_W}; or {TRANSPOSED}$"),
    "w by rows": ("gather", ROWS, (12, 8), ROWS, r"; w is cut along k, .* P\(None, 'x'\)$"),
    "other whole w": ("gather", ROWS, (3, 8), P(), "; transpose or slice one of them$"),
    "x by columns": (
        "gather",
        COLUMNS,
        (12, 8),
        COLUMNS,
        r"; x is cut along k, .* P\(\.\.\., 'x', None\)$",
    ),
    "w.T by its rows": ("gather", ROWS, (8, 12), ROWS, f"; {TRANSPOSED}$"),
    "w.T along k": (
        "gather",
        ROWS,
        (8, 12),
        COLUMNS,
        r"is \[p, k\] and cut .* P\('x', None\), and",
    ),
}


@pytest.mark.parametrize("case", CUT_WRONGLY)
def test_what_types_say_of_what_does_not_fit(case, mesh_of):
    name, of_x, w, of_w, words = CUT_WRONGLY[case]
    op = FUNCTIONS[name]
    f = mapped(lambda x, w: op(x, w, "x"), mesh_of(x=4), (of_x, of_w), P())
    with pytest.raises(ValueError, match=f"(?m){op.__name__}: the last dimension of x.*{words}"):
        jax.eval_shape(f, jnp.ones((8, 12)), jnp.ones(w))


def test_a_weight_that_is_cut_over_one_of_two_axes(mesh_of):
    f = mapped(
        lambda x, w: pk.matmul_all_reduce(x, w, ("a", "b")),
        mesh_of(a=2, b=2),
        (P(None, ("a", "b")), P("a")),
        P(),
    )
    words = r"w is whole, .* equal on all ranks of \['b'\]: .* P\(\('a', 'b'\), None\)"
    with pytest.raises(ValueError, match=words):
        jax.eval_shape(f, jnp.ones((8, 12)), jnp.ones((12, 6)))


def test_operands_that_do_not_fit(mesh_of):
    mesh, x = mesh_of(x=4), jnp.ones((4, 4))
    gather, reduce = FUNCTIONS["gather"], FUNCTIONS["reduce"]
    for error, words, f in (
        (ValueError, "w is an empty sequence", lambda x: gather(x, [], "x")),
        (TypeError, r"w\[1\] must be an array, got 3", lambda x: gather(x, [x, 3], "x")),
        (ValueError, r"w\[1\], 2 of \(2, 4\)", lambda x: gather(x, (x, x[:2]), "x")),
        (TypeError, "x must be an array", lambda x: reduce([[1.0]], x, "x")),
        (
            TypeError,
            "preferred_element_type=.* does not go with operands of dtype int32",
            lambda x: reduce(*[x.astype("int32")] * 2, "x", preferred_element_type="int8"),
        ),
        (TypeError, "no sum of booleans", lambda x: reduce(x > 0, x > 0, "x")),
        (NameError, "matmul_all_reduce: axis 'y' is not in the mesh", lambda x: reduce(x, x, "y")),
        (
            ValueError,
            "cannot honour config.reduce_dtype='bfloat16' for a result of dtype int32",
            lambda x: reduce(
                *[x.astype("int32")] * 2, "x", config=pk.Config(reduce_dtype="bfloat16")
            ),
        ),
    ):
        with pytest.raises(error, match=words):
            fails(mesh, f, x)
    with pk.use_config(reduce_dtype="bfloat16"):  # a mere default gives way
        fails(mesh, lambda x: reduce(*[x.astype("int32")] * 2, "x"), x)


def test_sums_that_are_to_come(mesh_of):
    def f(to, x, w):
        x = lax.pcast(x, "x", to=to)
        w = lax.pcast(w, "x", to="reduced") if to == "varying" else w
        return pk.all_gather_matmul(x, w, "x")

    for to, words in (
        ("unreduced", r"x is typed as unreduced .*; sum it by jax\.lax\.psum\(x, 'x'\) first"),
        ("varying", r"w is typed as reduced .*; jax\.lax\.pcast\(w, 'x', to='varying'\) first"),
    ):
        spec = (P("x") if to == "unreduced" else P(), P())
        g = mapped(functools.partial(f, to), mesh_of(x=4), spec, P("x"))
        with pytest.raises(NotImplementedError, match=f"all_gather_matmul: {words}"):
            jax.make_jaxpr(g)(jnp.ones((4, 4)), jnp.ones((4, 4)))


def test_a_sum_of_equal_parts_is_refused(mesh_of):
    """What the types say: neither factor is cut along k over the axis that is summed over."""
    x, w = jnp.ones((4, 3)), jnp.ones((3, 5))
    for axes, words in (
        ("b", r"all ranks of \['b'\] \(they vary over \['a'\]\)"),
        (("a", "b"), "'b'"),
    ):
        f = mapped(
            lambda x, w, axes=axes: pk.matmul_all_reduce(x, w, axes),
            mesh_of(a=2, b=2),
            (P("a"), P()),
            P("a"),
        )
        with pytest.raises(ValueError, match=f"matmul_all_reduce: .* {words}.*pcast"):
            jax.make_jaxpr(f)(x, w)
    jax.make_jaxpr(
        mapped(
            lambda x, w: pk.matmul_all_reduce(x, w, "b"), mesh_of(a=2, b=1), (P("a"), P()), P("a")
        )
    )(x, w)

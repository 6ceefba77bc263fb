"""Products with a collective: what is refused, and what errors say of sizes, types and dtypes."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from product_twins import COLUMNS, ROWS, mapped

import pk_jax as pk

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
    "whole x": (
        "reduce",
        (4, 12),
        (3, 6),
        {},
        r"P\(\.\.\., 'x'\); or, if a product made x, those of its weight$",
    ),
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
        r"; x is cut, as .* all ranks: .* P\(\.\.\., 'x'\); or, if a product made x, .* weight$",
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

"""What goes into the fused kernels and comes out, with jax.lax in the place of their calls.

What it would catch: rows of another rank, pairs joined along the wrong dimension, a product with
another weight, a transposed w taken as it lies.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from product_twins import COLUMNS, RANKS, ROWS, mapped

import pk_jax as pk
from pk_jax._primitives import (
    all_gather_matmul_call,
    collective_matmul,
    few_rows_call,
    fused,
    matmul_reduce_call,
)


def product(x, w, transpose_w):
    return x @ (w.T if transpose_w else w)


@pytest.fixture
def made(monkeypatch, can_run):
    """The calls, [op, shapes of their operands], that the ops on CPU devices make from now on."""
    found = []

    def gather(x, weights, *, transpose_w, own_rows, **_):
        found.append(["gather", x.shape, *(w.shape for w in weights)])
        gathered = lax.all_gather(x, "x", axis=1, tiled=True)
        products = [product(gathered, w, transpose_w) for w in weights]
        if own_rows:
            return gathered, products
        found.append(["own rows are left out", x.shape])
        at = lax.axis_index("x") * x.shape[1]
        return lax.dynamic_update_slice_in_dim(gathered, x + jnp.nan, at, axis=1), products

    def reduce(x, w, *, transpose_w, all_reduce, outer=None, **_):
        few = "few rows: " if outer is None else ""
        found.append([few + ("reduce" if all_reduce else "scatter"), x.shape, w.shape])
        y = product(x, w, transpose_w)
        if all_reduce:
            return lax.psum(y, "x")
        y = y.reshape(outer or 1, -1, y.shape[1])
        y = lax.psum_scatter(y, "x", scatter_dimension=1, tiled=True)
        return y.reshape(-1, y.shape[2])

    def candidate(ctx, op, params):
        asked = params["implementation"] == "reference"
        return "reference" if asked else fused.find(ctx, op, params)

    monkeypatch.setattr(collective_matmul, "_candidate", candidate)
    monkeypatch.setattr(fused, "call_site", lambda *_: {})
    monkeypatch.setattr(all_gather_matmul_call, "call", gather)
    monkeypatch.setattr(matmul_reduce_call, "call", reduce)
    monkeypatch.setattr(few_rows_call, "call", reduce)
    return found


def check(f, mesh, in_specs, out_specs, *shapes):
    """Results and gradients against the reference, of integers, whose sums are exact."""
    rng = np.random.default_rng(1)
    args = [jnp.asarray(rng.integers(-2, 3, shape), "bfloat16") for shape in shapes]

    def run(**kwargs):
        op = mapped(functools.partial(f, **kwargs), mesh, in_specs, out_specs)
        ys, vjp = jax.vjp(op, *args)
        return ys, vjp(jax.tree.map(jnp.ones_like, ys))

    got, expected = jax.jit(run)(), jax.jit(lambda: run(implementation="reference"))()
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_gather_of_several_matrices_and_weights(made, mesh_of):
    """The gradient of x is one sum, of the pairs joined along k."""
    check(
        lambda x, u, v, **kwargs: pk.all_gather_matmul(x, (u, v), "x", **kwargs),
        mesh_of(x=RANKS),
        (COLUMNS, COLUMNS, COLUMNS),
        (P(None, None, "x"), P(None, None, "x")),
        (2, 3 * RANKS, 7),
        (7, 5 * RANKS),
        (7, 4 * RANKS),
    )
    assert ["gather", (2, 3, 7), (7, 5), (7, 4)] in made
    assert ["few rows: scatter", (2 * 3 * RANKS, 9), (7, 9)] in made


@pytest.mark.parametrize("at, rows", [(0, 3), (1, 3), (1, 5), (1, 128)])
def test_scatter_of_several_matrices(at, rows, made, mesh_of):
    """Whole tiles of a rank's rows are taken where they lie, others copied."""
    check(
        lambda x, w, **kwargs: pk.matmul_reduce_scatter(x, w, "x", scatter_dimension=at, **kwargs),
        mesh_of(x=RANKS),
        (P(None, None, "x"), ROWS),
        P("x") if at == 0 else P(None, "x"),
        (2 * RANKS, rows * RANKS, 2 * RANKS),
        (2 * RANKS, 5),
    )
    op = "few rows: scatter" if rows == 3 else "scatter"
    assert [op, (2 * rows * RANKS**2, 2), (2, 5)] in made
    assert any(op == "gather" for op, *_ in made)


def test_own_rows_of_the_gathered_x(made, mesh_of, monkeypatch):
    """Where the kernel leaves them out they are put in afterwards."""
    monkeypatch.setattr(fused, "_HIDDEN", 0)
    check(
        lambda x, w, **kwargs: pk.all_gather_matmul(x, w, "x", return_gathered=True, **kwargs),
        mesh_of(x=RANKS),
        (COLUMNS, COLUMNS),
        (P(None, None, "x"), P(None, None, "x")),
        (2, 3 * RANKS, 7),
        (7, 5 * RANKS),
    )
    assert ["own rows are left out", (2, 3, 7)] in made


def test_reduce_of_a_tangent(made, mesh_of):
    """One sum of two pairs."""

    def f(x, w, **kwargs):
        op = functools.partial(pk.matmul_all_reduce, axis_name="x", **kwargs)
        return jax.jvp(op, (x, w), (x + 1, w - 1))

    check(f, mesh_of(x=RANKS), (COLUMNS, ROWS), (P(), P()), (3, 2 * RANKS), (2 * RANKS, 5))
    assert ["few rows: reduce", (3, 2), (2, 5)] in made
    assert ["few rows: reduce", (3, 4), (4, 5)] in made

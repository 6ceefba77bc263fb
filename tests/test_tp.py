"""Dense layers of tensor parallelism on CPU devices, against jax.lax on the same parts.

What it would catch: a bias that every rank adds to a sum, or that the gradient counts once a rank;
rows gathered that all ranks have, or taken as whole where they are parts; a gradient of what is
equal on all ranks that is not summed over them.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from product_models import values

import pk_jax as pk

N = 8
COLUMNS = P(None, "tp")
SPECS = ((COLUMNS, COLUMNS), (P("tp"), None), P("tp"), P())  # weights and biases in, and out


def of_pk(sequence):
    def layer(x, ws, biases, w, bias):
        where = {"sequence_dimension": sequence}
        gate, up = pk.tp.column_parallel_dense(x, ws, "tp", bias=biases, **where)
        return pk.tp.row_parallel_dense(jnp.tanh(gate) * up, w, "tp", bias=bias, **where)

    return layer


def of_lax(sequence):
    def layer(x, ws, biases, w, bias):
        if sequence is not None:
            x = lax.all_gather(x, "tp", axis=sequence, tiled=True)
        y = jnp.tanh(x @ ws[0] + biases[0]) * (x @ ws[1]) @ w
        if sequence is None:
            return lax.psum(y, "tp") + bias
        return lax.psum_scatter(y, "tp", scatter_dimension=sequence, tiled=True) + bias

    return layer


def operands():
    shapes = (2, 2 * N, 3), (3, 2 * N), (3, 2 * N), (2 * N,), (2 * N, 5), (5,)
    x, gate, up, gate_bias, w, bias = (values(s, seed=i) / 8 for i, s in enumerate(shapes))
    return x, (gate, up), (gate_bias, None), w, bias


@pytest.mark.parametrize(
    "sequence, check_vma", [(1, True), (1, False), (None, True), (None, False)]
)
def test_layer_and_gradients(sequence, check_vma, mesh_of):
    mesh, rows = mesh_of(tp=N), P() if sequence is None else P(None, "tp")
    xs = operands()

    @jax.jit
    def run(xs):
        def of(layer):
            f = jax.shard_map(
                layer, mesh=mesh, in_specs=(rows, *SPECS), out_specs=rows, check_vma=check_vma
            )
            y, pull = jax.vjp(f, *xs)
            return y, pull(jnp.sin(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))

        return of(of_pk(sequence)), of(of_lax(sequence))

    got, want = run(xs)
    for ours, theirs in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    x, ws, biases, w, bias = xs
    whole = np.tanh(x @ ws[0] + biases[0]) * (x @ ws[1]) @ w + bias
    np.testing.assert_allclose(got[0], whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "sequence, first, last",
    [(-2, "all_gather_matmul", "matmul_reduce_scatter"), (None, "matmul", "matmul_all_reduce")],
)
def test_ops_of_a_layer(sequence, first, last, mesh_of):
    rows = P() if sequence is None else P(None, "tp")
    f = jax.shard_map(of_pk(sequence), mesh=mesh_of(tp=N), in_specs=(rows, *SPECS), out_specs=rows)
    text = str(jax.make_jaxpr(f)(*operands()))
    wanted = [first, last] if first != "matmul" else [first, first, last]  # a gather is shared
    assert re.findall(r"= pk_(\w+)\[", text) == wanted

    def gradient(x, *weights):
        y, pull = jax.vjp(lambda x: f(x, *weights), x)
        return pull(y)

    text = str(jax.make_jaxpr(gradient)(*operands()))
    back = ["psum_invariant"] if sequence is None else [first, last]  # one for both weights
    assert re.findall(r"= (?:pk_)?(\w*(?:psum|gather|scatter|reduce)\w*)\[", text) == [
        *([] if sequence is None else [first]), last, *back,
    ]  # fmt: skip


def test_a_bias_is_added_in_its_dtype(mesh_of):
    """256 + 1.001 is nearer to 258 than to 256; rounded to bfloat16 first, 1.001 is 1: a tie."""
    x, w = np.full((N, N), 16, jnp.bfloat16), np.full((N, 1), 2, jnp.bfloat16)
    f = jax.shard_map(
        lambda x, w, b: pk.tp.row_parallel_dense(x, w, "tp", bias=b),
        mesh=mesh_of(tp=N),
        in_specs=(COLUMNS, P("tp"), P()),
        out_specs=P("tp"),
    )
    y = jax.jit(f)(x, w, np.full(1, 1.001, np.float32))
    assert y.dtype == jnp.bfloat16 and (np.asarray(y, np.float32) == 258).all()


def column(x, w, bias=None, **options):
    return pk.tp.column_parallel_dense(x, w, "tp", bias=bias, **options)


def row(x, w, bias=None, **options):
    return pk.tp.row_parallel_dense(x, w, "tp", bias=bias, **options)


ONES = np.ones
ERRORS = {
    "rows that all have": (
        lambda x, w: column(ONES((8, 8), "f4"), w),
        ValueError,
        "x is typed as equal .* pass sequence_dimension=None",
    ),
    "parts of rows as whole": (
        lambda x, w: column(x, w, sequence_dimension=None),
        ValueError,
        r"different on the ranks of \['tp'\].* by sequence_dimension",
    ),
    "a weight that is no array": (
        lambda x, w: column(ONES((8, 8), "f4"), (w, 1.0), sequence_dimension=None),
        TypeError,
        "column_parallel_dense: w must be an array",
    ),
    "no flag": (
        lambda x, w: column(ONES((8, 8), "f4"), w, sequence_dimension=None, save_gathered="no"),
        TypeError,
        "column_parallel_dense: save_gathered must be True or False, got 'no'",
    ),
    "no weights": (lambda x, w: column(x, ()), ValueError, "give one weight at least"),
    "one bias for two": (
        lambda x, w: column(x, (w, w), ONES(8, "f4")),
        ValueError,
        "bias must be 2 in a sequence, as w is, got one value",
    ),
    "too many biases": (
        lambda x, w: column(x, (w, w), (None,) * 3),
        ValueError,
        "bias must be 2 in a sequence, as w is, got 3 in a sequence",
    ),
    "a sequence for one": (
        lambda x, w: column(x, w, [ONES(8, "f4")]),
        ValueError,
        "bias must be one value",
    ),
    "a whole bias of columns": (
        lambda x, w: column(x, w, ONES(64, "f4")),
        ValueError,
        r"bias has 64 numbers for 8 columns of w, it is whole; .*in_specs P\('tp'\)",
    ),
    "a part of the bias of a sum": (
        lambda x, w: row(x, w, ONES(1, "f4")),
        ValueError,
        r"bias has 1 numbers for 8 columns of w, it is cut; .*in_specs P\(\)",
    ),
    "a bias of each rank": (
        lambda x, w: row(x, w, x[0]),
        ValueError,
        r"bias is typed as different on the ranks of \['tp'\].*in_specs P\(\)",
    ),
    "the same weight on all ranks": (
        lambda x, w: row(x, ONES((8, 8), "f4")),
        ValueError,
        r"row_parallel_dense: w is typed as equal on all ranks of \['tp'\], .* P\('tp', None\), or",
    ),
    "the same columns on all ranks": (
        lambda x, w: row(ONES((8, 8), "f4"), w, sequence_dimension=None),
        ValueError,
        r"x is typed as equal .* P\(\.\.\., 'tp'\), or, .*pcast\(x, \('tp',\), to='varying'\)",
    ),
    "a bias of another dtype": (
        lambda x, w: column(x, w, ONES(8, "f2")),
        TypeError,
        "bias must be float32 .* got float16; convert it",
    ),
    "a bias that is no array": (
        lambda x, w: row(x, w, 1.0),
        TypeError,
        "row_parallel_dense: bias must be an array",
    ),
    "a dimension that is multiplied": (
        lambda x, w: row(x, w, sequence_dimension=-1),
        ValueError,
        "scatter_dimension=-1 is the last dimension",
    ),
    "a knob of another op": (
        lambda x, w: row(x, w, config=pk.Config(mechanism="tma")),
        ValueError,
        "cannot honour config.mechanism",
    ),
}


@pytest.mark.parametrize("what", ERRORS)
def test_errors(what, mesh_of):
    call, error, text = ERRORS[what]
    f = jax.shard_map(call, mesh=mesh_of(tp=N), in_specs=(P("tp"), P("tp")), out_specs=P("tp"))
    with pytest.raises(error, match=text):
        jax.eval_shape(f, ONES((64, 8), "f4"), ONES((64, 8), "f4"))


def test_equal_parts_that_are_meant(mesh_of):
    """By a cast that the message names; where the op is called by its own name; without types."""

    def f(layer, x, w):
        return layer(x, lax.pcast(w, ("tp",), to="varying") if layer is row else w)

    x, w = values((N, 3 * N)), values((3, 5), seed=1)
    want = sum(x[:, 3 * i : 3 * i + 3] @ w for i in range(N))
    for check_vma in (True, False):
        for layer in (row, lambda x, w: pk.matmul_reduce_scatter(x, w, "tp")):
            g = jax.shard_map(
                functools.partial(f, layer),
                mesh=mesh_of(tp=N),
                in_specs=(COLUMNS, P()),
                out_specs=P("tp"),
                check_vma=check_vma,
            )
            np.testing.assert_allclose(jax.jit(g)(x, w), want, rtol=1e-5)


def test_an_axis_that_is_not_bound():
    with pytest.raises(NameError, match="tp"):
        column(ONES((8, 8), "f4"), ONES((8, 8), "f4"))


def test_one_rank(mesh_of):
    """Rows are all rows, however they are typed."""
    x, w = values((4, 3)), values((3, 5), seed=1)
    specs = (P("tp"), P(None, "tp"))

    def f(x, w):
        return column(x, w), column(x, w, sequence_dimension=None)

    mapped = jax.shard_map(f, mesh=mesh_of(tp=1), in_specs=specs, out_specs=P("tp"))
    for y in jax.jit(mapped)(x, w):
        np.testing.assert_array_equal(y, x @ w)

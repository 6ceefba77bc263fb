"""pk.attention on CPU devices: values, derivatives of every order, transforms.

Values are compared with loops in double precision, derivatives with JAX's of the op as it is
written down.
"""

import doctest
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_models import (
    check,
    check_close,
    direct,
    gradients,
    ids,
    in_double,
    logits_of,
    mask,
    operands,
    second,
    with_cotangents,
)
from jax import lax
from jax.sharding import PartitionSpec as P
from transforms import primitives_in

import pk_jax as pk
from pk_jax._reference import attention as reference

pair = functools.partial(pk.attention, return_residual=True)

# Sizes, and what is asked for.
CASES = {
    "one key head": ({"kv_heads": 1, "value_width": 3}, {"scale": -0.7}),
    "a key head each": ({"heads": 3, "kv_heads": 3, "rows": 1}, {"logits_soft_cap": 1.5}),
    "causal, rows past the keys": ({"rows": 9}, {"is_causal": True}),
    "causal, keys past the rows": ({"keys": 13}, {"is_causal": True, "logits_soft_cap": 2}),
    "window": ({"rows": 8}, {"local_window_size": (1, 3), "scale": 0}),
    "window past the keys": ({"rows": 12, "keys": 3}, {"local_window_size": 2**40}),
    "all": (
        {"rows": 9, "heads": 6, "value_width": 5},
        {
            "ids": (ids(2, 9), ids(2, 7, seed=1)),
            "is_causal": True,
            "local_window_size": (3, 1),
            "logits_soft_cap": 1.0,
        },
    ),
}


def given(sizes, arguments):
    """The operands, ours, and what ours is to be: the mask and the rest."""
    arguments = dict(arguments)
    query_ids, key_ids = arguments.pop("ids", (None, None))
    xs = operands(**sizes)
    f = functools.partial(
        pair, query_segment_ids=query_ids, key_value_segment_ids=key_ids, **arguments
    )
    return xs, f, logits_of(xs, query_ids, key_ids, **arguments)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_and_gradients(case):
    check(*given(*case))


def test_keys_block_by_block(monkeypatch):
    """Two whole blocks and some keys left over, with larger and larger logits, then smaller."""
    arguments = {"is_causal": True, "ids": (ids(2, 11), ids(2, 11, count=3))}
    (query, key, value), f, logits = given({"rows": 11, "keys": 11}, arguments)
    monkeypatch.setattr(reference, "BLOCK", 4)
    key *= jnp.asarray([1.0, 2, 3, 3, 2])[jnp.arange(11) // 2 % 5][None, :, None, None]
    check((query, key, value), f, logits)


def test_long_sequences_have_no_square(lowered):
    """Of 1024 rows and 4096 keys there is no array, forward or backward or in second order."""
    x, y = (jax.ShapeDtypeStruct((1, size, 1, 8), jnp.float32) for size in (1024, 4096))
    for f in (pk.attention, gradients(pair), second(pair)):
        text = lowered(f, x, y, y, platform="cpu")
        shapes = re.findall(r"tensor<([\dx]+)xf32>", text)
        most = max(np.prod([int(size) for size in shape.split("x")]) for shape in set(shapes))
        assert most == 1024 * reference.BLOCK


KINDS = ({}, {"is_causal": True}, {"local_window_size": (2, 1), "scale": 0.3})


def test_as_in_jax_nn():
    """With the window, the causal mask and the heads of jax.nn, in a half precision too."""
    nn = jax.numpy_dtype_promotion("standard")(jax.nn.dot_product_attention)
    for dtype, rtol in (("float32", 1e-6), ("bfloat16", 1e-2)):
        xs = operands(rows=8, keys=8, dtype=dtype)
        got, want = (
            jax.jit(lambda *xs, f=f: [f(*xs, **kind) for kind in KINDS])(*xs)
            for f in (pk.attention, nn)
        )
        assert all(x.dtype == dtype for x in got)
        check_close(got, want, rtol)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype):
    """The result is rounded once, the residual is in fp32, gradients have the operands' dtype."""
    xs, f, logits = given({"dtype": dtype}, {"is_causal": True})
    outs, found, cotangents = with_cotangents(f, *xs)
    assert [x.dtype for x in (*outs, *found)] == [dtype, "float32", dtype, dtype, dtype]
    want = in_double(*xs, **logits, cotangents=cotangents)
    check_close(outs[1], want[0][1], 1e-6)
    check_close(outs[0], want[0][0], 6e-3)
    check_close(found, want[1], 2e-2)


def test_double_precision():
    with jax.enable_x64(True):
        xs = [np.asarray(x, np.float64) for x in operands()]
        got = pair(*xs)
        assert all(x.dtype == np.float64 for x in got)
        check_close(got, in_double(*xs, mask(5, 7)), 1e-13)


def test_operands_of_numpy():
    """In the widest dtypes, which JAX has not unless it is told to."""
    xs = [np.asarray(x, np.float64) for x in operands(rows=7)]
    segments = ids(2, 7).astype("int64")
    got = pair(*xs, query_segment_ids=segments, key_value_segment_ids=segments.astype("int32"))
    assert [x.dtype for x in got] == ["float32", "float32"]
    logits = logits_of(xs, segments, segments)
    check_close(got, in_double(*xs, **logits))


def test_rows_that_see_nothing():
    """Zero with zero gradients of both orders, whatever is done with them later."""
    xs = operands(rows=4, keys=3)
    segments = np.array([[7, 1, 5, 1]] * 2), np.array([[7, 7, 7]] * 2)

    def f(*xs):
        return pair(*xs, query_segment_ids=segments[0], key_value_segment_ids=segments[1])

    def careless(*xs):
        out, lse = f(*xs)
        return jnp.sum(out[:, 1] * lse[:, 1, :, None]) + jnp.sum(lse[:, 3] ** 2) - lse[0, 1, 0] ** 2

    (out, lse), twice, bad = jax.jit(
        lambda *xs: (f(*xs), second(f)(*xs), jax.grad(careless, (0, 1, 2))(*xs))
    )(*xs)
    assert not np.any(out[:, 1::2]) and np.all(lse[:, 1::2] == -np.inf)
    for of_query, *others in (twice, bad):
        assert not np.any(of_query[:, 1::2])
        assert all(np.all(np.isfinite(x)) for x in (of_query, *others))
    assert not any(np.any(x) for x in bad)


def test_no_keys_and_no_rows():
    query, key, value = operands()
    out, lse = pair(query, key[:, :0], value[:, :0])
    assert not np.any(out) and np.all(lse == -np.inf)
    grads = jax.jit(gradients(pair))(query, key[:, :0], value[:, :0])
    assert not np.any(grads[0]) and grads[1].shape == (2, 0, 2, 8)
    assert pk.attention(query[:, :0], key, value).shape == (2, 0, 4, 8)
    assert pk.attention(query[:0], key[:0], value[:0]).shape == (0, 5, 4, 8)


def test_large_logits():
    """Far past what exp has room for, up and down."""
    query, key, value = operands()
    key = abs(key)
    for row in (query * 1e4, -abs(query) * 1e4, abs(query) * 1e4):
        check((row, key, value), pair, {"seen": mask(5, 7)}, 5e-3)


# Derivatives.


def test_forward_and_higher_orders(monkeypatch):
    """Forward, forward over reverse, reverse over reverse; with blocks of keys."""
    monkeypatch.setattr(reference, "BLOCK", 4)
    arguments = {"ids": (ids(2, 6), ids(2, 8)), "is_causal": True, "logits_soft_cap": 2.0}
    xs, f, logits = given({"rows": 6, "keys": 8}, arguments)
    changes = tuple(x + 1 for x in xs)

    def orders(f):
        def at(*xs):
            first = gradients(f, 3)
            return (
                jax.jvp(f, xs, changes),
                jax.jvp(lambda key: f(xs[0], key, xs[2]), (xs[1],), (changes[1],)),
                jax.jvp(first, xs, changes),
                second(f)(*xs),  # reverse over reverse
            )

        return jax.jit(at)(*xs)

    def finite(f):
        """The log-sum-exp of a row without keys has no tangent to speak of."""

        def g(*xs):
            out, lse = f(*xs)
            return out, jnp.where(lse == -jnp.inf, 0, lse)

        return g

    check_close(orders(finite(f)), orders(finite(functools.partial(direct, **logits))), 1e-4)


def test_a_gradient_is_two_ops_and_keeps_what_they_share():
    xs = operands()
    names = primitives_in(gradients(pair), *xs)
    assert [name for name in names if name.startswith("pk_")] == [
        "pk_attention",
        "pk_attention_backward",
    ]
    _, pull = jax.vjp(pair, *xs)
    kept = sorted(x.shape for x in jax.tree.leaves(pull))
    assert kept == sorted([*(x.shape for x in xs), (2, 5, 4, 8), (2, 5, 4)])


def test_unused_residual_and_unused_result():
    xs, f, logits = given({}, {"is_causal": True})

    def gradients_of_each(f):
        return [jax.grad(lambda *xs, i=i: jnp.sum(f(*xs)[i] ** 2), 2 - i)(*xs) for i in (0, 1)]

    got, want = (
        jax.jit(gradients_of_each, static_argnums=0)(h)
        for h in (f, functools.partial(direct, **logits))
    )
    check_close(got, want)


# Transforms.


@pytest.mark.parametrize(
    "mapped",
    [(2, None, None, None), (None, 1, None, 0), (1, 4, 0, 1)],
    ids=str,
)
def test_vmap(mapped):
    """Of the op, of its gradients, and the gradient of a map."""
    several = [np.stack([np.asarray(x) * (i + 1) for i in range(3)]) for x in operands(batch=1)]
    segments = np.stack([ids(1, 5, seed=i) for i in range(3)])
    key_ids = ids(1, 7, count=4)

    def f(query, key, value, query_ids):
        return pair(query, key, value, query_segment_ids=query_ids, key_value_segment_ids=key_ids)

    def both(f):
        return lambda *xs: (f(*xs), gradients(f)(*xs))

    stacked = [*several, segments]
    xs = [x[0] if d is None else np.moveaxis(x, 0, d) for x, d in zip(stacked, mapped, strict=True)]
    in_map = jax.vmap(both(f), mapped)
    one_by_one = [
        [x[0] if d is None else x[i] for x, d in zip(stacked, mapped, strict=True)]
        for i in range(3)
    ]
    alone = jax.jit(both(f))
    parts = [alone(*each) for each in one_by_one]
    got = jax.jit(lambda *xs: (in_map(*xs), gradients(jax.vmap(f, mapped))(*xs)))(*xs)
    check_close(got[0], jax.tree.map(lambda *ys: np.stack(ys), *parts))
    assert got[1][0].shape == xs[0].shape


def test_a_map_over_the_query_repeats_no_key(lowered):
    query, key, value = operands()
    f = jax.vmap(pk.attention, (0, None, None))
    text = lowered(f, jnp.stack([query] * 3), key, value, platform="cpu")
    assert "tensor<6x7x2x8xf32>" not in text


def test_a_map_over_nothing():
    """Over the query alone, where a map is more heads, and over all."""
    query, key, value = operands()
    none = [jnp.zeros((0, *x.shape)) for x in (query, key, value)]
    assert jax.vmap(pk.attention, (0, None, None))(none[0], key, value).shape == (0, 2, 5, 4, 8)
    found = jax.eval_shape(jax.vmap(gradients(pair)), *none)
    assert [x.shape for x in found] == [x.shape for x in none]


def test_scan_and_remat():
    xs, f, logits = given({"keys": 5, "kv_heads": 4}, {"is_causal": True})

    def layers(f, query, key, value):
        layer = jax.checkpoint(lambda x, _: (f(x, key, x)[0], None))
        return lax.scan(layer, query, length=3)[0], jnp.sum(value, 3)

    got, want = (
        jax.jit(gradients(functools.partial(layers, h)))(*xs)
        for h in (f, functools.partial(direct, **logits))
    )
    check_close(got, want)


def test_inside_shard_map(mesh_of, monkeypatch):
    """Queries are each rank's own and keys the same on all, whose gradients are then sums."""
    monkeypatch.setattr(reference, "BLOCK", 4)
    query, key, value = operands(batch=1, rows=8)

    def f(query, key, value):
        mapped = jax.shard_map(
            functools.partial(pair, logits_soft_cap=2.0),
            mesh=mesh_of(x=4),
            in_specs=(P(None, "x"), P(), P()),
            out_specs=P(None, "x"),
        )
        return mapped(query, key, value)

    g = functools.partial(direct, seen=mask(8, 7), cap=2.0)
    got, want = (
        jax.jit(lambda *xs, h=h: (h(*xs), gradients(h)(*xs)))(query, key, value) for h in (f, g)
    )
    check_close(got, want)


def test_precision(lowered):
    def f(*xs):
        with jax.default_matmul_precision("highest"):
            return pk.attention(*xs)

    text = lowered(f, *operands(), platform="cpu")
    assert text.count("precision = [HIGHEST, HIGHEST]") == 2


def test_example_of_the_docstring():
    found = doctest.DocTestFinder().find(pk.attention, "attention", globs={"pk": pk, "jnp": jnp})
    assert doctest.DocTestRunner().run(found[0]) == doctest.TestResults(0, 5)

"""pk.ring_attention on CPU devices, against attention on the whole sequences.

What it would catch: a mask by local positions, a merge of the wrong halves, a hop that is left out
and is of use, cotangents that come home to another rank, a collective that some ranks do not take.
"""

import functools
import itertools
import logging

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
    on_whole,
    operands,
    second,
    with_cotangents,
)
from jax import lax
from jax.sharding import PartitionSpec as P
from transforms import primitives_in

import pk_jax as pk
from pk_jax import _selection
from pk_jax._primitives import ring_attention as ring
from pk_jax._reference import attention as reference

pair = functools.partial(pk.ring_attention, axis_name="x", return_residual=True)


def with_ids(query, key, value, query_ids=None, key_ids=None, **arguments):
    segments = {"query_segment_ids": query_ids, "key_value_segment_ids": key_ids}
    return pair(query, key, value, **segments, **arguments)


# Ranks, layout, rows and keys of a rank, what is asked for.
CASES = {
    "one rank": (1, "zigzag", 4, 4, {"is_causal": True}),
    "two, causal": (2, "zigzag", 4, 6, {"is_causal": True}),
    "three, causal, fewer keys": (3, "contiguous", 5, 2, {"is_causal": True, "segments": True}),
    "three in a window": (
        3,
        "zigzag",
        2,
        2,
        {"local_window_size": (3, 2), "segments": True, "logits_soft_cap": 2.0},
    ),
    "three in a short window": (3, "contiguous", 3, 3, {"local_window_size": (2, 0)}),
    "four in a window of two sides": (4, "contiguous", 2, 2, {"local_window_size": 1}),
}


def given(case, mesh_of, check_vma=True):
    ranks, layout, rows, keys, arguments = case
    arguments = dict(arguments)
    xs = operands(rows=ranks * rows, keys=ranks * keys, value_width=5)
    segments = ()
    if arguments.pop("segments", False):
        segments = ids(2, ranks * rows), ids(2, ranks * keys, count=3)
    body = functools.partial(with_ids, layout=layout, **arguments)
    f = on_whole(body, mesh_of(x=ranks), "x", layout, check_vma, segments)
    return xs, f, logits_of(xs, *segments, **arguments)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_and_gradients(case, mesh_of):
    check(*given(case, mesh_of))


def test_eight_ranks(mesh_of):
    xs, f, logits = given((8, "zigzag", 2, 2, {"is_causal": True, "scale": 0.5}), mesh_of)
    check_close(jax.jit(f)(*xs), in_double(*xs, **logits), 1e-5)


def test_without_types(mesh_of):
    check(*given(CASES["three, causal, fewer keys"], mesh_of, check_vma=False))


def test_half_precision(mesh_of):
    """Parts are merged and cotangents of keys added in fp32, whatever the number of ranks."""
    xs = operands(rows=8, keys=8, dtype="bfloat16")
    f = on_whole(functools.partial(with_ids, is_causal=True), mesh_of(x=2))
    outs, found = check(xs, f, logits_of(xs, is_causal=True), 2e-2)
    assert [x.dtype for x in outs] == ["bfloat16", "float32"]
    assert {x.dtype.name for x in found} == {"bfloat16"}
    text = jax.jit(lambda *xs: jax.vjp(f, *xs)[1](outs)).lower(*xs).as_text()
    sent = [line for line in text.splitlines() if "collective_permute" in line]
    assert sum("xf32>" in line for line in sent) == 2 * 2
    assert sum("xbf16>" in line for line in sent) == 2 * 1 + 2 * 1


def test_rows_that_see_nothing_anywhere(mesh_of):
    xs = operands(rows=6, keys=6)
    segments = np.array([[0, 9, 0, 0, 9, 9]] * 2, np.int32), np.zeros((2, 6), np.int32)
    f = on_whole(with_ids, mesh_of(x=2), ids=segments)
    (out, lse), found = check(xs, f, logits_of(xs, *segments))
    assert not np.any(out[:, segments[0][0] == 9]) and np.all(
        lse[:, segments[0][0] == 9] == -np.inf
    )
    assert not np.any(found[0][:, segments[0][0] == 9])


def test_forward_and_second_order(mesh_of):
    case = (2, "contiguous", 2, 2, {"is_causal": True})
    xs, f, logits = given(case, mesh_of)
    changes = tuple(x + 1 for x in xs)

    def orders(f):
        forward = functools.partial(jax.jvp, f)
        return jax.jit(lambda *xs: (forward(xs, changes), second(f)(*xs)))(*xs)

    check_close(orders(f), orders(functools.partial(direct, **logits)), 1e-4)


# Layouts, and what is known of them while tracing.


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_hops_of_use(layout):
    """By the positions themselves, for all windows and lengths that are small."""
    windows = [(None, None), (None, 0), (0, 0), (3, None), (2, 0), (1, 4), (None, 5)]
    lengths = [(2, 2), (4, 2), (2, 6)] + ([] if layout == "zigzag" else [(1, 1), (3, 1), (1, 5)])
    for (left, right), (rows, keys), ranks in itertools.product(windows, lengths, (1, 2, 3, 5)):
        spec = reference.Spec(1.0, None, left, right)
        hops = ring.useful(spec, layout, rows, keys, ranks)
        places = [
            [positions(layout, rank, length, ranks) for rank in range(ranks)]
            for length in (rows, keys)
        ]
        for hop, rank in itertools.product(range(1, ranks), range(ranks)):
            before = places[0][rank][:, None] - places[1][(rank - hop) % ranks][None]
            seen = (left is None or before <= left) & (right is None or -before <= right)
            seen = np.broadcast_to(seen, before.shape).any()
            assert seen == (hop in hops and hops[hop][rank])
        assert all(hops[0])


def positions(layout, rank, length, ranks):
    """Of the rows of a rank, by the definition of the layouts."""
    pieces = np.split(np.arange(length * ranks), 2 * ranks if layout == "zigzag" else ranks)
    return np.concatenate(
        [pieces[rank], pieces[-1 - rank]] if layout == "zigzag" else [pieces[rank]]
    )


@pytest.mark.parametrize("layout, length", [("contiguous", 5), ("contiguous", 1), ("zigzag", 6)])
def test_positions(layout, length):
    for rank in range(3):
        first = jnp.asarray(reference.starts(layout, rank, length, 3), jnp.int32)[None]
        got = reference.positions(first, length)
        np.testing.assert_array_equal(got[0], positions(layout, rank, length, 3))


def test_merge():
    """Of keys in two parts, either of which a row may not see."""
    xs = operands(rows=4)
    seen = np.ones((1, 4, 7), bool)
    seen[0, 1, :3] = seen[0, 2, 3:] = seen[0, 3] = False
    query, key, value = xs
    parts = [
        in_double(query, key[:, at], value[:, at], seen[:, :, at])
        for at in (slice(0, 3), slice(3, 7))
    ]
    with jax.enable_x64(True):
        for one, other in (parts, parts[::-1]):
            check_close(reference.merge(*one, *other), in_double(*xs, seen), 1e-12)


# What is sent, and where.


def ring_of(mesh, **arguments):
    body = functools.partial(with_ids, **arguments)
    return on_whole(body, mesh)


@pytest.mark.parametrize(
    "window, forward, backward",
    [(None, 3, 3 + 3 + 1), ((2, 0), 1, 1 + 1 + 1), (2, 2, 2 + 2 + 1)],
)
def test_hops_that_are_made(window, forward, backward, mesh_of, can_run, lowered, calls):
    """Each for keys and values: round in forward, round with cotangents and home in backward."""
    xs = operands(rows=16, keys=16)
    f = ring_of(mesh_of(x=4), local_window_size=window)
    assert len(calls(lowered(f, *xs), "ppermute")) == 2 * forward
    found = calls(lowered(gradients(f), *xs), "ppermute")
    assert len(found) == 2 * (forward + backward)
    twice = calls(lowered(lambda *xs: f(f(*xs)[0], *xs[1:]), *xs), "ppermute")
    assert [call["channel"] for call in twice] == list(range(4 * forward))


def test_no_collective_depends_on_a_rank(mesh_of):
    """A rank that skips the arithmetic of a hop sends what the others wait for all the same."""
    xs = operands(batch=1, rows=4, keys=4)
    params = {"spec": reference.Spec(1.0, right=0), "layout": "contiguous", "given": ()}
    params |= {"axis_name": ("x",), "dtype": np.dtype("float32"), "implementation": None}
    out = jnp.zeros((1, 4, 4, 8)), jnp.zeros((1, 4, 4))
    more = ((), (*out, *xs), (*out, *out))
    for rule, operands_of, sends in zip(ring.FAMILY.rules, more, (2, 4, 6), strict=True):
        body = functools.partial(rule, **params, config=pk.Config())
        spec = P(None, "x")
        specs = {"in_specs": spec, "out_specs": spec}
        mapped = jax.shard_map(lambda *xs, f=body: list(f(*xs)), mesh=mesh_of(x=2), **specs)
        (body,) = jax.make_jaxpr(mapped)(*xs, *operands_of).jaxpr.eqns
        conds = [e for e in body.params["jaxpr"].eqns if e.primitive.name == "cond"]
        assert len(conds) == 1
        for branch in conds[0].params["branches"]:
            names = {equation.primitive.name for equation in branch.jaxpr.eqns}
            assert "pk_ppermute" not in names
        sent = [e for e in body.params["jaxpr"].eqns if e.primitive.name == "pk_ppermute"]
        assert len(sent) == sends


def test_a_gradient_is_two_ops(mesh_of):
    f = ring_of(mesh_of(x=2), is_causal=True)
    names = primitives_in(gradients(f), *operands(rows=4, keys=4))
    assert [name for name in names if name.startswith("pk_")] == [
        "pk_ring_attention",
        "pk_ring_attention_backward",
    ]


# Transforms and meshes.


@pytest.mark.parametrize("spec", [P(None, "x"), P()], ids=str)
def test_rows_that_are_the_same_on_all_ranks(spec, mesh_of):
    """Keys, or queries too: each rank's are other rows all the same, whose gradients are summed."""
    query, key, value = operands(rows=4, keys=3)

    def f(query, key, value):
        def body(*xs):
            outs = pair(*xs, is_causal=True)
            assert all(jax.typeof(out).mat.varying == {"x"} for out in outs)
            return outs

        specs = {"in_specs": (spec, P(), P()), "out_specs": P(None, "x")}
        return jax.shard_map(body, mesh=mesh_of(x=2), **specs)(query, key, value)

    outs, found, cotangents = with_cotangents(f, query, key, value)
    cut = (spec != P(), False, False)
    xs = [
        x if r else jnp.tile(x, (1, 2, 1, 1)) for x, r in zip((query, key, value), cut, strict=True)
    ]
    want = in_double(*xs, **logits_of(xs, is_causal=True), cotangents=cotangents)
    check_close(outs, want[0])
    sums = [x if r else sum(np.split(x, 2, 1)) for x, r in zip(want[1], cut, strict=True)]
    check_close(found, sums)


def test_vmap(mesh_of):
    """Inside the shard_map; over the query alone there are more heads, over all a larger batch."""
    xs = operands(batch=1, rows=4, keys=4)
    queries = jnp.stack([xs[0], -xs[0]])
    f = functools.partial(pair, is_causal=True)
    some, every = jax.vmap(f, (0, None, None)), jax.vmap(f, (0, 1, 4))

    def body(queries, key, value):
        outs = some(queries, key, value)
        more = every(outs[0], jnp.stack([key, -key], 1), jnp.stack([value, -value], 4))
        return outs, more

    cut, whole = P(None, None, "x"), P(None, "x")
    specs = {"in_specs": (cut, whole, whole), "out_specs": cut}
    mapped = jax.shard_map(body, mesh=mesh_of(x=2), **specs)
    got, more = jax.jit(mapped)(queries, *xs[1:])
    for i, sign in enumerate((1, -1)):
        logits = logits_of(xs, is_causal=True)
        check_close([y[i] for y in got], in_double(queries[i], *xs[1:], **logits))
        again = in_double(got[0][i], sign * xs[1], sign * xs[2], **logits)
        check_close([y[i] for y in more], again)


def test_ranks_of_a_map(mesh_of):
    """The axis of jax.vmap, whose ranks are in one array."""
    xs = operands(batch=1, rows=4, keys=4)
    f = jax.vmap(functools.partial(pair, is_causal=True), 1, 1, axis_name="x")

    def whole(*xs):
        outs = f(*(x.reshape(1, 2, 2, *x.shape[2:]) for x in xs))
        return tuple(y.reshape(1, 4, *y.shape[3:]) for y in outs)

    check(xs, whole, logits_of(xs, is_causal=True))


def test_several_axes_beside_one_of_the_batch(mesh_of):
    """Ranks are in row-major order of the axes; those of another axis have a batch of their own."""
    xs = operands(rows=8, keys=8)
    spec = P("data", ("a", "b"))
    f = jax.shard_map(
        functools.partial(
            pk.ring_attention, axis_name=("a", "b"), is_causal=True, return_residual=True
        ),
        mesh=mesh_of(data=2, a=2, b=2),
        in_specs=spec,
        out_specs=spec,
    )
    check_close(jax.jit(f)(*xs), in_double(*xs, **logits_of(xs, is_causal=True)))


def test_scan_and_remat(mesh_of):
    query, key, _ = operands(batch=1, rows=4, keys=4, kv_heads=4)

    def layers(attend, query, key):
        layer = jax.checkpoint(lambda x, _: (attend(x, key, x)[0], None))
        return lax.scan(layer, query, length=2)[0]

    def on_ranks(query, key):
        spec = P(None, "x")
        f = functools.partial(layers, functools.partial(pair, is_causal=True))
        return jax.shard_map(f, mesh=mesh_of(x=2), in_specs=spec, out_specs=spec)(query, key)

    g = functools.partial(direct, **logits_of((query, key), is_causal=True))
    got, want = (
        jax.jit(jax.grad(lambda *xs, h=h: jnp.sum(h(*xs) ** 2), (0, 1)))(query, key)
        for h in (on_ranks, functools.partial(layers, g))
    )
    check_close(got, want)


# Implementations and refusals.


def test_there_is_no_one_kernel(mesh_of, can_run, lowered, caplog):
    xs = operands(rows=4, keys=4)
    f = ring_of(mesh_of(x=2), implementation="cuda")
    with pytest.raises(
        NotImplementedError, match=r"^ring_attention: there is no one kernel for a ring"
    ):
        lowered(f, *xs)
    with pytest.raises(NotImplementedError, match=r"^ring_attention is lowered for platform 'cpu'"):
        jax.jit(f)(*xs)
    _selection._logged.clear()
    with caplog.at_level(logging.INFO, logger="pk_jax"):
        lowered(ring_of(mesh_of(x=2)), *xs)
        assert "pk_jax" not in lowered(ring_of(mesh_of(x=2), implementation="reference"), *xs)
    said = [record.message.split(":")[0] for record in caplog.records]
    assert said == [
        "ring_attention takes its parts one after the other",
        "attention takes the reference",
    ]


def test_knobs_are_those_of_ppermute(mesh_of, can_run, lowered, calls):
    f = ring_of(mesh_of(x=2), config=pk.Config(mechanism="tma", num_comm_sms=3))
    found = calls(lowered(f, *operands(rows=4, keys=4)), "ppermute")
    assert {(call["mechanism"], call["num_blocks"]) for call in found} == {("tma", 3)}


@pytest.mark.parametrize(
    "rows, keys, arguments, error, text",
    [
        (4, 4, {"layout": "striped"}, ValueError, r"layout must be one of \('contiguous', 'zigz"),
        (3, 4, {"layout": "zigzag"}, ValueError, "part of query has 3 rows.*multiple of 4, twice"),
        (4, 5, {"layout": "zigzag"}, ValueError, "a rank's part of key has 5 rows, of shape"),
        (4, 4, {"axis_name": "y"}, NameError, "axis 'y' is not in the mesh"),
        (4, 4, {"local_window_size": -3}, ValueError, "local_window_size=-3 must not be negative"),
        (4, 4, {"config": pk.Config(tile=(64, 64))}, ValueError, "its knobs are mechanism"),
        (2**30, 1, {}, NotImplementedError, "2 ranks of 1073741824 rows of query have positions"),
    ],
)
def test_refusals(rows, keys, arguments, error, text, mesh_of):
    xs = [jax.ShapeDtypeStruct((1, 2 * size, 1, 1), jnp.float16) for size in (rows, keys, keys)]
    f = on_whole(functools.partial(with_ids, **arguments), mesh_of(x=2))
    with pytest.raises(error, match=f"^ring_attention.*{text}"):
        jax.eval_shape(f, *xs)

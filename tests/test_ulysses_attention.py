"""pk.ulysses_attention on CPU devices, alone and around a ring, against attention on the whole.

What it would catch: heads that meet the keys of others, rows that come back to another rank, a mask
or ids of a part of the rows.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from attention_models import (
    check,
    check_close,
    ids,
    in_double,
    logits_of,
    on_whole,
    operands,
)
from jax.sharding import PartitionSpec as P

import pk_jax as pk

pair = functools.partial(pk.ulysses_attention, axis_name="x", return_residual=True)


def with_ids(query, key, value, query_ids=None, key_ids=None, **arguments):
    segments = {"query_segment_ids": query_ids, "key_value_segment_ids": key_ids}
    return pair(query, key, value, **segments, **arguments)


ALL = {"is_causal": True, "local_window_size": (6, 1), "logits_soft_cap": 2.0}
# Ranks, heads of the query and of the keys, what is asked for.
CASES = {
    "several heads each": (2, 8, 4, ALL),
    "keys of two ranks": (4, 8, 2, {"is_causal": True}),
    "keys of all ranks": (3, 6, 1, ALL),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_and_gradients(case, mesh_of):
    """With segment ids where all is asked for, and other lengths of the keys."""
    ranks, heads, kv_heads, arguments = case
    sizes = {"rows": 3 * ranks, "keys": 2 * ranks, "heads": heads, "kv_heads": kv_heads}
    xs = operands(**sizes, value_width=5)
    segments = (ids(2, 3 * ranks), ids(2, 2 * ranks)) if arguments is ALL else ()
    f = on_whole(functools.partial(with_ids, **arguments), mesh_of(x=ranks), ids=segments)
    check(xs, f, logits_of(xs, *segments, **arguments))


@pytest.mark.parametrize("layout, check_vma", [("contiguous", True), ("zigzag", False)])
def test_around_a_ring(layout, check_vma, mesh_of):
    """Two ranks share the heads, and two or three such pairs make a ring."""
    ranks = 2 if layout == "zigzag" else 3
    xs = operands(rows=12, keys=24)
    segments = ids(2, 12), ids(2, 24)
    arguments = {"is_causal": True, "local_window_size": (9, 0)}
    body = functools.partial(with_ids, **arguments, ring_axis_name="ring", layout=layout)
    mesh = mesh_of(x=2, ring=ranks)
    f = on_whole(body, mesh, ("ring", "x"), layout, check_vma, segments, ranks=ranks)
    if layout == "zigzag":
        check(xs, f, logits_of(xs, *segments, **arguments))
    else:
        check_close(jax.jit(f)(*xs), in_double(*xs, **logits_of(xs, *segments, **arguments)))


def test_several_axes_beside_one_of_the_batch(mesh_of):
    """Under jax.vmap besides."""
    xs = operands(rows=8, keys=8, kv_heads=4)
    spec = P(None, "data", ("a", "b"))
    f = functools.partial(
        pk.ulysses_attention, axis_name=("a", "b"), is_causal=True, return_residual=True
    )
    mesh = mesh_of(data=2, a=2, b=2)
    mapped = jax.shard_map(jax.vmap(f), mesh=mesh, in_specs=spec, out_specs=spec)
    got = jax.jit(mapped)(*(jnp.stack([x, -x]) for x in xs))
    for i, sign in enumerate((1, -1)):
        want = in_double(*(sign * x for x in xs), **logits_of(xs, is_causal=True))
        check_close([y[i] for y in got], want)


def test_half_precision(mesh_of):
    xs = operands(rows=4, keys=4, dtype="float16")
    out, lse = jax.jit(on_whole(with_ids, mesh_of(x=2)))(*xs)
    assert (out.dtype, lse.dtype) == (jnp.float16, jnp.float32)
    check_close((out, lse), in_double(*xs, **logits_of(xs)), 4e-3)


# What is sent, and refusals.


def test_exchanges(mesh_of, can_run, lowered, calls):
    """Query, key and value there, result and residual back, and as many with cotangents."""
    xs = operands(rows=8, keys=8, kv_heads=1, value_width=5, dtype="bfloat16")
    f = on_whole(functools.partial(with_ids, config=pk.Config(num_comm_sms=3)), mesh_of(x=4))
    found = calls(lowered(f, *xs))
    assert [call["op"] for call in found] == [*["all_to_all"] * 3, "attention", *["all_to_all"] * 2]
    del found[3]
    assert {call["num_blocks"] for call in found} == {3}
    # Of the one head of the keys each rank is sent one copy, [2, 8, 1, 8].
    assert sorted(shape for call in found for shape in call["results"])[:3] == [
        "2x2x4x5xbf16",
        "2x2x4xf32",
        "2x8x1x5xbf16",
    ]

    def both_ways(*xs):
        outs, pull = jax.vjp(f, *xs)
        return outs, pull(outs)

    assert len(calls(lowered(both_ways, *xs), "all_to_all")) == 10
    reference = on_whole(functools.partial(with_ids, implementation="reference"), mesh_of(x=4))
    assert "pk_jax" not in lowered(reference, *xs)
    ring = functools.partial(with_ids, ring_axis_name="ring", config=pk.Config(num_comm_sms=3))
    ring = on_whole(ring, mesh_of(x=2, ring=2), ("ring", "x"))
    found = calls(lowered(ring, *xs), "ppermute")
    assert [call["num_blocks"] for call in found] == [3, 3]


def test_the_kernels_asked_for(mesh_of, can_run, lowered, calls):
    f = on_whole(functools.partial(with_ids, implementation="cuda"), mesh_of(x=2))
    with pytest.raises(NotImplementedError, match=r"^attention: dtype float32 has no CUDA att"):
        lowered(f, *operands(rows=4, keys=4))
    found = calls(lowered(f, *operands(rows=4, keys=4, dtype="bfloat16")))
    assert {call["op"] for call in found} == {"all_to_all", "attention"}


REFUSALS = {
    "heads": (
        {"heads": 3, "kv_heads": 1},
        {},
        ValueError,
        "heads of query, 3 of .* by the 2 ranks",
    ),
    "kv heads": (
        {"heads": 12, "kv_heads": 3},
        {},
        ValueError,
        "heads of key and value, 3 of .* by the 2 ranks of axis .*repeat them to 6",
    ),
    "one axis twice": ({}, {"ring_axis_name": "x"}, ValueError, r"share \['x'\]; heads are ex"),
    "layout": (
        {},
        {"layout": "zigzag"},
        ValueError,
        "layout='zigzag' is that of a ring, and there",
    ),
    "no such layout": ({}, {"layout": "z"}, ValueError, "layout must be one"),
    "axis": ({}, {"axis_name": "z"}, NameError, "axis 'z' is not in the mesh"),
    "ring axis": ({}, {"ring_axis_name": "z"}, NameError, "axis 'z' is not in the mesh"),
    "knob": ({}, {"config": pk.Config(tile=(64, 64))}, ValueError, "its knobs are mechanism"),
    "window": ({}, {"local_window_size": -1}, ValueError, "local_window_size=-1 must not be neg"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name, mesh_of):
    sizes, arguments, error, text = REFUSALS[name]
    f = on_whole(functools.partial(with_ids, **arguments), mesh_of(x=2, y=1))
    with pytest.raises(error, match=f"^ulysses_attention.*{text}"):
        jax.eval_shape(f, *operands(rows=4, keys=4, **sizes))


def test_odd_pieces_of_a_ring(mesh_of):
    """An odd number of rows a rank is none of a ring's rank, if two of them share the heads."""
    f = functools.partial(with_ids, ring_axis_name="y", layout="zigzag")
    for ranks, okay in ((2, True), (1, False)):
        on_ranks = on_whole(f, mesh_of(x=ranks, y=2), ("y", "x"))
        xs = operands(rows=6 * ranks, keys=6 * ranks)
        if okay:
            assert jax.eval_shape(on_ranks, *xs)[0].shape == xs[0].shape
            continue
        with pytest.raises(ValueError, match=re.escape("part of query has 3 rows, of shape")):
            jax.eval_shape(on_ranks, *xs)

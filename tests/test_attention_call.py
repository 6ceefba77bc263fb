"""The custom calls of attention: what they are given, when they are made, why they are not."""

import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_contract import Calls
from attention_models import check_close, operands
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pk_jax as pk
from pk_jax import _selection
from pk_jax._primitives import attention_call
from pk_jax._reference import attention as reference
from pk_jax._reference.attention import Places, Spec

pair = functools.partial(pk.attention, return_residual=True)


def shapes(rows=130, keys=200, heads=8, kv_heads=2, width=128, value_width=None, dtype="bfloat16"):
    value_width = value_width or width
    sizes = (rows, heads, width), (keys, kv_heads, width), (keys, kv_heads, value_width)
    return [jax.ShapeDtypeStruct((2, *size), dtype) for size in sizes]


def ids_of(rows=130, keys=200, dtype="int32"):
    return {
        "query_segment_ids": jnp.zeros((2, rows), dtype),
        "key_value_segment_ids": jnp.zeros((2, keys), dtype),
    }


def both_ways(f):
    """A result with its log-sum-exp, and what comes back from cotangents like these."""

    def g(*xs):
        outs, pull = jax.vjp(f, *xs)
        return outs, pull(outs)

    return g


def call_lines(text, name):
    """The lines of the calls, as (types of operands, types of results, attributes)."""
    found = []
    for line in text.splitlines():
        if f"@pk_jax_{name}(" in line:
            taken, given = line.rsplit(" : ", 1)[1].split(" -> ")
            types = [re.findall(r"tensor<([^>]*)>", part) for part in (taken, given)]
            found.append((*types, line))
    return found


# What the calls are given.


def test_call(can_run, lowered):
    text = lowered(functools.partial(pair, is_causal=True, implementation="cuda"), *shapes())
    ((taken, given, line),) = call_lines(text, "attention")
    assert taken == ["2x130x8x128xbf16", "2x200x2x128xbf16", "2x200x2x128xbf16"]
    assert given == ["2x130x8x128xbf16", "2x130x8xf32", "1xui32"]
    for attribute in (
        "left = -1 : i64",
        "right = 0 : i64",
        "num_blocks = 132 : i64",
        "scale = 0.0883883461 : f32",
        "soft_cap = 0.000000e+00 : f32",
        "segments = false",
        "starts = false",
    ):
        assert attribute in line
    assert "pad" not in text and "slice" not in text and "convert" not in text


def test_call_with_all_that_there_is(can_run, lowered):
    ids = ids_of(dtype="int8")
    f = functools.partial(pair, local_window_size=(7, 150), logits_soft_cap=30, scale=0.5, **ids)
    ((taken, given, line),) = call_lines(
        lowered(f, *shapes(width=80, dtype="float16")), "attention"
    )
    assert taken[:3] == ["2x130x8x128xf16", "2x200x2x128xf16", "2x200x2x128xf16"]
    assert taken[3:] == ["2x130xi32", "2x200xi32", "2x3x2xi32", "2x4x2xi32"]
    assert given == ["2x130x8x128xf16", "2x130x8xf32", "1xui32"]
    for attribute in ("left = 7 : i64", "right = 150 : i64", "scale = 5.000000e-01 : f32"):
        assert attribute in line
    assert "soft_cap = 3.000000e+01 : f32" in line and "segments = true" in line


def test_call_of_the_backward(can_run, lowered):
    """Result and residual of the kernel go into it."""
    text = lowered(both_ways(functools.partial(pair, is_causal=True)), *shapes(width=64))
    assert len(call_lines(text, "attention")) == 1
    ((taken, given, line),) = call_lines(text, "attention_backward")
    query, key = "2x130x8x64xbf16", "2x200x2x64xbf16"
    statistics, wide, turns = "2x8x192xf32", "2x130x8x64xf32", "49xui32"
    assert taken == [query, key, key, query, statistics, statistics]
    assert given == [wide, key, key, turns]
    assert "right = 0 : i64" in line and "num_blocks = 132 : i64" in line


def test_a_limit_that_reaches_everything_is_none(can_run, lowered):
    """So no row that sees nothing is looked for, and the kernel compares no positions."""
    f = functools.partial(pair, local_window_size=(129, 199))
    text = lowered(both_ways(f), *shapes())
    for line in text.splitlines():
        if "@pk_jax_attention" in line:
            assert "left = -1 : i64" in line and "right = -1 : i64" in line
    near = lowered(both_ways(functools.partial(pair, local_window_size=(128, 198))), *shapes())
    assert "left = 128 : i64" in near and "right = 198 : i64" in near


# Sizes, what is asked for, and the dtype of the result.
CASES = {
    "whole tiles": ({"rows": 64, "keys": 128, "width": 64}, {}, "bfloat16"),
    "filled up": ({"rows": 1, "width": 80}, {"right": 0, "soft_cap": 3.0}, "float32"),
    "value heads": ({"width": 130, "value_width": 100, "kv_heads": 1}, {"right": 0}, "float16"),
    "window": ({"rows": 90, "keys": 20}, {"left": 9, "right": 3, "scale": 0.7}, "bfloat16"),
    "one row past the window": ({"rows": 30, "keys": 20}, {"left": 9}, "bfloat16"),
    "segments": ({"rows": 130, "keys": 70, "segments": "sorted"}, {"right": 5}, "float16"),
    "any segments": ({"rows": 65, "keys": 200, "segments": "any"}, {"soft_cap": 2.0}, "float32"),
    "starts": ({"rows": 66, "keys": 50, "starts": True}, {"left": 70, "right": 0}, "float32"),
    "all": (
        {"rows": 67, "keys": 67, "starts": True, "segments": "any", "width": 8, "value_width": 3},
        {"left": 80, "right": 0, "soft_cap": 2.0, "scale": 0.5},
        "bfloat16",
    ),
}


def segment_ids(kind, rows, keys):
    """Of a few documents, which have gaps; of each side some that the other has not."""
    if kind is None:
        return {}
    rng = np.random.default_rng(0)
    found = [rng.integers(-3, 3, (2, n)).astype(np.int32) * 1000 for n in (rows, keys)]
    if kind == "sorted":
        found = [np.sort(x, 1) for x in found]
    return dict(zip(("query_segments", "key_segments"), found, strict=True))


def places_of(rows, keys, segments=None, starts=False):
    found = segment_ids(segments, rows, keys)
    if starts:
        found["query_starts"] = np.array([[40, 200], [7, 90]], np.int32)
        found["key_starts"] = np.array([[0, 100], [80, 60]], np.int32)
    return Places(**found)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_as_the_reference(case, monkeypatch):
    """Both calls, if they do what they promise, are the reference, forward and backward."""
    sizes, spec, dtype = case
    sizes = {"rows": 66, "keys": 70, "width": 64, "heads": 4} | sizes
    places = places_of(*(sizes[x] for x in ("rows", "keys")), sizes.pop("segments", None),
                       sizes.pop("starts", False))  # fmt: skip
    half = "float16" if dtype == "float16" else "bfloat16"
    xs = operands(batch=2, dtype=half, **sizes)
    spec = Spec(**({"scale": sizes["width"] ** -0.5} | spec))
    params = {"spec": spec, "dtype": np.dtype(dtype)}
    calls = Calls()
    monkeypatch.setattr(jax, "ffi", calls)
    widths = xs[0].shape[3], xs[2].shape[3]
    by_kernel = attention_call.heads_of(attention_call.BACKWARD_HEADS, *widths) is not None

    @jax.jit
    def both(*xs):
        got = attention_call.forward(*xs, places, **params, num_sms=5)
        want = reference.attention(*xs, places, **params)
        if not by_kernel:
            return (got, ()), (want, ())
        out, lse = want[0].astype(half), want[1]
        # What comes back where nothing was seen may be anything.
        empty = lse == -jnp.inf
        of_out = jnp.where(empty[..., None], jnp.inf, jnp.cos(3 * want[0])).astype(half)
        given = (*xs, out, lse, of_out, jnp.where(empty, jnp.nan, jnp.sin(lse)), places)
        found = attention_call.backward(*given, **params, num_sms=5)
        return (got, found), (want, reference.backward(*given, **params))

    got, want = both(*xs)
    limit = 1e-2 if half == "bfloat16" else 2e-3
    check_close(got[0][0], want[0][0], limit)
    check_close(got[0][1], want[0][1], 1e-5)
    check_close(got[1], want[1], 3 * limit)
    types = [[(x.shape, x.dtype) for x in jax.tree.leaves(each)] for each in (got, want)]
    assert types[0] == types[1]
    assert len(calls.attributes) == 1 + by_kernel
    for attributes in calls.attributes:
        assert attributes["num_blocks"] == 5 and attributes["scale"] == np.float32(spec.scale)


def test_starts_of_one_side(monkeypatch):
    """The other lies from position 0 on; without a mask by position nobody asks."""
    xs = operands(rows=5, keys=7, dtype="bfloat16")
    calls = Calls()
    monkeypatch.setattr(jax, "ffi", calls)
    places = Places(query_starts=np.array([[3, 90], [0, 2]], np.int32))
    for spec in (Spec(1.0, right=0), Spec(1.0)):
        params = {"spec": spec, "dtype": np.dtype("float32")}
        f = functools.partial(attention_call.forward, **params, num_sms=1)
        fs = f, functools.partial(reference.attention, **params)
        got, want = jax.jit(lambda *xs, fs=fs: [f(*xs, places) for f in fs])(*xs)
        check_close(got, want, 1e-2)
    assert [bool(x["starts"]) for x in calls.attributes] == [True, False]


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_bounds_of_segments(length):
    ids = np.random.default_rng(length).integers(-(2**31), 2**31, (3, length)).astype(np.int32)
    got = np.asarray(attention_call.bounds(jnp.asarray(ids)))
    want = [[(x.min(), x.max()) for x in np.split(row, range(64, length, 64))] for row in ids]
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, want)


def test_statistics_of_rows():
    rng = np.random.default_rng(0)
    out, of_out = (jnp.asarray(rng.standard_normal((2, 70, 3, 8)), jnp.bfloat16) for _ in "ab")
    lse, of_lse = (rng.standard_normal((2, 70, 3)).astype(np.float32) for _ in "ab")
    lse[:, 5] = -np.inf
    got, origin = map(np.asarray, attention_call.statistics(out, lse, of_out, of_lse))
    assert got.shape == origin.shape == (2, 3, 128)
    assert got.dtype == origin.dtype == np.float32
    assert np.all(got[:, :, [5, *range(70, 128)]] == np.inf) and not np.any(origin[:, :, 70:])
    np.testing.assert_allclose(np.exp2(got[:, 1, :5]), np.exp(lse[:, :5, 1]), rtol=1e-6)
    want = np.sum(np.float64(out) * np.float64(of_out), -1) - of_lse
    np.testing.assert_allclose(origin[:, :, :70], np.moveaxis(want, 1, 2), rtol=1e-5, atol=1e-5)


def test_unsigned_ids_stay_distinct(monkeypatch):
    xs = operands(rows=70, keys=70, dtype="bfloat16")
    ids = np.random.default_rng(0).choice(np.array([0, 5, 2**31, 2**32 - 1], np.uint32), (2, 70))
    places = Places(query_segments=jnp.asarray(ids), key_segments=jnp.asarray(ids))
    params = {"spec": Spec(0.3), "dtype": np.dtype("bfloat16")}
    monkeypatch.setattr(jax, "ffi", Calls())
    fs = functools.partial(attention_call.forward, num_sms=1), reference.attention
    got, want = jax.jit(lambda *xs: [f(*xs, places, **params) for f in fs])(*xs)
    check_close(got, want, 1e-2)


# When they are not made.


@pytest.mark.parametrize(
    "sizes, heads",
    [((1, 1), 64), ((64, 65), 128), ((80, 80), 128), ((129, 128), 192), ((192, 129), 256)],
)
def test_heads(sizes, heads):
    assert attention_call.heads_of(attention_call.HEADS, *sizes)[0] == heads
    backward = attention_call.heads_of(attention_call.BACKWARD_HEADS, *sizes)
    assert (backward[0] if backward else None) == (heads if heads <= 128 else None)


def why_not(
    spec=None, dtype=None, places=None, batch=2, cotangent=None, operands="bfloat16", **sizes
):
    """Of the forward, or of the backward with a cotangent."""
    xs = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in shapes(**sizes)]
    xs = [jax.ShapeDtypeStruct(x.shape, operands) for x in xs]
    params = {"spec": spec or Spec(1.0), "dtype": np.dtype(dtype or xs[0].dtype)}
    places = places or Places()
    if cotangent is None:
        return attention_call.why_not(*xs, places, **params)
    rows = jax.ShapeDtypeStruct(xs[0].shape[:3], np.float32)
    out = jax.ShapeDtypeStruct((*rows.shape, xs[2].shape[3]), cotangent)
    return attention_call.why_not_backward(*xs, out, rows, out, rows, places, **params)


def wide_ids(dtype):
    ids = np.zeros((2, 130), dtype)
    return Places(query_segments=ids, key_segments=ids)


@pytest.mark.parametrize(
    "case, text",
    [
        ({"dtype": "float32"}, None),
        ({"cotangent": "bfloat16", "dtype": "float32"}, None),
        ({"width": 256}, None),
        ({"places": wide_ids("uint32")}, None),
        ({"spec": Spec(1.0, precision="highest")}, None),
        ({"dtype": "float16"}, "bfloat16 to float16 has no CUDA attention; its results are in"),
        ({"dtype": "float64"}, "bfloat16 to float64 has no CUDA attention"),
        ({"width": 257}, r"heads of sizes \(257, 257\) have no .*hold \(256, 256\) at most"),
        ({"width": 64, "value_width": 300}, r"heads of sizes \(64, 300\) have no CUDA"),
        ({"width": 192, "cotangent": "bfloat16"}, r"CUDA attention_backward; .*\(128, 128\) at"),
        ({"cotangent": "float32"}, "a cotangent in float32 of operands in bfloat16 has no CUDA"),
        ({"spec": Spec(-1.0)}, "take a scale above 0, got -1.0; negate the query"),
        ({"spec": Spec(0.0), "cotangent": "bfloat16"}, "take a scale above 0, got 0.0"),
        ({"spec": Spec(1e-40)}, "take a scale of 1e-10 to 1000.0, got 1e-40, for the digits"),
        ({"spec": Spec(1e4)}, "take a scale of 1e-10 to 1000.0, got 10000.0"),
        ({"spec": Spec(1.0, soft_cap=1e5)}, "take a cap of 1e-06 to 10000.0, got 100000.0"),
        ({"spec": Spec(1.0, soft_cap=1e-13)}, "take a cap of 1e-06 to 10000.0, got 1e-13"),
        ({"places": wide_ids("int64")}, "segment ids in int64 do not fit 32 bits; convert"),
        ({"rows": 2**29}, "2 times 536870912 rows; the kernels count to 1073741823"),
        ({"keys": 2**29}, "2 times 536870912 rows; the kernels count to 1073741823"),
        ({"rows": 2**28, "heads": 512}, "4294967296 pieces of 64 rows in all heads"),
        ({"keys": 2**28, "heads": 512}, "4294967296 pieces of 64 rows in all heads"),
    ],
)
def test_why_not(case, text):
    reason = why_not(**case)
    assert reason is None if text is None else re.search(text, reason)


def test_sizes_that_are_symbols(can_run):
    """As jax.export of any batch has them: the reference, which does not count."""
    (batch,) = jax.export.symbolic_shape("b")
    xs = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in shapes()]
    reason = attention_call.why_not(*xs, Places(), spec=Spec(1.0), dtype=np.dtype("bfloat16"))
    assert reason is not None and "sizes that are known" in reason
    exported = jax.export.export(jax.jit(pair), platforms=["cuda"])(*xs)
    assert "pk_jax_attention" not in exported.mlir_module()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_why_not_other_operands(dtype):
    assert why_not(operands=dtype).startswith(f"dtype {dtype} has no CUDA attention; the kernels")


def test_paths(can_run, lowered, calls, caplog):
    """The forward is a kernel where the backward is not, and tangents never are."""
    _selection._logged.clear()
    with caplog.at_level(logging.INFO, logger="pk_jax"):
        text = lowered(both_ways(pair), *shapes(width=192, value_width=128))
        lowered(lambda *xs: jax.jvp(pair, xs, xs), *shapes())
        assert not calls(lowered(pair, *shapes(dtype="float32")))
    assert [call["op"] for call in calls(text)] == ["attention"]
    said = [record.message.split(";")[0] for record in caplog.records]
    assert said == [
        "attention_backward takes the reference: heads of sizes (192, 128) have no CUDA "
        "attention_backward",
        "attention_tangent takes the reference: the kernels of attention are its values and their "
        "cotangents, and tangents, as of jax.jvp, are jax.lax",
        "attention takes the reference: dtype float32 has no CUDA attention",
    ]


def test_asked_for_by_name(can_run, lowered, calls, mesh_of):
    f = functools.partial(pair, implementation="cuda")
    with pytest.raises(NotImplementedError, match=r"^attention: heads of sizes \(257, 257\)"):
        lowered(f, *shapes(width=257))
    # Of the op itself alone: its derivatives take what there is.
    assert len(calls(lowered(both_ways(f), *shapes(width=256)))) == 1
    assert not calls(lowered(f, *shapes(rows=0)))
    assert not calls(lowered(functools.partial(pair, implementation="reference"), *shapes()))
    sharding = NamedSharding(mesh_of(x=2), P("x"))
    parts = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in shapes()]
    with pytest.raises(NotImplementedError, match="partitions this program over several devices"):
        lowered(f, *parts)
    f = jax.shard_map(pair, mesh=mesh_of(x=2), in_specs=P("x"), out_specs=P("x"))
    assert [call["op"] for call in calls(lowered(both_ways(f), *parts))] == [
        "attention",
        "attention_backward",
    ]


def test_maps_are_more_heads_or_a_larger_batch(can_run, lowered):
    query, key, value = shapes()
    several = jax.ShapeDtypeStruct((3, *query.shape), query.dtype)
    text = lowered(jax.vmap(pair, (0, None, None)), several, key, value)
    ((taken, _, _),) = call_lines(text, "attention")
    assert taken[:2] == ["2x130x24x128xbf16", "2x200x2x128xbf16"]


@pytest.mark.parametrize("dtype, kernels", [("bfloat16", True), ("float32", False)])
def test_a_ring_of_kernels(dtype, kernels, can_run, lowered, mesh_of):
    """Parts are in fp32 and know where they are; no rank skips a hop, which a host would wait for.

    Ranks of the contiguous layout have nothing to do in some hops.
    """
    body = functools.partial(pk.ring_attention, axis_name="x", is_causal=True, return_residual=True)
    f = jax.shard_map(body, mesh=mesh_of(x=2), in_specs=P(None, "x"), out_specs=P(None, "x"))
    xs = shapes(rows=256, keys=256, dtype=dtype)
    text = lowered(both_ways(f), *xs)
    assert ("stablehlo.case" in text or "stablehlo.if" in text) is not kernels
    forward, backward = (call_lines(text, name) for name in ("attention", "attention_backward"))
    assert len(forward) == len(backward) == (2 if kernels else 0)
    for taken, given, line in forward:
        assert (
            given == ["2x128x8x128xf32", "2x128x8xf32", "1xui32"] and taken[3:] == ["2x2xi32"] * 2
        )
        assert "starts = true" in line and "right = 0 : i64" in line
    for taken, given, _ in backward:
        assert taken[3] == "2x128x8x128xbf16" and taken[6:] == ["2x2xi32"] * 2
        assert given[:3] == ["2x128x8x128xf32", "2x128x2x128xf32", "2x128x2x128xf32"]

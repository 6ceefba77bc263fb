"""pk.attention on a GPU: results, log-sum-exps and gradients by the kernels, against float64.

A program is one op forward and one backward. Before it runs, the memory that its results will lie
in is filled with NaN; it runs twice, to the same bits. Errors are bounded as a norm, for each row,
and for each element.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    MASKS,
    Sizes,
    any_ids,
    check_lse,
    check_rows,
    cotangents_of,
    given,
    operands,
    seen_by,
)
from attention_models import dense, mask
from jax import lax
from product_models import poison

import pk_jax as pk
from pk_jax._primitives import attention as primitives
from pk_jax._primitives import attention_call
from pk_jax._reference import attention as reference
from pk_jax._reference.attention import Places, Spec
from pk_jax.config import Config

pytestmark = pytest.mark.needs_gpus(1)

# Relative norms of what rounding does to results, and to gradients, whose weights are rounded.
LIMITS = {"bfloat16": (6e-3, 8e-3), "float16": (8e-4, 1.2e-3)}


@pytest.fixture(scope="module", autouse=True)
def _on_gpu():
    with jax.default_device(jax.devices("cuda")[0]):
        yield


def compiled(arguments, *args):
    """Forward and backward in one program, each by its kernel if there is one."""

    def run(xs, ids, cotangents):
        segments = dict(zip(("query_segment_ids", "key_value_segment_ids"), ids, strict=False))
        f = functools.partial(pk.attention, return_residual=True, implementation="cuda")
        outs, pull = jax.vjp(lambda *xs: f(*xs, **segments, **arguments), *xs)
        return outs, pull(cotangents)

    lowered = jax.jit(run).lower(*args)
    widths = args[0][0].shape[3], args[0][2].shape[3]
    there_is = attention_call.heads_of(attention_call.BACKWARD_HEADS, *widths) is not None
    assert lowered.as_text().count("@pk_jax_attention(") == 1
    assert lowered.as_text().count("@pk_jax_attention_backward(") == int(there_is)
    return lowered.compile()


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def check(sizes, arguments, factor=1.0, limits=None):
    """Runs one case and compares all of it; returns what came out."""
    xs = operands(sizes, factor=factor)
    arguments, ids, means = given(sizes, arguments)
    cotangents = cotangents_of(xs[0], xs[2])
    args = jax.device_put((xs, ids, cotangents))
    program = compiled(arguments, *args)
    poison(jax.tree.leaves(program.out_info))
    found = jax.block_until_ready(program(*args))
    again = program(*args)
    assert bits(found) == bits(again), "another result in the second run"
    want = dense(*xs, **means, cotangents=cotangents)
    of_value, of_gradient = limits or LIMITS[sizes.dtype]
    check_rows("out", found[0][0], want[0][0], of_value)
    check_lse(found[0][1], want[0][1], means["cap"])
    for name, got, wanted in zip(("dq", "dk", "dv"), found[1], want[1], strict=True):
        check_rows(name, got, wanted, of_gradient)
    return found, means["seen"]


# Lengths of query and keys, and the rest of the sizes in turn.
LENGTHS = {
    (1, 1): Sizes(width=64, groups=1),
    (1, 1000): Sizes(width=128, groups=4, batch=1),
    (63, 129): Sizes(width=64, groups=4, dtype="float16"),
    (65, 63): Sizes(width=128, groups=1),
    (127, 128): Sizes(width=128, groups=2, dtype="float16"),
    (129, 127): Sizes(width=64, groups=2, batch=3),
    (128, 64): Sizes(width=128, heads=8, groups=8),
    (300, 1): Sizes(width=64, groups=2, dtype="float16"),
    (200, 513): Sizes(width=64, heads=6, groups=3, batch=1),
    (1000, 1000): Sizes(width=128, batch=1),
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda x: f"{x[0]}x{x[1]}")
def test_lengths_and_masks(lengths, name):
    sizes = LENGTHS[lengths]._replace(rows=lengths[0], keys=lengths[1])
    check(sizes, MASKS[name])


def test_the_mask_is_that_of_other_tests():
    sizes = Sizes(rows=9, keys=7)
    for name, arguments in MASKS.items():
        arguments, ids, means = given(sizes, arguments)
        asked = {k: v for k, v in arguments.items() if "c" in k and "scale" not in k}
        asked.pop("logits_soft_cap", None)
        want = mask(9, 7, **asked, query_ids=(ids or [None])[0], key_ids=(ids or [None])[-1])
        np.testing.assert_array_equal(means["seen"], want, err_msg=name)


HEADS = (
    (64, 64),
    (128, 128),
    (192, 128),
    (256, 256),
    (80, 80),
    (96, 96),
    (8, 3),
    (64, 128),
    (130, 128),
    (200, 250),
)


@pytest.mark.parametrize("name", ["whole", "documents"])
@pytest.mark.parametrize("widths", HEADS, ids=lambda x: f"{x[0]}and{x[1]}")
def test_heads(widths, name):
    """Those that were compiled, and what is filled up to them; larger ones have no backward."""
    dtype = "float16" if name == "whole" else "bfloat16"
    check(Sizes(width=widths[0], value_width=widths[1], dtype=dtype), MASKS[name])


@pytest.mark.parametrize("heads, groups", [(1, 1), (5, 5), (12, 4), (16, 16)])
def test_heads_that_share_keys(heads, groups):
    check(Sizes(heads=heads, groups=groups, rows=70, keys=130, width=64), MASKS["causal"])


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("name", ["whole", "causal"])
def test_several_tiles_of_every_kind(width, name):
    """More tiles than SMs, so that blocks take several."""
    check(Sizes(rows=700, keys=900, heads=16, groups=2, width=width), MASKS[name])


@pytest.mark.parametrize(
    "left, right, width", [(0, 0, 64), (63, 0, 128), (64, 64, 64), (1, 130, 128), (400, 5, 128)]
)
def test_windows(left, right, width):
    """Edges of tiles; a query far past the keys sees none."""
    sizes = Sizes(rows=500, keys=260, width=width, batch=1)
    check(sizes, {"local_window_size": (left, right)})


@pytest.mark.parametrize(
    "cap, scale, width", [(0.5, 1.0, 64), (30.0, 0.3, 128), (None, 1e-3, 128), (None, 2.0, 64)]
)
def test_caps_and_scales(cap, scale, width):
    sizes = Sizes(rows=130, keys=70, width=width, dtype="float16")
    arguments = {"is_causal": True, "logits_soft_cap": cap, "scale": scale}
    # Under a scale of 2 most rows have one weight of almost 1, and gradients of a rounding's size.
    check(sizes, arguments, limits=(1e-3, 1e-2) if scale * (cap is None) > 1 else None)


@pytest.mark.parametrize(
    "name, width",
    [
        ("whole", 64),
        ("causal", 128),
        ("any segments", 64),
        ("any segments", 128),
        ("causal", 192),
        ("any segments", 256),
    ],
)
def test_rows_that_see_nothing(name, width):
    """Zero, -inf, and gradients of zero; whole tiles of them, and some rows between others."""

    def ids(length, batch, seed):
        found = (
            any_ids(length, batch, seed) if name == "any segments" else np.zeros((batch, length))
        )
        found = found.astype(np.int32)
        if seed == 0:
            found[:, 3:5], found[0, 64:200] = 1000, -1000
        return found

    sizes = Sizes(rows=260, keys=150, width=width)
    arguments = MASKS[name] | {"ids": ids, "logits_soft_cap": None}
    ((out, lse), (of_query, *others)), seen = check(sizes, arguments)
    empty = ~seen.any(-1)
    assert empty[:, 3:5].all() and empty[0, 64:200].all()
    assert not np.asarray(out, np.float32)[empty].any()
    assert (np.asarray(lse)[empty] == -np.inf).all()
    assert not np.asarray(of_query, np.float32)[empty].any()
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in others)


def test_what_comes_back_to_rows_that_see_nothing_may_be_infinite():
    sizes = Sizes(rows=130, keys=70, width=64)
    xs = operands(sizes)
    ids = np.zeros((2, 130), np.int32), np.zeros((2, 70), np.int32)
    ids[0][:, ::3] = 5

    def loss(*xs):
        segments = {"query_segment_ids": ids[0], "key_value_segment_ids": ids[1]}
        out, lse = pk.attention(*xs, return_residual=True, implementation="cuda", **segments)
        return jnp.sum(out[:, ::3].astype(jnp.float32) * lse[:, ::3, :, None])

    found = jax.jit(jax.grad(loss, (0, 1, 2)))(*xs)
    assert not any(np.asarray(x, np.float32).any() for x in found)


def test_nothing_to_see_at_all():
    """No id is on both sides."""

    def ids(length, batch, seed):
        return np.full((batch, length), seed, np.int32)

    found, _ = check(Sizes(width=64), {"ids": ids})
    (out, _), of_operands = found
    assert not any(np.asarray(x, np.float32).any() for x in (out, *of_operands))


@pytest.mark.parametrize("width", [64, 128, 192])
@pytest.mark.parametrize("name", ["whole", "causal"])
def test_large_logits(name, width):
    """A hundred times as large, far past what exp has room for: the largest takes almost all."""
    sizes = Sizes(rows=130, keys=200, width=width)
    xs = operands(sizes, factor=100)
    arguments, _, means = given(sizes, MASKS[name])
    program = compiled(arguments, xs, (), cotangents_of(xs[0], xs[2]))
    (out, lse), found = program(jax.device_put(xs), (), cotangents_of(xs[0], xs[2]))
    want = dense(*xs, **means)
    check_rows("out", out, want[0], 6e-3)
    check_lse(lse, want[1])
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in found)


def bound(primitive, operands, places, spec, dtype=np.float32):
    given, arrays = primitives.present(places)
    return primitive.bind(
        *operands,
        *arrays,
        spec=spec,
        dtype=np.dtype(dtype),
        given=given,
        implementation="cuda",
        config=Config(),
    )


@pytest.mark.parametrize(
    "layout, ranks, left, width",
    [
        ("contiguous", 3, None, 64),
        ("contiguous", 3, 90, 128),
        ("zigzag", 2, None, 128),
        ("zigzag", 4, None, 64),
        ("zigzag", 4, 90, 128),
    ],
)
def test_the_parts_of_a_ring(layout, ranks, left, width):
    """All parts of all ranks, one after the other: in fp32, merged and added as a ring does."""
    length, half = 74, 37
    sizes = Sizes(rows=ranks * length, keys=ranks * length, width=width)
    xs = operands(sizes)
    spec = Spec(width**-0.5, left=left, right=0)
    before = np.arange(sizes.rows)[:, None] - np.arange(sizes.keys)
    seen = (before >= 0) & (left is None or before <= left)
    cotangents = cotangents_of(xs[0], xs[2])
    want = dense(*xs, seen[None], cotangents=cotangents)

    def starts(rank):
        return np.broadcast_to(np.array(reference.starts(layout, rank, length, ranks)), (2, 2))

    def part(x, rank):
        first, second = starts(rank)[0]
        return np.concatenate([x[:, first : first + half], x[:, second : second + half]], 1)

    forward = jax.jit(
        lambda xs, places: bound(primitives.FAMILY.forward, xs, Places(*places), spec)
    )
    backward = jax.jit(
        lambda xs, places: bound(primitives.FAMILY.backward, xs, Places(*places), spec)
    )
    assert "@pk_jax_attention_backward(" in backward.lower(
        [*(part(x, 0) for x in xs), part(want[0][0], 0).astype(sizes.dtype),
         part(want[0][1], 0).astype(np.float32), *(part(x, 0) for x in cotangents)],
        (starts(0).astype(np.int32),) * 2,
    ).as_text()  # fmt: skip
    of_keys = [[0.0, 0.0] for _ in range(ranks)]
    for rank in range(ranks):
        query = part(xs[0], rank)
        places = [
            (starts(rank).astype(np.int32), starts(source).astype(np.int32))
            for source in range(ranks)
        ]
        keys = [[part(x, source) for x in xs[1:]] for source in range(ranks)]
        out, lse = forward([query, *keys[0]], places[0])
        assert out.dtype == lse.dtype == np.float32
        for source in range(1, ranks):
            out, lse = reference.merge(out, lse, *forward([query, *keys[source]], places[source]))
        check_rows(f"out of {rank}", out, part(want[0][0], rank), LIMITS["bfloat16"][0])
        check_lse(lse, part(want[0][1], rank))
        of_rows = [part(x, rank) for x in cotangents]
        given = (np.asarray(out).astype(sizes.dtype), np.asarray(lse), *of_rows)
        of_query = 0.0
        for source in range(ranks):
            found = backward([query, *keys[source], *given], places[source])
            assert {x.dtype.name for x in found} == {"float32"}
            of_query = of_query + np.asarray(found[0], np.float64)
            for so_far, x in enumerate(found[1:]):
                of_keys[source][so_far] = of_keys[source][so_far] + np.asarray(x, np.float64)
        check_rows(f"dq of {rank}", of_query, part(want[1][0], rank), LIMITS["bfloat16"][1])
    for rank, found in enumerate(of_keys):
        for name, got, whole in zip(("dk", "dv"), found, want[1][1:], strict=True):
            check_rows(f"{name} of {rank}", got, part(whole, rank), LIMITS["bfloat16"][1])


# In programs.


def layers(implementation, remat, x, weights):
    def layer(x, weight):
        y = jnp.einsum("btnd,de->btne", x, weight)
        y = pk.attention(y, x, y, is_causal=True, implementation=implementation)
        return (x + y) / 2, None

    layer = jax.checkpoint(layer) if remat else layer
    y, _ = lax.scan(layer, x, weights)
    return jnp.sum(jnp.sin(y.astype(jnp.float32)))


@pytest.mark.parametrize("remat", [False, True], ids=("kept", "again"))
def test_scan_and_remat(remat):
    x, *_ = operands(Sizes(rows=150, groups=1, width=64))
    weights = np.random.default_rng(0).standard_normal((4, 64, 64), np.float32) / 8
    weights = weights.astype(x.dtype)

    def value_and_grad(implementation):
        f = functools.partial(layers, implementation, remat)
        return jax.jit(jax.value_and_grad(f, (0, 1)))

    found = value_and_grad(None)
    assert "@pk_jax_attention_backward(" in found.lower(x, weights).as_text()
    got = found(x, weights)
    assert bits(got) == bits(found(x, weights))
    want = value_and_grad("reference")(x, weights)
    assert abs(float(got[0] - want[0])) <= 2e-3 * x.size**0.5
    for one, other in zip(got[1], want[1], strict=True):
        one, other = (np.asarray(each, np.float32) for each in (one, other))
        assert np.linalg.norm(one - other) <= 2e-2 * np.linalg.norm(other)


@pytest.mark.parametrize("mapped", [(0, None, None), (1, 0, 2)], ids=("query", "all"))
def test_vmap(mapped):
    sizes = Sizes(rows=70, keys=90, width=64)
    several = [operands(sizes, seed=seed) for seed in range(3)]
    xs = [
        several[0][i] if d is None else np.stack([each[i] for each in several], d)
        for i, d in enumerate(mapped)
    ]
    f = functools.partial(pk.attention, is_causal=True, implementation="cuda")
    got = jax.jit(jax.vmap(f, mapped))(*xs)
    for index in range(3):
        one = [several[0 if d is None else index][i] for i, d in enumerate(mapped)]
        want, _ = dense(*one, seen_by(sizes, (), is_causal=True))
        check_rows(f"element {index}", got[index], want, LIMITS["bfloat16"][0])


def test_inside_shard_map():
    """On all GPUs, each its own batch."""
    devices = jax.devices("cuda")
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    spec = jax.sharding.PartitionSpec("x")
    sizes = Sizes(batch=2 * len(devices), width=64)
    xs = operands(sizes)
    cotangents = cotangents_of(xs[0], xs[2])

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=spec, out_specs=spec)
    def run(*args):
        f = functools.partial(pk.attention, is_causal=True, return_residual=True)
        outs, pull = jax.vjp(functools.partial(f, implementation="cuda"), *args[:3])
        return outs, pull(args[3:])

    outs, found = run(*xs, *cotangents)
    seen = seen_by(sizes, (), is_causal=True)
    want = dense(*xs, seen, cotangents=cotangents)
    check_rows("out", outs[0], want[0][0], LIMITS["bfloat16"][0])
    for got, wanted in zip(found, want[1], strict=True):
        check_rows("gradient", got, wanted, LIMITS["bfloat16"][1])


def test_wide_ids_and_ids_of_few_bits():
    """int8 and uint32 of any size are the kernel's; the result is that of int32."""
    sizes = Sizes(width=64, batch=1)
    xs = operands(sizes)
    ids = [any_ids(n, 1, seed=i) + 2 for i, n in enumerate(sizes[:2])]
    f = functools.partial(pk.attention, implementation="cuda")

    def run(*ids):
        return np.asarray(
            jax.jit(f)(*xs, query_segment_ids=ids[0], key_value_segment_ids=ids[1]), np.float32
        )

    want = run(*ids)
    np.testing.assert_array_equal(run(*(x.astype(np.int8) for x in ids)), want)
    np.testing.assert_array_equal(run(*(x.astype(np.uint32) * 2**29 for x in ids)), want)


def test_refusals_name_the_reason():
    x: Any = jnp.ones((1, 8, 2, 64))
    with pytest.raises(NotImplementedError, match="float32 has no CUDA attention"):
        pk.attention(x, x, x, implementation="cuda")

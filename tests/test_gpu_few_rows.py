"""The kernel of products of few rows, summed: ranks as streams, and two GPUs under XLA.

Operands of ranks as streams are small integers, whose products fp32 adds up exactly in any order,
as in test_gpu_matmul_reduce.py: the result is known bit by bit, whoever adds up what. Results and
scratch start poisoned, mailboxes hold what calls before have left, and calls follow each other on
one channel.
"""

import functools
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from two_gpus import draw, on_two_gpus
from virtual_ranks import as_bytes, in_rank_order, plan_words, poisoned

import pk_jax as pk
from pk_jax._primitives.few_rows_call import call
from pk_jax._tuning import few_rows_model as model
from pk_jax._tuning import matmul_model
from pk_jax._tuning.hardware import H200, lookup

pytestmark = pytest.mark.needs_gpus(1)

RANKS = (2, 3, 4, 8)
OPS = (False, True)  # all_reduce
PROTOCOLS = ("ll", "simple")
# Rows, k, p: one of everything; rows that end within a strip, or a consumer's half; columns that
# end within a tile or a vector; one step of k, and many; more tiles than blocks.
SHAPES = (
    (1, 8, 8),
    (1, 512, 8192),
    (7, 100, 77),
    (8, 64, 64),
    (9, 1000, 130),
    (32, 640, 1030),
    (33, 320, 2056),
    (64, 576, 320),
    (65, 192, 264),
    (100, 1024, 520),
    (127, 320, 1001),
    (128, 256, 640),
)


@pytest.fixture(scope="module", params=RANKS, ids=lambda n: f"{n}-ranks")
def ranks(request):
    ffi = pytest.importorskip("pk_jax._ffi")
    devices = [device.local_hardware_id for device in jax.devices("cuda")]
    return ffi.VirtualRanks(request.param, devices, 20.0)


def _plans(ranks, m, k, p, most=132):
    """The plans of the product for a rank's share of the SMs: whole, and split in each way."""
    share = max(1, most // ranks.num_ranks)
    tile = matmul_model.Tile(128, 64, 1e12)
    return list(matmul_model.candidates_of(tile, m, p, k, share))


def _padded(x):
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 8)])


def _run(
    ranks,
    shape,
    protocol="ll",
    plan=None,
    all_reduce=True,
    transpose_w=False,
    dtype="bfloat16",
    calls=3,
    seed=0,
    **kwargs,
):
    """Random operands through `calls` calls; every bit of the results compared.

    Rows are made a multiple of the ranks where they are scattered; a size that the protocol has no
    room for is left out.
    """
    n, (m, k, p), dtype = ranks.num_ranks, shape, jnp.dtype(dtype)
    if not all_reduce:
        m = max(n, m // n * n)
    if p > model.most_cols(H200, m, n, all_reduce, protocol):
        return None
    plan = plan or _plans(ranks, m, k, p)[0]
    rng = np.random.default_rng(seed)
    x = rng.integers(-8, 9, (calls, n, m, k), np.int8).astype(np.float32)
    w = rng.integers(-8, 9, (calls, n, k, p), np.int8).astype(np.float32)
    lying = w.swapaxes(-1, -2) if transpose_w else w
    operands = [as_bytes(_padded(y.astype(dtype))) for y in (x, lying)]
    kept = m if all_reduce else m // n
    results = poisoned(calls, n, 2 * kept * (p + -p % 8))
    ranks.few_rows(
        np.concatenate(operands, axis=-1),
        results,
        plan_words([("register", protocol, plan.num_blocks)]),
        m=m,
        k=k,
        p=p,
        dtype=dtype.name,
        transpose_w=transpose_w,
        all_reduce=all_reduce,
        split_tiles=plan.split_tiles,
        split=plan.split,
        **kwargs,
    )
    got = results.view(dtype).reshape(calls, n, kept, -1)[..., :p]
    want = in_rank_order((x @ w).astype(dtype), "sum", dtype)  # [calls, m, p]
    shape = (calls, n, kept, p)
    want = np.broadcast_to(want[:, None], shape) if all_reduce else want.reshape(shape)
    np.testing.assert_array_equal(got.view(np.uint16), np.ascontiguousarray(want).view(np.uint16))
    return results


@pytest.mark.parametrize("all_reduce", OPS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(ranks, shape, protocol, all_reduce):
    """Each plan that the product may have."""
    m, k, p = shape
    calls = 3 if k * p < 1 << 20 else 1
    for seed, plan in enumerate(_plans(ranks, m, k, p)):
        _run(ranks, shape, protocol, plan, all_reduce, calls=calls, seed=seed)
    _run(ranks, shape, protocol, None, all_reduce, transpose_w=True, calls=calls, seed=9)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("transpose_w", (False, True))
def test_float16(ranks, protocol, transpose_w):
    for all_reduce in OPS:
        _run(ranks, (40, 264, 200), protocol, None, all_reduce, transpose_w, "float16")


def test_random_shapes(ranks):
    """Any rows up to 128, odd k and p, either protocol, op and way of w, any plan."""
    rng = np.random.default_rng(ranks.num_ranks)
    for seed in range(60):
        shape = tuple(int(rng.integers(1, most)) for most in (129, 700, 900))
        plans = _plans(ranks, *shape[:1], *shape[1:], most=int(rng.integers(16, 133)))
        _run(
            ranks,
            shape,
            PROTOCOLS[int(rng.integers(2))],
            plans[int(rng.integers(len(plans)))],
            all_reduce=bool(rng.integers(2)),
            transpose_w=bool(rng.integers(2)),
            calls=2,
            seed=seed,
        )


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_few_blocks(ranks, protocol):
    """Many tiles a block: each leaves before the one before it is summed."""
    for blocks in (1, 2, 5):
        plan = matmul_model.Plan("128x64", blocks, 0, 1, 0.0)
        for all_reduce in OPS:
            _run(ranks, (24, 200, 1500), protocol, plan, all_reduce, seed=blocks)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_reruns_are_bit_equal(ranks, protocol):
    first = _run(ranks, (13, 768, 520), protocol, seed=5)
    for _ in range(3):
        np.testing.assert_array_equal(first, _run(ranks, (13, 768, 520), protocol, seed=5))


def test_takes_turns_on_a_channel(ranks):
    """Protocols, ops, grids and sums in turn: one finds mailboxes, flags and epochs of another."""
    n, rng = ranks.num_ranks, np.random.default_rng(2)
    for seed in range(12):
        shape = tuple(int(rng.integers(1, most)) for most in (129, 500, 700))
        protocol = PROTOCOLS[seed % 2]
        _run(ranks, shape, protocol, all_reduce=seed % 3 > 0, seed=seed, channel=3, calls=2)
        values = rng.standard_normal((2, n, 3_000)).astype(np.float32)
        results = poisoned(*as_bytes(values).shape)
        ranks.reduce(
            as_bytes(values),
            results,
            plan_words([("register", ("ll", "simple")[seed // 2 % 2], 3)]),
            dtype="float32",
            reduction="sum",
            algorithms=["one_shot"],
            channel=3,
        )
        want = in_rank_order(values, "sum", np.dtype(np.float32))[:, None]
        np.testing.assert_array_equal(results, as_bytes(np.broadcast_to(want, values.shape)))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_absent_rank_is_named(protocol):
    """In a process of its own: the trap costs the CUDA context."""
    program = f"""
        import numpy as np
        from pk_jax import _ffi
        ranks = _ffi.VirtualRanks(3, [0], 2.0)
        operands = np.zeros((1, 3, 2 * 16 * 64 + 2 * 64 * 64), np.uint8)
        results = np.zeros((1, 3, 2 * 16 * 64), np.uint8)
        try:
            ranks.few_rows(operands, results, [("register", "{protocol}", [1])], absent=[1], m=16,
                           k=64, p=64, all_reduce=True)
        except RuntimeError as error:
            print(error)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    assert "matmul_all_reduce on rank" in run.stdout, run.stdout + run.stderr
    assert "for rank 1 to" in run.stdout


# Under XLA, on two GPUs

TWO = pytest.mark.needs_gpus(2)


def _fused(x, w, *, protocol=None, channel=0, all_reduce=True):
    devices = jax.devices("cuda")[:2]
    (m, k), p = x.shape, w.shape[1]
    site = {
        "groups": np.array([0, 1], np.int64),
        "devices": np.array([d.id for d in devices], np.int64),
        "group_size": np.int64(2),
        "channel": np.int64(channel),
    }
    hardware = lookup(devices[0].device_kind)
    plan = model.choose(hardware, m, p, k, 2, all_reduce=all_reduce, protocol=protocol)
    return call(x, w, site=site, plan=plan, transpose_w=False, all_reduce=all_reduce)


@TWO
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "shape", ((1, 3584, 8192), (32, 3584, 8192), (30, 200, 132), (16, 512, 1024)), ids=str
)
def test_two_gpus(shape, protocol):
    """Normal numbers, against the product in fp32; two runs of other operands between two equal."""
    m, k, p = shape
    mesh, program = on_two_gpus(
        lambda x, w: _fused(x, w, protocol=protocol)[None], (P(None, "x"), P("x")), P("x")
    )
    operands = [
        (draw(mesh, P(None, "x"), (m, 2 * k), seed), draw(mesh, P("x"), (2 * k, p), seed + 1))
        for seed in (0, 2)
    ]
    results = [np.asarray(program(*pair)) for pair in (*operands, *operands)]
    for got, again, (x, w) in zip(results[:2], results[2:], operands, strict=True):
        np.testing.assert_array_equal(got.view(np.uint16), again.view(np.uint16))
        np.testing.assert_array_equal(got[0].view(np.uint16), got[1].view(np.uint16))
        want = np.asarray(x, np.float32) @ np.asarray(w, np.float32)
        error = np.linalg.norm(got[0].astype(np.float32) - want) / np.linalg.norm(want)
        assert error <= 5e-3, error  # of three roundings; false for NaN


@TWO
@pytest.mark.parametrize("m", (2, 32, 128))
def test_ops_choose_it(m):
    """The public functions, forced to it, against the reference."""
    config = pk.Config(schedule="intra_sm", tile=model.TILE)
    for op, out in ((pk.matmul_all_reduce, P()), (pk.matmul_reduce_scatter, P("x"))):
        forced = functools.partial(op, axis_name="x", config=config, implementation="cuda")
        mesh, program = on_two_gpus(forced, (P(None, "x"), P("x")), out)
        _, plain = on_two_gpus(
            functools.partial(op, axis_name="x", implementation="reference"),
            (P(None, "x"), P("x")),
            out,
        )
        x = draw(mesh, P(None, "x"), (m, 2 * 1000), 0)
        w = draw(mesh, P("x"), (2 * 1000, 1032), 1)
        assert "few_rows" in program.lower(x, w).as_text()
        got, want = (np.asarray(f(x, w), np.float32) for f in (program, plain))
        assert np.linalg.norm(got - want) <= 5e-3 * np.linalg.norm(want)


@TWO
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_repeated_in_a_scan(protocol):
    """The body is captured into a graph and replayed; two calls in it, on channels of their own."""
    m, k = 24, 1024

    def f(x, w, v):
        def step(x, _):
            y = _fused(x, w, channel=1, protocol=protocol) / jnp.bfloat16(64)
            z = _fused(y, v, channel=2, protocol=protocol) / jnp.bfloat16(64)
            return z, z.astype(jnp.float32).sum()

        return lax.scan(step, x, None, length=40)[0][None]

    mesh, program = on_two_gpus(f, (P(None, "x"), P("x"), P("x")), P("x"))
    x, w = draw(mesh, P(None, "x"), (m, 2 * k), 0), draw(mesh, P("x"), (2 * k, k), 1)
    v = draw(mesh, P("x"), (2 * k, k), 2)
    first = np.asarray(program(x, w, v))
    assert np.isfinite(first.astype(np.float32)).all() and first.astype(np.float32).any()
    np.testing.assert_array_equal(first[0], first[1])  # the sum, on both
    for _ in range(3):
        np.testing.assert_array_equal(first, np.asarray(program(x, w, v)))

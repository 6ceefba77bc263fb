"""matmul_reduce_scatter's and matmul_all_reduce's kernel: ranks as streams, and two GPUs under XLA.

Operands of ranks as streams are small integers, whose products fp32 adds up exactly in any order.
So the result is known bit by bit: onto the owner's partial the others', rounded, are added in rank
order in fp32, and the sum is rounded. Results and scratch start poisoned, and calls follow each
other on one channel.
"""

import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from two_gpus import draw, on_two_gpus
from virtual_ranks import as_bytes, in_rank_order, plan_words, poisoned

from pk_jax._primitives.matmul_reduce_call import call
from pk_jax._tuning import matmul_reduce_model as model
from pk_jax._tuning.hardware import lookup

pytestmark = pytest.mark.needs_gpus(1)

RANKS = (2, 3, 4, 8)
OPS = (False, True)  # all_reduce
# Rows of a rank, k, p: whole tiles; rows and columns that end within one; many steps and few, down
# to one; one of everything; sizes that are not whole vectors; many tiles for each block.
SHAPES = (
    (256, 512, 512),
    (200, 320, 300),
    (130, 64, 256),
    (16, 1024, 264),
    (1, 8, 8),
    (3, 100, 77),
    (129, 200, 1000),
    (640, 72, 776),
)


@pytest.fixture(scope="module", params=RANKS, ids=lambda n: f"{n}-ranks")
def ranks(request):
    ffi = pytest.importorskip("pk_jax._ffi")
    devices = [device.local_hardware_id for device in jax.devices("cuda")]
    return ffi.VirtualRanks(request.param, devices, 20.0)


def _padded(x):
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 8)])


def _sums(partials, dtype):
    """What each rank would make of all rows of [calls, ranks, m, p]: [calls, owners, m, p]."""
    rounded = partials.astype(dtype).astype(np.float32)
    sums = partials.copy()
    for owner in range(sums.shape[1]):
        for rank in range(sums.shape[1]):
            if rank != owner:
                sums[:, owner] += rounded[:, rank]
    return sums.astype(dtype)


def _run(
    ranks,
    shape,
    *blocks,
    all_reduce=False,
    transpose_w=False,
    dtype="bfloat16",
    rows=None,
    outer=1,
    calls=3,
    seed=0,
    **kwargs,
):
    """Random operands through `calls` calls; every bit of the results compared."""
    n, (m, k, p), dtype = ranks.num_ranks, shape, jnp.dtype(dtype)
    m = rows or outer * n * m
    rng = np.random.default_rng(seed)
    x = rng.integers(-8, 9, (calls, n, m, k)).astype(np.float32)
    w = rng.integers(-8, 9, (calls, n, k, p)).astype(np.float32)
    lying = w.swapaxes(-1, -2) if transpose_w else w
    operands = [as_bytes(_padded(y.astype(dtype))) for y in (x, lying)]
    kept = m if all_reduce else m // n
    results = poisoned(calls, n, 2 * kept * (p + -p % 8))
    ranks.matmul_reduce(
        np.concatenate(operands, axis=-1),
        results,
        plan_words([("tma", "simple", *blocks)]),
        m=m,
        k=k,
        p=p,
        dtype=dtype.name,
        transpose_w=transpose_w,
        all_reduce=all_reduce,
        outer=outer,
        **kwargs,
    )
    got = results.view(dtype).reshape(calls, n, kept, -1)[..., :p]
    want = _sums(x @ w, dtype)  # [calls, owners, m, p]
    if all_reduce:
        owner = np.minimum(np.arange(m) // (-(-m // (n * 128)) * 128), n - 1)
        want = np.broadcast_to(want[:, owner, np.arange(m)][:, None], got.shape)
    else:  # each rank's share of the rows of each matrix
        want = want.reshape(calls, n, outer, n, -1, p)
        want = np.stack([want[:, r, :, r] for r in range(n)], 1).reshape(calls, n, kept, p)
    np.testing.assert_array_equal(got.view(np.uint16), np.ascontiguousarray(want).view(np.uint16))
    return results


@pytest.mark.parametrize("all_reduce", OPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(ranks, shape, all_reduce):
    _run(ranks, shape, all_reduce=all_reduce)
    _run(ranks, shape, all_reduce=all_reduce, transpose_w=True, seed=1, lead=2)


@pytest.mark.parametrize("outer, m", [(2, 256), (5, 128)])
def test_several_matrices(ranks, outer, m):
    _run(ranks, (m, 192, 520), outer=outer)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("transpose_w", (False, True))
def test_types(ranks, dtype, transpose_w):
    for all_reduce in OPS:
        _run(ranks, (190, 264, 520), all_reduce=all_reduce, dtype=dtype, transpose_w=transpose_w)


@pytest.mark.parametrize("all_reduce", OPS)
def test_any_number_of_blocks(ranks, all_reduce):
    """One block, two, more than there are tiles; the same on each rank."""
    most = 132 // ranks.num_ranks
    for blocks in (1, 2, 5, most):
        _run(ranks, (300, 320, 600), blocks, all_reduce=all_reduce, calls=2, lead=blocks)
    _run(ranks, (64, 64, 300), most, all_reduce=all_reduce)


@pytest.mark.parametrize("steps", (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64))
def test_any_number_of_steps(ranks, steps):
    """Tiles leave under the next one's steps, however few those are."""
    for all_reduce in OPS:
        _run(ranks, (256, 64 * steps, 512), 3, all_reduce=all_reduce, calls=2, seed=steps)


def test_rows_that_ranks_share_unevenly(ranks):
    """An all_reduce cuts any number of rows; the last ranks may have none to add up."""
    for rows in (1, 7, 127, 129, 300, 1000):
        _run(ranks, (0, 136, 264), all_reduce=True, rows=rows, calls=2, seed=rows)


@pytest.mark.parametrize("all_reduce", OPS)
def test_many_tiles(ranks, all_reduce):
    _run(ranks, (1024, 256, 2048), all_reduce=all_reduce, calls=2)


def test_most_ranks():
    ffi = pytest.importorskip("pk_jax._ffi")
    devices = [device.local_hardware_id for device in jax.devices("cuda")]
    ranks = ffi.VirtualRanks(model.MOST_RANKS, devices, 20.0)
    for all_reduce in OPS:
        _run(ranks, (130, 448, 520), all_reduce=all_reduce, calls=2)


def test_reruns_are_bit_equal(ranks):
    for all_reduce in OPS:
        first = _run(ranks, (333, 768, 520), all_reduce=all_reduce, seed=5)
        for _ in range(3):
            again = _run(ranks, (333, 768, 520), all_reduce=all_reduce, seed=5)
            np.testing.assert_array_equal(first, again)


def test_takes_turns_on_a_channel(ranks):
    """Shapes, grids and ops in turn: counters of one are where the next one finds them."""
    n, rng = ranks.num_ranks, np.random.default_rng(2)
    for seed in range(8):
        shape = tuple(int(i) for i in rng.integers(1, 500, 3))
        blocks = int(rng.integers(1, 12))
        _run(ranks, shape, blocks, all_reduce=bool(seed % 2), seed=seed, channel=3, calls=2)
        values = rng.standard_normal((2, n, 30_000)).astype(np.float32)
        results = poisoned(*as_bytes(values).shape)
        ranks.reduce(
            as_bytes(values),
            results,
            plan_words([("register", "simple", blocks)]),
            dtype="float32",
            reduction="sum",
            algorithms=["one_shot", "two_shot"],
            channel=3,
        )
        want = in_rank_order(values, "sum", np.dtype(np.float32))[:, None]
        np.testing.assert_array_equal(results, as_bytes(np.broadcast_to(want, values.shape)))


@pytest.mark.parametrize("all_reduce", OPS)
def test_an_absent_rank_is_named(all_reduce):
    """In a process of its own: the trap costs the CUDA context."""
    program = f"""
        import numpy as np
        from pk_jax import _ffi
        ranks = _ffi.VirtualRanks(3, [0], 2.0)
        operands = np.zeros((1, 3, 2 * 384 * 64 + 2 * 64 * 64), np.uint8)
        results = np.zeros((1, 3, 2 * {384 if all_reduce else 128} * 64), np.uint8)
        try:
            ranks.matmul_reduce(operands, results, [("tma", "simple", [])], absent=[1], m=384,
                                k=64, p=64, all_reduce={all_reduce})
        except RuntimeError as error:
            print(error)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    op = "matmul_all_reduce" if all_reduce else "matmul_reduce_scatter"
    assert f"{op} on rank" in run.stdout, run.stdout + run.stderr
    assert "for rank 1 to" in run.stdout


# Under XLA, on two GPUs

TWO = pytest.mark.needs_gpus(2)


def _fused(x, w, *, all_reduce=False, channel=0, lead=1):
    devices = jax.devices("cuda")[:2]
    (m, k), p = x.shape, w.shape[1]
    hardware = lookup(devices[0].device_kind)
    site = {
        "groups": np.array([0, 1], np.int64),
        "devices": np.array([d.id for d in devices], np.int64),
        "group_size": np.int64(2),
        "channel": np.int64(channel),
    }
    plan = model.choose(hardware, m, p, k, 2, all_reduce=all_reduce, lead=lead)
    return call(x, w, site=site, plan=plan, transpose_w=False, all_reduce=all_reduce)


@TWO
@pytest.mark.parametrize("all_reduce", OPS)
@pytest.mark.parametrize(
    "shape", ((512, 1024, 768), (602, 200, 132), (8192, 1024, 8192), (4096, 3584, 2048)), ids=str
)
def test_two_gpus(shape, all_reduce):
    """Normal numbers, against the product in fp32; two runs of other operands between two equal."""
    m, k, p = shape
    out = P("x") if not all_reduce else P("x", None)

    def f(x, w):
        y = _fused(x, w, all_reduce=all_reduce)
        return y[None] if all_reduce else y

    mesh, program = on_two_gpus(f, (P(None, "x"), P("x")), out)
    operands = [
        (draw(mesh, P(None, "x"), (m, 2 * k), seed), draw(mesh, P("x"), (2 * k, p), seed + 1))
        for seed in (0, 2)
    ]
    results = [np.asarray(program(*pair)) for pair in (*operands, *operands)]
    for got, again, (x, w) in zip(results[:2], results[2:], operands, strict=True):
        np.testing.assert_array_equal(got.view(np.uint16), again.view(np.uint16))
        want = np.asarray(x, np.float32) @ np.asarray(w, np.float32)
        for each in got if all_reduce else (got,):
            error = np.linalg.norm(each.astype(np.float32) - want) / np.linalg.norm(want)
            assert error <= 5e-3, error  # of three roundings; false for NaN
        if all_reduce:
            np.testing.assert_array_equal(got[0].view(np.uint16), got[1].view(np.uint16))


@TWO
def test_repeated_in_a_scan():
    """The body is captured into a graph and replayed; both ops in it, on channels of their own."""
    m, k = 512, 384

    def f(x, w, v):
        def step(x, _):
            y = _fused(x, w, channel=1)  # [m / 2, k]
            z = _fused(jnp.concatenate([y, y]), v, all_reduce=True, channel=2)
            x = z / jnp.bfloat16(512)
            return x, x.astype(jnp.float32).sum()

        return jax.lax.scan(step, x, None, length=30)[0][None]

    mesh, program = on_two_gpus(f, (P(None, "x"), P("x"), P("x")), P("x"))
    x, w = draw(mesh, P(None, "x"), (m, 2 * k), 0), draw(mesh, P("x"), (2 * k, k), 1)
    v = draw(mesh, P("x"), (2 * k, k), 2)
    first = np.asarray(program(x, w, v))
    assert np.isfinite(first.astype(np.float32)).all() and first.astype(np.float32).any()
    np.testing.assert_array_equal(first[0], first[1])  # the sum, on both
    for _ in range(3):
        np.testing.assert_array_equal(first, np.asarray(program(x, w, v)))

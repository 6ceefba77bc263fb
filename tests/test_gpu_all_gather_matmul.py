"""all_gather_matmul's kernel: ranks as streams at 2 to 8 ranks, and two GPUs under XLA.

Every result starts as NaN. The gathered matrix is compared bit by bit, the product with one in fp32
by the relative norm of the difference, and a second run of it bit by bit with the first. Calls
follow each other on one channel without a pause, so that a flag that is seen too early shows.
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
from virtual_ranks import plan_words

from pk_jax._primitives.all_gather_matmul_call import call
from pk_jax._tuning import all_gather_matmul_model as model
from pk_jax._tuning.hardware import lookup

pytestmark = pytest.mark.needs_gpus(1)

TILES = ("128x256", "128x128")
# Rounding of the result; of the sum's order alone.
ROUNDED, EXACT = 4e-3, 1e-5
# m of a rank, k, p: whole tiles; rows that end within a tile; fewer rows than ranks have tiles;
# one of everything; columns and sums that are not whole vectors.
SHAPES = (
    (256, 512, 512),
    (200, 320, 300),
    (130, 64, 256),
    (16, 1024, 256),
    (1, 8, 8),
    (3, 100, 77),
    (129, 1000, 1000),
    (640, 72, 264),
)


@pytest.fixture(scope="module", params=(2, 3, 4, 8), ids=lambda n: f"{n}-ranks")
def ranks(request):
    ffi = pytest.importorskip("pk_jax._ffi")
    devices = [device.local_hardware_id for device in jax.devices("cuda")]
    return ffi.VirtualRanks(request.param, devices, 20.0)


def _padded(x):
    return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 8)])


def _bytes(x, count, n):
    return np.ascontiguousarray(x).view(np.uint8).reshape(count, n, -1)


def _run(
    ranks,
    shape,
    *blocks,
    tile=TILES[0],
    comm=2,
    transpose_w=False,
    dtype="bfloat16",
    float32_result=False,
    own_rows=True,
    outer=1,
    calls=3,
    seed=0,
    **kwargs,
):
    """Random operands through `calls` calls; checks all that comes back and returns it."""
    n, (m, k, p) = ranks.num_ranks, shape
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((calls, n, outer, m, k), np.float32).astype(jnp.dtype(dtype))
    w = rng.standard_normal((calls, n, k, p), np.float32).astype(jnp.dtype(dtype))
    lying = _padded(w.swapaxes(-1, -2) if transpose_w else w)
    operands = np.concatenate(
        [_bytes(_padded(x), calls, n), _bytes(lying, calls, n)], -1, dtype=np.uint8
    )
    out = np.dtype(np.float32) if float32_result else jnp.dtype(dtype)
    k8, p8 = k + -k % 8, p + -p % 8
    gathered_bytes, y_bytes = n * outer * m * k8 * 2, n * outer * m * p8 * out.itemsize
    results = np.full((calls, n, gathered_bytes + y_bytes), 0xFF, np.uint8)  # NaN in any of them
    ranks.all_gather_matmul(
        operands,
        results,
        plan_words([("tma", "simple", *blocks)]),
        m=m,
        k=k,
        p=p,
        tile=tile,
        num_comm_blocks=comm,
        transpose_w=transpose_w,
        dtype=dtype,
        float32_result=float32_result,
        own_rows=own_rows,
        outer=outer,
        **kwargs,
    )
    gathered = results[..., :gathered_bytes].view(x.dtype)
    gathered = gathered.reshape(calls, n, outer, n, m, k8)[..., :k]
    y = results[..., gathered_bytes:].view(out).reshape(calls, n, outer * n * m, p8)[..., :p]
    limit = EXACT if float32_result else ROUNDED
    for c in range(calls):
        for r in range(n):
            for source in range(n):
                if own_rows or source != r:
                    np.testing.assert_array_equal(
                        gathered[c, r, :, source].view(np.uint16), x[c, source].view(np.uint16)
                    )
            rows = x[c].swapaxes(0, 1).reshape(-1, k).astype(np.float32)  # [outer, rank, m]
            want = rows @ w[c, r].astype(np.float32)
            difference = np.linalg.norm(y[c, r].astype(np.float32) - want) / np.linalg.norm(want)
            assert difference <= limit, (c, r, difference)  # false for NaN
    return results


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values(ranks, shape, tile):
    _run(ranks, shape, tile=tile)
    _run(ranks, shape, tile=tile, transpose_w=True, own_rows=False, comm=1, seed=1)
    _run(ranks, shape, tile=tile, comm=0, seed=2)


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("transpose_w", (False, True))
def test_types(ranks, dtype, transpose_w):
    for float32_result in (False, True):
        for tile in TILES:
            _run(
                *(ranks, (190, 264, 520)),
                tile=tile,
                dtype=dtype,
                transpose_w=transpose_w,
                float32_result=float32_result,
                calls=2,
            )


@pytest.mark.parametrize("comm", (0, 2))
def test_several_matrices(ranks, comm):
    """Rows gathered inside each: a part lies in as many stretches of the result."""
    for outer, shape in (
        (2, (256, 264, 520)),
        (3, (130, 72, 264)),
        (5, (7, 1032, 256)),
        (40, (1, 8, 8)),
    ):
        for tile in TILES:
            _run(ranks, shape, outer=outer, comm=comm, tile=tile, own_rows=outer % 2 == 1)


def test_any_number_of_blocks(ranks):
    """Two blocks, one of which pushes, or another number on each rank; or one that does both."""
    for blocks in ((2,), (3,), (7, 2, 5)):
        _run(ranks, (200, 320, 700), *blocks, comm=1)
        _run(ranks, (200, 320, 700), *blocks, comm=0)
    _run(ranks, (200, 320, 700), 1, comm=0)
    _run(ranks, (500, 320, 700), 9, comm=8)
    _run(ranks, (1, 8, 300), 9, comm=8)  # fewer pieces than communicators


@pytest.mark.parametrize("k", (8, 1016, 2040, 2048, 2056, 3000, 6208))
@pytest.mark.parametrize("comm", (0, 3))
def test_chunks_of_k(ranks, k, comm):
    """One chunk and less; a whole one; a few columns more; two and four of unequal steps."""
    for m in (260, 130, 1):  # tiles and pieces end with a few rows
        _run(ranks, (m, k, 300), comm=comm, calls=2, seed=k)
    _run(ranks, (70, k, 264), comm=comm, outer=3, calls=2, tile="128x128", seed=k + 1)


@pytest.mark.parametrize("comm", (0, 1, 5))
def test_several_groups_of_bands(ranks, comm):
    """Rows of more than a round of tiles: pieces go group by group, and chunk by chunk in each."""
    _run(ranks, (2200, 4096, 300), 7, comm=comm, calls=2)  # bands of 9 rows of tiles
    _run(ranks, (130, 2056, 300), 7, 12, comm=comm, calls=2, outer=9, tile="128x128")


def test_many_pieces(ranks):
    """Parts of many flags, and tiles that wait for more flags than a warp has lanes."""
    for comm in (0, 3):
        _run(ranks, (1000, 4096, 256), comm=comm, calls=2)
        _run(ranks, (40, 65536, 64), comm=comm, calls=2, tile="128x128")


def test_reruns_are_bit_equal(ranks):
    first = _run(ranks, (333, 768, 520), comm=3, seed=5)
    for comm in (3, 3, 2, 0, 0):  # however the rows come
        np.testing.assert_array_equal(first, _run(ranks, (333, 768, 520), comm=comm, seed=5))


def test_shares_a_channel_with_other_ops(ranks):
    """Shapes, plans and ops in turn on one channel: no flag or epoch of one misleads another."""
    n, rng = ranks.num_ranks, np.random.default_rng(2)
    for seed in range(6):
        shape = tuple(int(i) for i in rng.integers(1, 400, 3))
        _run(ranks, shape, comm=int(rng.integers(0, 4)), seed=seed, channel=3)
        operands = rng.integers(0, 256, (2, n, 4096), dtype=np.uint8)
        results = np.zeros((2, n, n * 4096), np.uint8)
        for path in (("register", "ll"), ("tma", "simple")):
            ranks.all_gather(operands, results, plan_words([path]), channel=3)
            expected = np.broadcast_to(operands.reshape(2, 1, -1), results.shape)
            np.testing.assert_array_equal(results, expected)


def test_an_absent_rank_is_named():
    """In a process of its own: the trap costs the CUDA context."""
    program = """
        import numpy as np
        from pk_jax import _ffi
        ranks = _ffi.VirtualRanks(3, [0], 2.0)
        operands = np.zeros((1, 3, 2 * 256 * 64 + 2 * 64 * 64), np.uint8)
        results = np.zeros((1, 3, 3 * 2 * 256 * (64 + 64)), np.uint8)
        try:
            ranks.all_gather_matmul(operands, results, [("tma", "simple", [])], absent=[1], m=256,
                                    k=64, p=64, tile="128x128", num_comm_blocks=1)
        except RuntimeError as error:
            print(error)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    assert "all_gather_matmul on rank" in run.stdout, run.stdout + run.stderr
    assert "for rank 1 to" in run.stdout


# Under XLA, on two GPUs


def _site(channel=0):
    return {
        "groups": np.array([0, 1], np.int64),
        "devices": np.array([d.id for d in jax.devices("cuda")[:2]], np.int64),
        "group_size": np.int64(2),
        "channel": np.int64(channel),
    }


def _fused(x, weights, *, channel=0, dtype=jnp.bfloat16, comm=None, **kwargs):
    (_, m, k), p = x.shape, max(w.shape[1] for w in weights)
    hardware = lookup(jax.devices("cuda")[0].device_kind)
    plan = model.choose(hardware, m, p, k, 2, num_comm_blocks=comm)
    return call(
        x,
        weights,
        site=_site(channel),
        plan=plan,
        transpose_w=False,
        dtype=dtype,
        num_sms=hardware.num_sms,
        **kwargs,
    )


def _close(got, x, w, limit=ROUNDED):
    want = np.asarray(x, np.float32) @ np.asarray(w, np.float32)
    assert np.linalg.norm(np.asarray(got, np.float32) - want) <= limit * np.linalg.norm(want)


@pytest.mark.needs_gpus(2)
@pytest.mark.parametrize("comm", (0, 4))
@pytest.mark.parametrize("shape", ((512, 1024, 768), (300, 200, 132), (4096, 2048, 1536)), ids=str)
def test_two_gpus(shape, comm):
    m, k, p = shape

    def f(x, w):
        (gathered,), ((y,),) = _fused(x[None], [w], comm=comm)
        return gathered[None], y

    mesh, program = on_two_gpus(f, (P("x"), P(None, "x")), (P("x"), P(None, "x")))
    x, w = draw(mesh, P("x"), (2 * m, k), 0), draw(mesh, P(None, "x"), (k, 2 * p), 1)
    gathered, y = program(x, w)
    for rank in range(2):
        np.testing.assert_array_equal(np.asarray(gathered[rank]), np.asarray(x))
    _close(y, x, w)
    again = program(x, w)
    np.testing.assert_array_equal(np.asarray(y), np.asarray(again[1]))


@pytest.mark.needs_gpus(2)
def test_two_weights():
    """Of different widths, the wider one second: it is the one that the gathering hides behind."""

    def f(x, narrow, wide):
        _, products = _fused(x[None], [narrow, wide])
        return tuple(y[0] for y in products)

    columns = P(None, "x")
    mesh, program = on_two_gpus(f, (P("x"), columns, columns), (columns, columns))
    x = draw(mesh, P("x"), (600, 520), 0)
    narrow, wide = draw(mesh, columns, (520, 200), 1), draw(mesh, columns, (520, 1040), 2)
    for got, w in zip(program(x, narrow, wide), (narrow, wide), strict=True):
        _close(got, x, w)


@pytest.mark.needs_gpus(2)
@pytest.mark.parametrize("comm", (0, 4))
def test_repeated_in_a_scan(comm):
    """The body of a scan is captured into a graph and replayed; two call sites in it."""

    def f(x, w, back):
        def step(x, _):
            _, (y,) = _fused(x, [w], channel=1, comm=comm)
            _, (z,) = _fused(y[:, : x.shape[1]], [back], channel=2, comm=comm, own_rows=False)
            x = z[:, : x.shape[1]] / jnp.bfloat16(256)
            return x, x.astype(jnp.float32).sum()

        return jax.lax.scan(step, x[None], None, length=20)[0]

    whole = P(None, None)
    mesh, program = on_two_gpus(f, (P("x"), whole, whole), P("x"))
    x = draw(mesh, P("x"), (512, 256), 0)
    w, back = draw(mesh, whole, (256, 256), 1), draw(mesh, whole, (256, 256), 2)
    got = np.asarray(program(x, w, back))
    # Each rank takes the first rows of what is gathered, so both end with those of rank 0.
    np.testing.assert_array_equal(got[0], got[1])
    np.testing.assert_array_equal(got, np.asarray(program(x, w, back)))

    def one(x, w, back):
        def step(x, _):
            return (x @ w) @ back / jnp.bfloat16(256), None

        return jax.lax.scan(step, x, None, length=20)[0]

    want = np.asarray(jax.jit(one)(*(jax.device_get(a) for a in (x[:256], w, back))), np.float32)
    difference = np.linalg.norm(got[0].astype(np.float32) - want) / np.linalg.norm(want)
    assert difference < 0.05, difference  # of 40 roundings

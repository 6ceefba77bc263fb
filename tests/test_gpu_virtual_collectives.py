"""all_to_all, ppermute, psum, psum_scatter and ragged_all_to_all at 2 to 8 ranks as streams.

As tests/test_gpu_virtual_ranks.py does for all_gather: results are poisoned, operands random, calls
follow each other on one channel. Moves are compared byte by byte; sums bit by bit with NumPy's in
rank order, for that is what the kernels promise.
"""

import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from virtual_ranks import as_bytes, in_rank_order, plan_words, poisoned, random_bytes

pytestmark = pytest.mark.needs_gpus(1)

RANKS = (2, 3, 5, 8)
MOVES = (("register", "ll"), ("register", "simple"), ("tma", "simple"))
LL, SIMPLE = ("register", "ll"), ("register", "simple")
DTYPES = (
    *("float32", "float64", "bfloat16", "float16"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)


@pytest.fixture(scope="module", params=RANKS, ids=lambda n: f"{n}-ranks")
def ranks(request):
    ffi = pytest.importorskip("pk_jax._ffi")
    devices = [device.local_hardware_id for device in jax.devices("cuda")]
    return ffi.VirtualRanks(request.param, devices, 20.0)


def ll_bytes(num_ranks):
    return max(128 << 10, (1 << 20) // num_ranks // 128 * 128)


# all_to_all


def _all_to_all(ranks, batch, rows, inner, split_first, *plans, calls=3, seed=0, **kwargs):
    n = ranks.num_ranks
    part = (batch, rows, inner)
    parts = random_bytes(seed, calls, n, n, *part)  # [calls, source, destination, part]
    place = 1 if split_first else 2  # where the rank's dimension stands in the operand
    operands = np.moveaxis(parts, 2, 2 + place)
    results = poisoned(calls, n, n * batch * rows * inner)
    ranks.all_to_all(
        as_bytes(operands),
        results,
        plan_words(plans),
        batch=batch,
        rows=rows,
        split_first=split_first,
        **kwargs,
    )
    received = parts.swapaxes(1, 2)  # [calls, destination, source, part]
    expected = np.moveaxis(received, 2, 2 + (3 - place))
    np.testing.assert_array_equal(results, as_bytes(expected))


# Parts of [batch, rows, inner] bytes.
PARTS = ((1, 1, 16), (1, 1, 7), (3, 5, 48), (2, 7, 13), (1, 64, 512), (40, 3, 1040), (5, 1, 96))
LARGE_PARTS = ((1, 1, 1_000_000), (1, 300, 4096), (16, 33, 2048), (2, 3, 70_001), (9, 1000, 32))


@pytest.mark.parametrize("split_first", (True, False))
@pytest.mark.parametrize("path", MOVES, ids="-".join)
def test_all_to_all(ranks, path, split_first):
    for part in PARTS + LARGE_PARTS:
        if path == LL and np.prod(part) > ll_bytes(ranks.num_ranks):
            continue
        _all_to_all(ranks, *part, split_first, path, calls=3 if part in PARTS else 2)


@pytest.mark.parametrize("path", MOVES, ids="-".join)
def test_all_to_all_with_any_blocks_and_alignment(ranks, path):
    for blocks in ((1,), (2,), (7, 1, 3)):
        _all_to_all(ranks, 3, 40, 96, True, (*path, *blocks))
    for offset in (1, 2, 4, 8):
        _all_to_all(ranks, 3, 5, 96, False, path, offset=offset)


# ppermute


def _ppermute(ranks, num_bytes, destinations, *plans, calls=3, seed=0, **kwargs):
    n = ranks.num_ranks
    operands = random_bytes(seed, calls, n, num_bytes)
    results = poisoned(calls, n, num_bytes)
    ranks.ppermute(operands, results, plan_words(plans), destinations=destinations, **kwargs)
    expected = np.zeros_like(operands)
    for source, to in enumerate(destinations):
        if to >= 0:
            expected[:, to] = operands[:, source]
    np.testing.assert_array_equal(results, expected)


@pytest.mark.parametrize("path", MOVES, ids="-".join)
def test_ppermute(ranks, path):
    n = ranks.num_ranks
    shift = [(i + 1) % n for i in range(n)]
    chain = [i + 1 if i + 1 < n else -1 for i in range(n)]
    for destinations in (shift, chain, list(range(n)), [-1] * n, [*range(n - 1, -1, -1)]):
        for num_bytes in (1, 13, 16, 4096, 100_003, 1_250_000):
            if path == LL and num_bytes > ll_bytes(n):
                continue
            _ppermute(ranks, num_bytes, destinations, path)
    _ppermute(ranks, 5000, chain, (*path, 2, 1, 5), offset=4)


def test_ppermute_calls_do_not_overtake(ranks):
    """Permutations change from call to call, so that who waits for whom does too."""
    n = ranks.num_ranks
    rng = np.random.default_rng(7)
    for seed in range(5):
        destinations = [int(i) for i in rng.permutation(n)]
        destinations[int(rng.integers(n))] = -1
        _ppermute(ranks, 2048, destinations, *MOVES, calls=12, seed=seed, channel=2)


# psum, pmax, pmin, psum_scatter


def _numbers(dtype, seed, *shape):
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        return random_bytes(seed, *shape, dtype.itemsize).view(dtype)[..., 0]
    return rng.normal(size=shape).astype(dtype)


def _reduced(ranks, values, shape, dtype, reduction, algorithms, plans, **kwargs):
    """What [calls, ranks, ...] values come to: bytes of a poisoned array of `shape`."""
    results = poisoned(*shape)
    ranks.reduce(
        as_bytes(values),
        results,
        plan_words(plans),
        dtype=dtype,
        reduction=reduction,
        algorithms=algorithms,
        **kwargs,
    )
    return results


def _psum(ranks, count, dtype, reduction, algorithm, *plans, calls=3, seed=0, **kwargs):
    values = _numbers(dtype, seed, calls, ranks.num_ranks, count)
    algorithms = [algorithm] if isinstance(algorithm, str) else algorithm
    shape = as_bytes(values).shape
    results = _reduced(ranks, values, shape, dtype, reduction, algorithms, plans, **kwargs)
    expected = in_rank_order(values, reduction, jnp.dtype(dtype))[:, None]
    expected = np.broadcast_to(expected, values.shape)
    np.testing.assert_array_equal(results, as_bytes(expected))


ALGORITHMS = (("one_shot", LL), ("one_shot", SIMPLE), ("two_shot", SIMPLE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ("sum", "max", "min"))
def test_reductions_of_every_dtype(ranks, dtype, reduction):
    for algorithm, path in ALGORITHMS:
        for count in (1, 1003, 16384):
            _psum(ranks, count, dtype, reduction, algorithm, path, calls=2)


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize(("algorithm", "path"), ALGORITHMS, ids=str)
def test_psum_sizes(ranks, algorithm, path, dtype):
    itemsize = jnp.dtype(dtype).itemsize
    for count in (1, 2, 7, 64, 4096, 65_000, 131_073, 1_000_001, 3_000_000):
        if path == LL and count * itemsize > ll_bytes(ranks.num_ranks):
            continue
        _psum(ranks, count, dtype, "sum", algorithm, path, calls=2)


def test_psum_on_few_blocks_and_mixed_calls(ranks):
    """One grid on all ranks, of any size; ll and simple calls take turns on one channel."""
    for blocks in (1, 2, 5, 13):
        for algorithm, path in ALGORITHMS:
            count = 60_001 if path == SIMPLE else ll_bytes(ranks.num_ranks) // 4 - 3
            _psum(ranks, count, "float32", "sum", algorithm, (*path, blocks), calls=3)
    mixed = (LL, SIMPLE, (*SIMPLE, 3), LL, (*SIMPLE, 1))
    _psum(ranks, 30_000, "float32", "sum", "one_shot", *mixed, calls=20, channel=5)
    turns = ["one_shot", "two_shot", "two_shot"]
    _psum(ranks, 30_001, "bfloat16", "sum", turns, SIMPLE, calls=15, channel=6)


def test_ops_take_turns_on_a_channel(ranks):
    """Counters of one op are where the next one finds them, whatever it is."""
    n = ranks.num_ranks
    for seed in range(3):
        _psum(ranks, 20_000, "float32", "sum", "two_shot", SIMPLE, calls=2, seed=seed, channel=7)
        _all_to_all(ranks, 2, 30, 96, True, *MOVES, calls=3, seed=seed, channel=7)
        _psum_scatter(ranks, 5, 640, "bfloat16", SIMPLE, LL, calls=2, seed=seed, channel=7)
        _ppermute(ranks, 4096, [(i + 1) % n for i in range(n)], LL, SIMPLE, seed=seed, channel=7)


def _psum_scatter(ranks, rows, inner, dtype, *plans, calls=3, seed=0, **kwargs):
    n = ranks.num_ranks
    values = _numbers(dtype, seed, calls, n, rows, n, inner)
    shape = (calls, n, rows * inner * values.dtype.itemsize)
    results = _reduced(ranks, values, shape, dtype, "sum", ["scatter"], plans, rows=rows, **kwargs)
    total = in_rank_order(values, "sum", jnp.dtype(dtype))  # [calls, rows, n, inner]
    np.testing.assert_array_equal(results, as_bytes(np.moveaxis(total, 2, 1)))


@pytest.mark.parametrize("dtype", ("bfloat16", "float32", "int8", "float64"))
@pytest.mark.parametrize("path", (LL, SIMPLE), ids="-".join)
def test_psum_scatter(ranks, path, dtype):
    itemsize = jnp.dtype(dtype).itemsize
    for rows, inner in ((1, 1), (1, 1000), (5, 3), (33, 128), (7, 4096), (300, 513), (2, 100_003)):
        if path == LL and rows * inner * itemsize > ll_bytes(ranks.num_ranks):
            continue
        _psum_scatter(ranks, rows, inner, dtype, path, calls=2)
    _psum_scatter(ranks, 9, 640, dtype, path, (*path, 2), calls=8, channel=1)


def test_sums_are_the_same_every_time(ranks):
    values = _numbers("float32", 3, 6, ranks.num_ranks, 30_000)
    values[:] = values[:1]
    for algorithm, path in ALGORITHMS:
        shape = as_bytes(values).shape
        results = _reduced(ranks, values, shape, "float32", "sum", [algorithm], [path])
        np.testing.assert_array_equal(results, np.broadcast_to(results[:1, :1], results.shape))


def test_not_a_number_wins(ranks):
    values = np.zeros((1, ranks.num_ranks, 4096), np.float32)
    values[0, -1, ::3] = np.nan
    for reduction in ("max", "min"):
        for algorithm, path in ALGORITHMS:
            shape = as_bytes(values).shape
            found = _reduced(ranks, values, shape, "float32", reduction, [algorithm], [path])
            found = found.view(np.float32)
            np.testing.assert_array_equal(
                np.isnan(found[0]), np.isnan(values[0, -1:]).repeat(ranks.num_ranks, 0)
            )


# ragged_all_to_all


def _ragged(ranks, rows, row_bytes, per_peer, seed, *plans, calls=2):
    """Random slices that fit: the receivers' outputs are cut into one place for each update."""
    n = ranks.num_ranks
    rng = np.random.default_rng(seed)
    updates = n * per_peer
    place = rows // updates
    operands = random_bytes(seed, calls, n, rows, row_bytes)
    results = random_bytes(seed + 1, calls, n, rows, row_bytes)
    sizes = rng.integers(0, place + 1, (calls, n, updates), dtype=np.int32)
    sizes[rng.random(sizes.shape) < 0.2] = 0
    starts = rng.integers(0, rows - place + 1, sizes.shape, dtype=np.int32)
    targets = np.zeros_like(sizes)
    expected = results.copy()
    for call, rank, update in np.ndindex(*sizes.shape):
        to, slot = divmod(update, per_peer)
        # A place in `to`'s output for each (source, slot).
        target = (rank * per_peer + slot) * place
        targets[call, rank, update] = target
        size, start = sizes[call, rank, update], starts[call, rank, update]
        expected[call, to, target : target + size] = operands[call, rank, start : start + size]
    packed = np.concatenate(
        [as_bytes(operands), as_bytes(starts), as_bytes(sizes), as_bytes(targets)], axis=2
    )
    flat = as_bytes(results).copy()
    ranks.ragged_all_to_all(
        packed, flat, plan_words(plans or [SIMPLE]), row_bytes=row_bytes, num_updates=updates
    )
    np.testing.assert_array_equal(flat, as_bytes(expected))


@pytest.mark.parametrize("per_peer", (1, 3, 40))
@pytest.mark.parametrize("row_bytes", (4, 12, 96, 4096))
def test_ragged_all_to_all(ranks, per_peer, row_bytes):
    for seed in range(3):
        _ragged(ranks, 700, row_bytes, per_peer, seed)
    _ragged(ranks, 5000, row_bytes, per_peer, 9, (*SIMPLE, 1), (*SIMPLE, 4, 2))


# Failures


def _in_a_process(program):
    """Runs a program of its own: a trap costs the CUDA context. Returns seconds and the text."""
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.stdout, run.stderr
    return run.stdout


CALL = """
    import numpy as np
    from pk_jax import _ffi
    ranks = _ffi.VirtualRanks(3, [0], 2.0)
    operands, results = np.ones((1, 3, 6144), np.uint8), np.zeros((1, 3, 6144), np.uint8)
    scattered = np.zeros((1, 3, 2048), np.uint8)
    try:
        {call}
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.parametrize(
    "call",
    (
        "ranks.all_to_all(operands, results, {plans}, 1, 1, True, absent=[1])",
        "ranks.ppermute(operands, results, {plans}, destinations=[1, 2, 0], absent=[1])",
        'ranks.reduce(operands, results, {plans}, "float32", "sum", ["one_shot"], absent=[1])',
        'ranks.reduce(operands, scattered, {plans}, "float32", "sum", ["scatter"], absent=[1])',
    ),
    ids=("all_to_all", "ppermute", "psum", "psum_scatter"),
)
@pytest.mark.parametrize("protocol", ("ll", "simple"))
def test_an_absent_rank_is_named(call, protocol):
    text = _in_a_process(CALL.format(call=call.format(plans=[("register", protocol, [])])))
    assert "for rank 1" in text and "on rank" in text, text


def test_grids_that_differ_are_refused():
    call = 'ranks.reduce(operands, results, [("register", "simple", [1, 2, 1])], '
    call = call.replace("operands, results", "big, big.copy()")
    program = CALL.format(call=call + '"float32", "sum", ["one_shot"])').replace(
        "operands, results =", "big = np.ones((1, 3, 1 << 20), np.uint8); operands, results ="
    )
    text = _in_a_process(program)
    assert "blocks on rank" in text, text


@pytest.mark.parametrize("array", (0, 2), ids=("input_offsets", "output_offsets"))
def test_checks_name_a_slice_that_does_not_fit(array):
    program = f"""
        import numpy as np
        from pk_jax import _ffi
        ranks = _ffi.VirtualRanks(2, [0], 2.0)
        index = np.zeros((1, 2, 3, 2), np.int32)
        index[:, :, 1] = 4
        index[0, 1, {array}, 0] = 30
        data = np.ones((1, 2, 32 * 16), np.uint8)
        operands = np.concatenate([data, index.view(np.uint8).reshape(1, 2, -1)], axis=2)
        results = np.zeros((1, 2, 32 * 16), np.uint8)
        plans = [("register", "simple", [])]
        ranks.ragged_all_to_all(operands, results.copy(), plans, row_bytes=16, num_updates=2)
        try:
            ranks.ragged_all_to_all(
                operands, results, plans, row_bytes=16, num_updates=2, checks=True)
        except RuntimeError as error:
            print(error)
    """
    text = _in_a_process(program)
    name = ("input_offsets", "", "output_offsets")[array]
    assert "on rank 1" in text and "rank 0 reaches row 33" in text and name in text, text

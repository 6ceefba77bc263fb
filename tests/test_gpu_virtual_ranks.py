"""The kernels' protocols at 2 to 8 ranks, on however few GPUs there are: ranks as streams.

No XLA and no NCCL here: communicators are built over an exchange among threads. Results are
poisoned before each run, operands are random, and several calls follow each other on one channel
without a pause, so that a slot reused too early shows as a wrong byte.
"""

import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest
from virtual_ranks import plan_words, poisoned, random_bytes

pytestmark = pytest.mark.needs_gpus(1)

RANKS = (2, 3, 4, 8)
PATHS = (("register", "ll"), ("register", "simple"), ("tma", "simple"), ("copy_engine", "simple"))
# (bytes a rank, rows): whole vectors, odd lengths, rows narrower and wider than a tile.
SMALL = ((16, 1), (1000, 5), (77, 7), (4096, 1), (65536, 1), (49152, 96), (131072, 2), (6, 3))
LARGE = ((1_250_000, 1), (2_000_064, 4), (1_500_000, 1500), (300_003, 1), (1_048_576, 65536))


@pytest.fixture(scope="module", params=RANKS, ids=lambda n: f"{n}-ranks")
def ranks(request):
    ffi = pytest.importorskip("pk_jax._ffi")
    devices = [device.local_hardware_id for device in jax.devices("cuda")]
    return ffi.VirtualRanks(request.param, devices, 20.0)


def _check(ranks, num_bytes, rows, *plans, calls=4, seed=0, **kwargs):
    """Random operands through `calls` calls, by the plans in turn; every byte compared."""
    n = ranks.num_ranks
    operands = random_bytes(seed, calls, n, num_bytes)
    results = poisoned(calls, n, n * num_bytes)
    ranks.all_gather(operands, results, plan_words(plans), rows=rows, **kwargs)
    parts = operands.reshape(calls, n, rows, num_bytes // rows)
    expected = parts.transpose(0, 2, 1, 3).reshape(calls, 1, n * num_bytes)
    np.testing.assert_array_equal(results, np.broadcast_to(expected, results.shape))
    return results


def _possible(path, num_bytes, rows):
    mechanism, protocol = path
    if mechanism == "tma":
        return num_bytes // rows % 16 == 0
    return protocol != "ll" or num_bytes <= 131072


@pytest.mark.parametrize("path", PATHS, ids="-".join)
@pytest.mark.parametrize("size", SMALL + LARGE, ids=str)
def test_values(ranks, path, size):
    if not _possible(path, *size):
        pytest.skip("not a size this path carries")
    _check(ranks, *size, path, calls=4 if size in SMALL else 2)


@pytest.mark.parametrize("path", PATHS, ids="-".join)
def test_any_number_of_blocks(ranks, path):
    """One block, or another number on each rank: nothing depends on how many there are."""
    for blocks in ((1,), (2,), (7, 1, 3)):
        _check(ranks, 98304, 2, (*path, *blocks))
        _check(ranks, 6 << 20, 1, ("copy_engine", "simple", *blocks), calls=2)


@pytest.mark.parametrize("offset", (1, 2, 4, 8))
@pytest.mark.parametrize("path", PATHS, ids="-".join)
def test_unaligned_buffers(ranks, path, offset):
    """Also tma: a rank whose buffers it cannot take stores with registers."""
    _check(ranks, 24_000, 3, path, offset=offset)


def test_paths_share_a_channel(ranks):
    """Calls of all kinds follow each other without a pause, with other grids on each rank."""
    rng = np.random.default_rng(1)
    for seed in range(6):
        plans = [(*PATHS[rng.integers(4)], *map(int, rng.integers(0, 5, 3))) for _ in range(12)]
        size = 16 * int(rng.integers(1, 8192))
        _check(ranks, size, 1, *plans, calls=24, seed=seed, channel=3)


def test_many_chunks_through_few_slots(ranks):
    """More chunks than landing slots: each slot is emptied and filled again within a call."""
    _check(ranks, 6 << 20, 1, ("copy_engine", "simple"), calls=3)


@pytest.mark.parametrize("path", PATHS, ids="-".join)
def test_an_absent_rank_is_named(path):
    """A rank that never comes ends the others with op, rank, peer and slot within the limit.

    In a process of its own: the trap costs the CUDA context.
    """
    program = f"""
        import time
        import numpy as np
        from pk_jax import _ffi
        ranks = _ffi.VirtualRanks(3, [0], 2.0)
        operands = np.ones((1, 3, 4096), np.uint8)
        results = np.zeros((1, 3, 3 * 4096), np.uint8)
        start = time.monotonic()
        try:
            ranks.all_gather(operands, results, [({path[0]!r}, {path[1]!r}, [])], absent=[1])
        except RuntimeError as error:
            print(f"{{time.monotonic() - start:.1f}} {{error}}")
            assert _ffi.last_error() == str(error)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    seconds, _, text = run.stdout.partition(" ")
    assert "all_gather on rank" in text and "for rank 1" in text, run.stdout + run.stderr
    assert 2.0 <= float(seconds) < 30.0  # the limit, then the driver's clean-up beside other tests

"""compute-sanitizer over small cases of every path: no stray access, no shared-memory race.

Each run is a process of its own: collectives and fused ops on virtual ranks, so that the tool sees
our kernels and no others; products by XLA, every buffer an allocation of its own.
"""

import os
import shutil
import subprocess
import sys
import textwrap

import pytest
from racecheck import unexpected

pytestmark = pytest.mark.needs_gpus(1)

COLLECTIVES = """
    import numpy as np
    from pk_jax import _ffi
    ranks = _ffi.VirtualRanks(2, list(range(len(_ffi.topology()["devices"]))), 120.0)
    for mechanism, protocol, num_bytes, rows in (
        ("register", "ll", 1000, 5),
        ("register", "ll", 4096, 1),
        ("register", "simple", 100_003, 1),
        ("register", "simple", 65536, 64),
        ("tma", "simple", 300_000 // 48 * 48, 3),
        ("tma", "simple", 65536, 64),
        ("copy_engine", "simple", 6 << 20, 2),
    ):
        operands = np.random.default_rng(0).integers(0, 256, (2, 2, num_bytes), dtype=np.uint8)
        results = np.zeros((2, 2, 2 * num_bytes), np.uint8)
        ranks.all_gather(operands, results, [(mechanism, protocol, [])], rows=rows)
        parts = operands.reshape(2, 2, rows, -1).transpose(0, 2, 1, 3).reshape(2, 1, -1)
        assert (results == parts).all(), (mechanism, protocol)
    for mechanism, protocol in (("register", "ll"), ("register", "simple"), ("tma", "simple")):
        plans = [(mechanism, protocol, [])]
        operands = np.random.default_rng(1).integers(0, 256, (2, 2, 96_000), dtype=np.uint8)
        results = np.zeros_like(operands)
        ranks.all_to_all(operands, results, plans, batch=5, rows=100, split_first=True)
        want = operands.reshape(2, 2, 5, 2, 100, 96).transpose(0, 3, 2, 4, 1, 5)
        assert (results == want.reshape(2, 2, -1)).all(), ("all_to_all", mechanism, protocol)
        ranks.ppermute(operands, results, plans, destinations=[1, -1])
        assert (results[:, 1] == operands[:, 0]).all() and not results[:, 0].any()
    values = np.random.default_rng(2).normal(size=(2, 2, 30_001)).astype(np.float32)
    total = values.sum(1, keepdims=True)
    for protocol, algorithm in (("ll", "one_shot"), ("simple", "one_shot"), ("simple", "two_shot")):
        results = np.zeros_like(values)
        raw = [array.view(np.uint8) for array in (values, results)]
        ranks.reduce(*raw, [("register", protocol, [])], "float32", "sum", [algorithm])
        assert (results == total).all(), ("psum", protocol, algorithm)
    for inner in (640, 63):
        values = np.random.default_rng(4).normal(size=(1, 2, 7, 2, inner)).astype(np.float32)
        results = np.zeros((1, 2, 7 * inner), np.float32)
        raw = [array.view(np.uint8).reshape(1, 2, -1) for array in (values, results)]
        ranks.reduce(*raw, [("register", "simple", [])], "float32", "sum", ["scatter"], rows=7)
        want = np.moveaxis(values[:, 0] + values[:, 1], 2, 1).reshape(1, 2, -1)
        assert (results == want).all(), ("psum_scatter", inner)
    # Rank r sends rows 0..39 to rank 0, rows 50..109 to rank 1; they land behind those of rank 0.
    index = np.array([[[0, 50], [40, 60], [40 * r, 60 * r]] for r in range(2)], np.int32)
    data = np.random.default_rng(3).integers(0, 256, (1, 2, 200 * 48), dtype=np.uint8)
    results = np.zeros((1, 2, 200 * 48), np.uint8)
    operands = np.concatenate([data, index.reshape(1, 2, 6).view(np.uint8)], axis=2)
    ranks.ragged_all_to_all(operands, results, [("register", "simple", [])], 48, 2)
    sent, got = data.reshape(2, 200, 48), results.reshape(2, 200, 48)
    for rank, rows in enumerate((slice(0, 40), slice(50, 110))):
        want = sent[:, rows].reshape(-1, 48)
        assert (got[rank, : len(want)] == want).all(), ("ragged_all_to_all", rank)
        assert not got[rank, len(want) :].any(), ("ragged_all_to_all", rank)
    print("values are right")
"""


PRODUCTS = """
    import itertools, jax, numpy as np
    from pk_jax._primitives import matmul
    from pk_jax._tuning import matmul_model
    rng = np.random.default_rng(0)
    half, full = np.dtype("float16"), np.dtype(np.float32)
    for m, n, k, tiles in ((200, 264, 520, None), (5, 72, 1032, ("128x256", "64x64"))):
        plans = [p for p in matmul_model.candidates(m, n, k, 132) if not tiles or p.tile in tiles]
        layouts = itertools.product((False, True), (False, True), (half,))
        for ta, tb, out in (*layouts, (False, False, full)):
            a = rng.normal(size=(k, m) if ta else (m, k)).astype(half)
            b = rng.normal(size=(n, k) if tb else (k, n)).astype(half)
            want = (a.T if ta else a).astype(full) @ (b.T if tb else b).astype(full)
            params = {"transpose_a": ta, "transpose_b": tb, "dtype": out}
            calls = lambda a, b: [matmul.call(a, b, plan=plan, **params) for plan in plans]
            for plan, got in zip(plans, jax.jit(calls)(a, b)):
                error = np.linalg.norm(np.asarray(got) - want) / np.linalg.norm(want)
                assert error < 1e-3, (m, n, k, ta, tb, out, plan, error)
    print("values are right")
"""


GROUPED = """
    import jax, numpy as np
    from pk_jax._primitives import ragged_dot
    from pk_jax._tuning import ragged_dot_model
    rng = np.random.default_rng(0)
    half, full = np.dtype("float16"), np.dtype(np.float32)
    plans = list(ragged_dot_model.candidates(7))
    for m, n, k, sizes in ((300, 72, 136, [0, 130, 1, 0, 64, 40]), (90, 40, 24, [2] * 40)):
        lhs = rng.normal(size=(m, k)).astype(half)
        sizes = np.array(sizes, np.int32)
        group = np.repeat(np.arange(len(sizes)), sizes)
        for tb, out in ((False, half), (True, half), (False, full)):
            rhs = rng.normal(size=(len(sizes), n, k) if tb else (len(sizes), k, n)).astype(half)
            mats = (rhs.swapaxes(1, 2) if tb else rhs).astype(full)
            want = np.zeros((m, n), full)
            for row, g in enumerate(group):
                want[row] = lhs[row].astype(full) @ mats[g]
            calls = lambda *xs: [
                ragged_dot.call(*xs, plan=plan, transpose_b=tb, dtype=out) for plan in plans
            ]
            for plan, got in zip(plans, jax.jit(calls)(lhs, rhs, sizes)):
                error = np.linalg.norm(np.asarray(got) - want) / np.linalg.norm(want)
                assert error < 1e-3, (m, n, k, tb, out, plan, error)
    print("values are right")
"""


FUSED = """
    import numpy as np
    from pk_jax import _ffi
    ranks = _ffi.VirtualRanks(2, list(range(len(_ffi.topology()["devices"]))), 120.0)
    rng = np.random.default_rng(0)
    as_bytes = lambda x: np.ascontiguousarray(x).view(np.uint8).reshape(2, 2, -1)
    for m, k, p, tile, comm, turned, own in (
        (200, 264, 520, "128x256", 3, False, True),
        (130, 72, 264, "128x128", 3, True, False),
        (130, 264, 264, "128x128", 0, False, True),
        (3, 8, 8, "128x128", 3, False, True),
        (24, 2312, 72, "128x128", 2, False, True),
    ):
        x = rng.normal(size=(2, 2, m, k)).astype(np.float16)  # [call, rank, ...]
        w = rng.normal(size=(2, 2, k, p)).astype(np.float16)
        operands = np.concatenate([as_bytes(x), as_bytes(w.swapaxes(2, 3) if turned else w)], 2)
        results = np.full((2, 2, 4 * m * (k + p)), 0xFF, np.uint8)
        ranks.all_gather_matmul(
            operands, results, [("tma", "simple", [])], m, k, p, tile, comm, turned, "float16",
            own_rows=own,
        )
        y = results[..., 4 * m * k :].view(np.float16).reshape(2, 2, 2 * m, p)
        rows = x.reshape(2, 1, 2 * m, k).astype(np.float32)
        want = rows @ w.astype(np.float32)
        error = np.linalg.norm(y - want) / np.linalg.norm(want)
        assert error < 1e-3, (m, k, p, error)
    for m, k, p, protocol, split in (
        (20, 264, 72, "ll", 1), (100, 264, 136, "simple", 1), (20, 520, 72, "simple", 2)
    ):
        x = rng.integers(-4, 5, (2, 2, m, k)).astype(np.float16)
        w = rng.integers(-4, 5, (2, 2, k, p)).astype(np.float16)
        results = np.full((2, 2, 2 * m * p), 0xFF, np.uint8)
        ranks.few_rows(
            np.concatenate([as_bytes(x), as_bytes(w)], 2), results,
            [("register", protocol, [2 * split])], m, k, p, "float16", all_reduce=True, split=split,
            split_tiles=2 if split > 1 else 0,
        )
        want = (x.astype(np.float32) @ w.astype(np.float32)).sum(1, keepdims=True)
        got = results.view(np.float16).reshape(2, 2, m, p)
        assert np.linalg.norm(got - want) <= 1e-3 * np.linalg.norm(want), (m, k, p, protocol, split)
    for m, k, p, all_reduce in ((260, 64, 264, False), (390, 600, 520, True)):
        x = rng.integers(-4, 5, (2, 2, m, k)).astype(np.float16)
        w = rng.integers(-4, 5, (2, 2, k, p)).astype(np.float16)
        results = np.full((2, 2, 2 * p * (m if all_reduce else m // 2)), 0xFF, np.uint8)
        ranks.matmul_reduce(
            np.concatenate([as_bytes(x), as_bytes(w)], 2), results, [("tma", "simple", [])],
            m, k, p, "float16", all_reduce=all_reduce,
        )
        want = (x.astype(np.float32) @ w.astype(np.float32)).sum(1, keepdims=True)
        got = results.view(np.float16).reshape(2, 2, -1, p)
        if not all_reduce:
            want = want.reshape(2, 2, m // 2, p)
        assert np.linalg.norm(got - want) <= 1e-3 * np.linalg.norm(want), (m, k, p, all_reduce)
    print("values are right")
"""


PROGRAMS = {
    "collectives": COLLECTIVES,
    "products": PRODUCTS,
    "grouped": GROUPED,
    "fused": FUSED,
}


def _run(program, tool, *options):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.fail("compute-sanitizer is not on the PATH (it comes with the CUDA toolkit)")
    command = [sanitizer, "--tool", tool, *options, sys.executable, "-c", textwrap.dedent(program)]
    environment = os.environ | {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert "values are right" in run.stdout, run.stdout + run.stderr
    return run


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_memcheck(program):
    run = _run(program, "memcheck", "--error-exitcode", "9")
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_racecheck(program):
    run = _run(program, "racecheck", "--print-limit", "10000")
    assert run.returncode == 0 and "RACECHECK SUMMARY" in run.stdout, run.stdout + run.stderr
    assert unexpected(run.stdout) == []

"""compute-sanitizer over small cases of every path: no stray access, no shared-memory race.

Each run is a process of its own, on virtual ranks, so that the tool sees our kernels and not XLA's.
"""

import shutil
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.needs_gpus(1)

PROGRAM = """
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
    print("values are right")
"""


@pytest.mark.parametrize("tool", ("memcheck", "racecheck"))
def test_clean(tool):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.fail("compute-sanitizer is not on the PATH (it comes with the CUDA toolkit)")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c"]
    run = subprocess.run(
        [*command, textwrap.dedent(PROGRAM)], capture_output=True, text=True, timeout=280
    )
    assert run.returncode == 0 and "values are right" in run.stdout, run.stdout + run.stderr

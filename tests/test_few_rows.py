"""The plan and the custom call of products of few rows, summed over ranks, on the CPU."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pk_jax._primitives import all_gather_matmul_call
from pk_jax._primitives.few_rows_call import call
from pk_jax._tuning import few_rows_model as model
from pk_jax._tuning import matmul_model, matmul_reduce_model
from pk_jax._tuning.hardware import H200

BF16 = jnp.bfloat16


@pytest.mark.parametrize("all_reduce", (False, True))
@pytest.mark.parametrize("protocol", ("ll", "simple"))
def test_call(calls, all_reduce, protocol):
    n, m, k, p = 4, 20, 100, 300
    site = {
        "groups": np.arange(n),
        "devices": np.arange(n),
        "group_size": np.int64(n),
        "channel": np.int64(3),
    }
    plan = model.choose(H200, m, p, k, n, all_reduce=all_reduce, protocol=protocol)

    def f(x, w):
        return call(x, w, site=site, plan=plan, transpose_w=True, all_reduce=all_reduce)

    operands = jax.ShapeDtypeStruct((m, k), BF16), jax.ShapeDtypeStruct((p, k), BF16)
    text = jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    (found,) = calls(text)
    op = "matmul_all_reduce" if all_reduce else "matmul_reduce_scatter"
    assert found["op"] == f"{op}_few_rows"
    # Rows of x, w and the result are padded to 16 bytes; scratch, where there is any, is a result.
    rows = m if all_reduce else m // n
    strips = 3 if all_reduce else 2  # that rows 5 to 9 touch, say
    scratch = [f"{3 * strips * 5 * 1024}xui8"] if protocol == "simple" else []
    assert found["results"] == [f"{rows}x304xbf16", *scratch]
    assert (found["m"], found["k"], found["p"]) == (m, k, p)
    assert (found["mechanism"], found["protocol"]) == ("register", protocol)
    assert (found["num_blocks"], found["split"]) == (plan.num_blocks, plan.split)
    assert "tensor<20x104xbf16>, tensor<300x104xbf16>" in text


def test_sizes_are_the_kernels():
    ffi = pytest.importorskip("pk_jax._ffi")
    assert model.TILE_FLAGS == all_gather_matmul_call.TILE_FLAGS
    for n in range(2, model.MOST_RANKS + 1):
        for share, all_reduce in itertools.product((1, 5, 8, 9, 12, 14), (False, True)):
            for protocol in ("ll", "simple"):
                m, ll = share * n, protocol == "ll"
                most = model.most_cols(H200, m, n, all_reduce, protocol)
                assert most == ffi.few_rows_most_cols(m, n, all_reduce, ll)
                kwargs = {"all_reduce": all_reduce, "protocol": protocol}
                plan = model.choose(H200, m, 200, 64, n, **kwargs)
                assert plan.scratch_bytes == ffi.few_rows_scratch(m, 200, n, all_reduce, ll)


@pytest.mark.parametrize("all_reduce", (False, True))
def test_strips(all_reduce):
    """Each row of an owner is in one strip, whose number is no other's and less than there are.

    The first that an owner gets of two strips is the upper one, or the lower one alone.
    """
    ffi = pytest.importorskip("pk_jax._ffi")
    for n, share in itertools.product((2, 3, 8), (1, 2, 7, 8, 10, 16)):
        m = n * share
        count, found = ffi.strips(m, n, all_reduce, 200)
        for owner in range(n):
            rows = set(range(m) if all_reduce else range(owner * share, (owner + 1) * share))
            mine = {(row, col): rest for o, row, col, *rest in found if o == owner}
            assert rows <= {row + i for row, _ in mine for i in range(8)}
            assert all(rows & set(range(row, row + 8)) for row, _ in mine)
            assert {col for _, col in mine} == set(range(4))
            numbers = [number for number, _ in mine.values()]
            assert len(set(numbers)) == len(numbers) and 0 <= min(numbers) <= max(numbers) < count
            for (row, col), (number, first) in mine.items():
                above = mine.get((row - 8, col))
                assert first == (above[0] if above else number)


def test_the_bound_is_reading_the_weights():
    """At 8192 columns and k 3584 what is beyond that, and a launch, is a trip over the link."""
    hbm = 2 * 8192 * 3584 / matmul_model.HBM_BANDWIDTH + matmul_model.LAUNCH_S
    for m in (1, 8, 32):
        plan = model.choose(H200, m, 8192, 3584, 2)
        assert plan.protocol == "ll" and plan.num_blocks == 128
        assert hbm < plan.seconds < 1.5 * hbm


def test_seconds_rise():
    """With rows, with columns, with ranks; and never above what one protocol takes."""
    for n in (2, 4, 8):
        found = [model.choose(H200, m, 4096, 1024, n) for m in range(1, 129)]
        times = [plan.seconds for plan in found]
        assert all(a <= 1.1 * b for a, b in itertools.pairwise(times))
        assert times[0] < times[-1]
        for m, seconds in enumerate(times, 1):
            forced = (model.choose(H200, m, 4096, 1024, n, protocol=p) for p in ("ll", "simple"))
            assert seconds == min(plan.seconds for plan in forced if plan)
        # Few rows go by low latency, as many as there is room for or as are worth twice the bytes.
        protocols = [plan.protocol for plan in found]
        assert protocols == sorted(protocols) and set(protocols) == {"ll", "simple"}
    assert (
        model.choose(H200, 8, 4096, 1024, 2).seconds < model.choose(H200, 8, 4096, 1024, 8).seconds
    )
    assert (
        model.choose(H200, 8, 4096, 1024, 2).seconds < model.choose(H200, 8, 8192, 1024, 2).seconds
    )
    scattered = model.choose(H200, 128, 8192, 1024, 8, all_reduce=False)
    assert scattered.seconds < model.choose(H200, 128, 8192, 1024, 8).seconds


def test_few_columns_are_split_along_k():
    plan = model.choose(H200, 4, 1024, 8192, 2)
    assert plan.split_tiles == 16 and plan.num_blocks == 16 * plan.split > 16
    assert model.choose(H200, 4, 8192, 8192, 2, num_sms=50).num_blocks <= 50


def test_it_beats_the_kernel_for_many_rows():
    for m in (1, 64, 128):
        few = model.choose(H200, m, 8192, 3584, 2).seconds
        assert few < matmul_reduce_model.choose(H200, m, 8192, 3584, 2, all_reduce=True).seconds


def test_reasons():
    assert model.why_not(H200, 128, 8192, 8, True) is None
    assert model.why_not(H200, 128, 8 * 8192, 8, False) is None
    assert "129 rows" in str(model.why_not(H200, 129, 64, 2, True))
    assert "10 ranks" in str(model.why_not(H200, 1, 64, 10, True))
    assert "at most 8192" in str(model.why_not(H200, 128, 8193, 8, True))
    assert model.choose(H200, 128, 8193, 64, 8) is None
    # Without room in the mailbox there are the flags.
    assert model.choose(H200, 128, 8192, 64, 8, protocol="ll") is None
    assert model.choose(H200, 128, 8192, 64, 8).protocol == "simple"

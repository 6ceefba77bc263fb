"""The plan and the custom call of matmul_reduce_scatter and matmul_all_reduce, on the CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pk_jax._primitives.matmul_reduce_call import call, why_not
from pk_jax._tuning import matmul_reduce_model as model
from pk_jax._tuning.hardware import H200

BF16 = jnp.bfloat16


def _lowered(m, k, p, n, **kwargs):
    site = {
        "groups": np.arange(n),
        "devices": np.arange(n),
        "group_size": np.int64(n),
        "channel": np.int64(3),
    }
    transpose_w = kwargs.pop("transpose_w", False)
    plan = model.choose(H200, m, p, k, n, **kwargs)
    w = jax.ShapeDtypeStruct((p, k) if transpose_w else (k, p), BF16)

    def f(x, w):
        all_reduce = kwargs.get("all_reduce", False)
        return call(x, w, site=site, plan=plan, transpose_w=transpose_w, all_reduce=all_reduce)

    x = jax.ShapeDtypeStruct((m, k), BF16)
    return plan, jax.jit(f).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("all_reduce", (False, True))
def test_call(calls, all_reduce):
    plan, text = _lowered(512, 100, 300, 4, all_reduce=all_reduce, transpose_w=True)
    op = "matmul_all_reduce" if all_reduce else "matmul_reduce_scatter"
    (found,) = calls(text)
    assert found["op"] == op
    # Rows of x, w and the result are padded to 16 bytes, and the scratch is a result.
    rows = 512 if all_reduce else 128
    assert found["results"] == [f"{rows}x304xbf16", f"{plan.scratch_bytes}xui8"]
    assert (found["m"], found["k"], found["p"]) == (512, 100, 300)
    assert found["num_blocks"] == plan.num_blocks and found["lead"] == plan.lead
    assert "tensor<512x104xbf16>, tensor<300x104xbf16>" in text


def test_scratch_is_what_the_kernel_needs():
    ffi = pytest.importorskip("pk_jax._ffi")
    for m, p, n in ((512, 300, 2), (8192, 8192, 8), (9, 1, 3), (2520, 257, 9)):
        for all_reduce in (False, True):
            plan = model.choose(H200, m, p, 64, n, all_reduce=all_reduce)
            assert plan.scratch_bytes == ffi.matmul_reduce_scratch(m, p, n, all_reduce)


def test_seconds():
    """By the link where k is short, by tensor cores where it is long."""
    us = {k: 1e6 * model.choose(H200, 8192, 8192, k, 2).seconds for k in (64, 512, 1024, 3584)}
    link = 1e6 * 8192 * 8192 / H200.loaded_store_bandwidth["tma"][-1][1]
    assert link < us[64] < us[512] < 1.15 * link
    assert us[3584] > 2.5 * us[1024]
    both = 1e6 * model.choose(H200, 8192, 8192, 512, 2, all_reduce=True).seconds
    assert both > 1.9 * us[512]


def test_lead():
    """More of it where the link is the bound, or nearly."""
    lead = {k: model.choose(H200, 8192, 8192, k, 2).lead for k in (64, 1024, 3584)}
    assert lead == {64: 2, 1024: 2, 3584: 1}
    assert model.choose(H200, 8192, 8192, 1792, 2, all_reduce=True).lead == 2
    assert model.choose(H200, 8192, 8192, 64, 2, lead=1).lead == 1


def test_few_tiles_take_few_blocks():
    assert model.choose(H200, 256, 256, 64, 2).num_blocks == 2
    assert model.choose(H200, 8192, 8192, 64, 2, num_sms=100).num_blocks == 100


def test_reasons():
    same = (BF16, BF16, BF16)
    assert why_not(512, 64, 64, 8, same, False) is None
    assert "20 ranks" in str(why_not(640, 64, 64, 20, same, False))
    assert "float32" in str(why_not(512, 64, 64, 8, (BF16, BF16, np.float32), False))
    assert "4294967296" in str(why_not(1 << 32, 64, 64, 8, same, True))

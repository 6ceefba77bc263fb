"""The benchmark of attention: what it times, and that a wrong result gets no time."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "benchmarks"))
pytest.importorskip("products", reason="needs the checkout, not just the tests")

import attention
import report
import run

from pk_jax._bench import harness, records, timing
from pk_jax._tuning import attention_cases
from pk_jax._tuning.attention_cases import ATTENTIONS, AttentionCase

TINY = AttentionCase("attn-tiny", 2, 24, 4, 16, 2, is_causal=True, gradient=False)
TINY_GRAD = AttentionCase("attn-tiny-grad", 2, 24, 4, 16, 2, is_causal=False, gradient=True)
ONCE = harness.Method(sample_ms=0.0, samples=2)


@pytest.fixture(autouse=True)
def _few_calls(monkeypatch):
    """In chains that compile fast; jax.nn mixes dtypes."""
    monkeypatch.setattr(attention, "num_calls", lambda case: 3)
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_cases():
    assert len({case.name for case in ATTENTIONS}) == len(ATTENTIONS) == 28
    assert {case.heads // case.kv_heads for case in ATTENTIONS} == {1, 4}
    whole, causal, gradient = (
        next(case for case in ATTENTIONS if case.name == name)
        for name in ("attn-d128-4k", "attn-d128-4k-causal", "attn-d128-4k-causal-grad")
    )
    assert whole.flops == 4 * 32 * 4096**2 * 128
    assert causal.flops == whole.flops / 2 and gradient.flops == causal.flops * 3.5


@pytest.mark.parametrize("case", [TINY, TINY_GRAD], ids=lambda case: case.name)
def test_a_case(case):
    record, failures = attention.run_case(case, ONCE, {})
    assert not failures and set(record.skipped) == {"cudnn"}  # none on a CPU
    assert record.median_us > 0 and record.baselines["xla"] > 0
    assert record.config == {"path": "reference"} and record.speedup is None
    assert record.shape == [2, 24, 4, 2, 16] and 0 < record.max_rel_err < 1e-2
    assert record.tflops == pytest.approx(case.flops / record.median_us / 1e6)


def test_a_chain_makes_every_call():
    sets = [attention.operands(TINY_GRAD, seed) for seed in (0, 1)]
    calls = []

    def call(operands):
        calls.append(operands)
        return attention.ways(TINY_GRAD)["xla"](operands)

    outs = jax.eval_shape(lambda sets: timing.chain(call, 3, sets), sets)
    assert len(calls) == 3 and [x.shape for x in outs] == [
        x.shape for x in (*sets[0][:1], *sets[0][:3])
    ]


@pytest.mark.parametrize("number", range(4))
def test_a_wrong_result_gets_no_time(number, monkeypatch):
    """Of ours the value or one gradient; the others are timed all the same."""
    right = attention._call

    def wrong(case, f, operands):
        outs = list(right(case, f, operands))
        if getattr(f, "func", None) is attention.pk.attention:
            outs[number] = outs[number].at[1, 3].multiply(jnp.bfloat16(1.5))
        return tuple(outs)

    monkeypatch.setattr(attention, "_call", wrong)
    record, failures = attention.run_case(TINY_GRAD, ONCE, {})
    assert len(failures) == 1 and "attn-tiny-grad default: relative errors" in failures[0]
    assert "refused" in record.skipped["default"] and record.median_us is None
    assert record.baselines["xla"] > 0


def test_nan_is_wrong():
    assert attention.right([8e-3, 1.2e-2]) and not attention.right([9e-3])
    assert not attention.right([1e-3, 1.3e-2]) and not attention.right([float("nan")])


def test_what_is_left_out(monkeypatch):
    monkeypatch.setattr(attention, "MOST_LOGIT_BYTES", 0)
    record, failures = attention.run_case(TINY, ONCE._replace(without=("default",)), {})
    assert not failures and record.median_us is None and not record.baselines
    assert record.skipped["xla"] == "its logits are 0 GiB"


def test_kernels_are_counted():
    line = ' = (f32[2]) custom-call(), custom_call_target="pk_jax_attention"\n'
    text = "".join(f"  c{i}{line}" for i in range(3))
    attention.check_kernels(TINY, text)
    with pytest.raises(timing.ChainError, match=r"holds other kernels: \{'copy': 1\}"):
        attention.check_kernels(TINY, f"{text}  d = f32[2] copy(f32[2] x)\n")
    with pytest.raises(timing.ChainError, match="holds 0 pk_jax_attention_backward, not 3"):
        attention.check_kernels(TINY_GRAD, text)


def test_the_command_line_and_the_report(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(attention_cases, "ATTENTIONS", (TINY,))
    command = ["--op", "attention", "--samples", "1", "--sample-ms", "0", "--out", str(tmp_path)]
    assert run.main(command) == 0
    (path,) = tmp_path.glob("*/attention.jsonl")
    assert path.parent.name.endswith("x1")
    (record,) = records.load(path)
    assert record.id == "attn-tiny" and "attn-tiny" in capsys.readouterr().out
    table = report.attention({record.key: record})
    assert "| attn-tiny |" in table and "--op attention" in table
    assert report.attention({}) == ""

"""The benchmark of matrix products: what it times, and that a wrong product gets no time."""

import dataclasses
import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "benchmarks"))
pytest.importorskip("products", reason="needs the checkout, not just the tests")

import products

from pk_jax._bench import harness
from pk_jax._tuning import matmul_model
from pk_jax._tuning.matmul_cases import MATMULS, MatmulCase

TINY = MatmulCase("mm-tiny", 24, 16, 40)
ONCE = harness.Method(sample_ms=0.0, samples=2, forced=True)


def test_cases_have_names_of_their_own():
    assert len({case.name for case in MATMULS}) == len(MATMULS)
    assert {tag for case in MATMULS for tag in case.tags} == {"plain", "layout", "decode"}


@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
def test_a_case(transposed):
    case = dataclasses.replace(TINY, transpose_a=transposed[0], transpose_b=transposed[1])
    record, failures = products.run_case(case, ONCE, {})
    assert not failures and not record.skipped
    assert record.baselines["xla"] == record.bound_us > 0
    assert record.median_us is None  # no kernels here
    assert record.shape == [24, 16, 40] and record.method["calls"] == 60


@pytest.mark.parametrize("wrong", [lambda y: y * 1.01, lambda y: y.at[3, 3].set(jnp.nan)])
def test_a_wrong_product_gets_no_time(wrong, monkeypatch):
    right = products.reference.matmul
    monkeypatch.setattr(products.reference, "matmul", lambda *xs, **kws: wrong(right(*xs, **kws)))
    record, failures = products.run_case(TINY, ONCE, {})
    assert len(failures) == 1 and "relative error" in failures[0]
    assert "xla" in record.skipped and not record.baselines


def test_all_plans_are_timed_and_the_chosen_one_is_the_default(monkeypatch):
    best = matmul_model.choose(8192, 1280, 8192, 132)
    plans = [best, *(p for p in matmul_model.candidates(8192, 1280, 8192, 132) if p != best)]
    case = next(case for case in MATMULS if case.name == "mm-8192x1280x8192")
    found = products.products(case, plans, forced=True)
    assert list(found)[:2] == ["xla", "default"] and len(found) == len(plans) + 1
    assert any("by2" in products.label(plan) for plan in plans)
    assert list(products.products(case, plans, forced=False)) == ["xla", "default"]


def test_the_chain_makes_every_product():
    firsts, second = products.operands(TINY)
    fn = jax.jit(lambda firsts, b: products.chain(jnp.matmul, 7, firsts, b))
    assert fn.lower(firsts, second).as_text().count("dot_general") == 7

"""The benchmark of matrix products: what it times, and that a wrong product gets no time."""

import dataclasses
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "benchmarks"))
pytest.importorskip("products", reason="needs the checkout, not just the tests")

import grouped
import products

from pk_jax._bench import harness
from pk_jax._tuning import matmul_model
from pk_jax._tuning.matmul_cases import GROUPED, MATMULS, GroupedCase, MatmulCase

TINY = MatmulCase("mm-tiny", 24, 16, 40)
TINY_GROUPS = GroupedCase("gmm-tiny", 48, 16, 40, 10, "half-empty")
ONCE = harness.Method(sample_ms=0.0, samples=2, forced=True)


def test_cases_have_names_of_their_own():
    assert len({case.name for case in MATMULS}) == len(MATMULS)
    assert {tag for case in MATMULS for tag in case.tags} == {
        *("plain", "layout", "decode", "epilogue", "float8")
    }


@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
def test_a_case(transposed):
    case = dataclasses.replace(TINY, transpose_a=transposed[0], transpose_b=transposed[1])
    record, failures = products.run_case(case, ONCE, {}, products.MATMUL)
    assert not failures and not record.skipped
    assert record.baselines["xla"] == record.bound_us > 0
    assert record.median_us is None  # no kernels here
    assert record.shape == [24, 16, 40] and record.method["calls"] == 60


@pytest.mark.parametrize(
    "fields",
    [{"activation": "gelu"}, {"dtype": "float8_e4m3fn", "transpose_b": True}],
    ids=("epilogue", "float8"),
)
def test_a_case_with_more_than_the_product(fields):
    """What it has besides is in the product that is compared with."""
    case = dataclasses.replace(TINY, **fields)
    record, failures = products.run_case(case, ONCE, {}, products.MATMUL)
    assert not failures and record.baselines["xla"] > 0
    assert record.dtype == fields.get("dtype", "bfloat16")
    (pair, *_), more = products.operands(case)
    result = products.products(case, [], forced=False)["xla"](pair, more)
    bare = dataclasses.replace(case, activation=None)
    assert float(products.error(bare, result, pair, {})) > 0.1


@pytest.mark.parametrize("wrong", [lambda y: y * 1.01, lambda y: y.at[3, 3].set(jnp.nan)])
def test_a_wrong_product_gets_no_time(wrong, monkeypatch):
    right = products.reference.matmul
    monkeypatch.setattr(products.reference, "matmul", lambda *xs, **kws: wrong(right(*xs, **kws)))
    record, failures = products.run_case(TINY, ONCE, {}, products.MATMUL)
    assert len(failures) == 1 and "relative error" in failures[0]
    assert "xla" in record.skipped and not record.baselines


def test_a_way_that_is_left_out():
    record, failures = products.run_case(TINY, ONCE._replace(without=("xla",)), {}, products.MATMUL)
    assert not failures and record.ratio is None and not record.baselines


def test_all_plans_are_timed_and_the_chosen_one_is_the_default(monkeypatch):
    best = matmul_model.choose(8192, 1280, 8192, 132)
    plans = [best, *(p for p in matmul_model.candidates(8192, 1280, 8192, 132) if p != best)]
    case = next(case for case in MATMULS if case.name == "mm-8192x1280x8192")
    found = products.products(case, plans, forced=True)
    assert list(found)[:2] == ["xla", "default"] and len(found) == len(plans) + 1
    assert any("by2" in products.label(plan) for plan in plans)
    assert list(products.products(case, plans, forced=False)) == ["xla", "default"]


def test_the_chain_makes_every_product():
    pairs, other = products.operands(TINY)
    product = products.products(TINY, [], forced=False)["xla"]
    fn = jax.jit(lambda pairs: products.chain(product, 7, pairs, other))
    assert fn.lower(pairs).as_text().count("dot_general") == 7


def test_cases_of_groups():
    assert [case.name for case in GROUPED] == ["gmm-dsv3", "gmm-dsv3-zipf", "gmm-dsv3-half-empty"]
    sizes = [np.array(grouped.group_sizes(case)) for case in GROUPED]
    for case, found in zip(GROUPED, sizes, strict=True):
        assert len(found) == 128 and found.sum() == case.m
        checked = grouped.checked(case)
        assert len(set(checked)) == 6 and found[checked].min() > 0
        assert found[checked[0]] == found.max()
    uniform, zipf, half = sizes
    assert uniform.min() > 180 and uniform.max() < 330
    assert 5500 < zipf.max() < 6500 and zipf.argmax() > 0
    assert (half == 0).sum() == 64


@pytest.mark.parametrize("sizes", ["uniform", "zipf", "half-empty"])
def test_a_case_of_groups(sizes):
    case = dataclasses.replace(TINY_GROUPS, sizes=sizes)
    record, failures = products.run_case(case, ONCE, {}, grouped.RAGGED_DOT)
    assert not failures and not record.skipped
    assert record.op == "ragged_dot" and record.shape == [48, 16, 40, 10]
    assert record.baselines["xla"] == record.bound_us > 0 and record.median_us is None
    assert record.method["sizes"] == sizes and record.method["checked_groups"] > 1


def test_a_wrong_group_gets_no_time(monkeypatch):
    """The largest group by another's matrix; a NaN in a group that is not compared."""
    right = grouped.reference.ragged_dot
    case = dataclasses.replace(TINY_GROUPS, sizes="uniform")
    sizes = grouped.group_sizes(case)
    unchecked = next(i for i in range(10) if i not in grouped.checked(case) and sizes[i])
    row = sum(sizes[:unchecked])
    for wrong in (
        lambda lhs, rhs, *xs, **kws: right(lhs, jnp.roll(rhs, 1, 0), *xs, **kws),
        lambda *xs, **kws: right(*xs, **kws).at[row, 3].set(jnp.nan),
    ):
        monkeypatch.setattr(grouped.reference, "ragged_dot", wrong)
        record, failures = products.run_case(case, ONCE, {}, grouped.RAGGED_DOT)
        assert len(failures) == 1 and "relative error" in failures[0]
        assert "xla" in record.skipped and not record.baselines


def test_a_product_that_xla_has_no_memory_for(monkeypatch):
    """It is skipped; any other error of a run is one."""

    def fail_with(text):
        def fail(*_, **__):
            raise jax.errors.JaxRuntimeError(text)

        monkeypatch.setattr(products, "largest_error", fail)
        return products.run_case(TINY_GROUPS, ONCE, {}, grouped.RAGGED_DOT)

    record, failures = fail_with("RESOURCE_EXHAUSTED: too large\nmore")
    assert not failures and record.skipped == {"xla": "RESOURCE_EXHAUSTED: too large"}
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        fail_with("INTERNAL: an illegal address")

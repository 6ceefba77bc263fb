"""The benchmark of products with a sum: what it times, and that a wrong product gets no time."""

import pathlib
import sys

import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "benchmarks"))
pytest.importorskip("reduced", reason="needs the checkout, not just the tests")

import reduced

from pk_jax._bench import harness
from pk_jax._bench.ops import AXIS
from pk_jax._tuning import matmul_reduce_model as model
from pk_jax._tuning.fused_cases import MATMUL_ALL_REDUCES, MATMUL_REDUCE_SCATTERS, ReduceCase
from pk_jax._tuning.hardware import H200

ONCE = harness.Method(sample_ms=0.0, samples=2, forced=True)


@pytest.fixture
def mesh(mesh_of):
    return mesh_of(**{AXIS: 2})


def test_cases_have_names_of_their_own():
    names = [case.name for case in MATMUL_REDUCE_SCATTERS + MATMUL_ALL_REDUCES]
    assert len(set(names)) == len(names)
    assert all(case.name.startswith("mmrs-") for case in MATMUL_REDUCE_SCATTERS)
    assert all(case.name.startswith("mmar-") and case.all_reduce for case in MATMUL_ALL_REDUCES)


@pytest.mark.parametrize("all_reduce", (False, True))
def test_a_case(mesh, monkeypatch, all_reduce):
    monkeypatch.setattr(reduced.products, "MOST_CALLS", 8)
    tiny = ReduceCase("tiny", 32, 16, 40, all_reduce)
    record, failures = reduced.run_case(mesh, tiny, ONCE, {})
    assert not failures and not record.skipped
    assert set(record.baselines) == {"xla", "xla_dot"} and record.median_us is None  # no kernels
    assert record.bound_us == max(record.compute_us, record.link_us)
    assert record.link_us == pytest.approx((1 + all_reduce) * 2 * 32 * 16 / 2 / 370e3)
    assert (record.ranks, record.shape, record.method["calls"]) == (2, [32, 16, 40], 8)


def test_wrong_products_get_no_time(mesh, monkeypatch):
    """A little too large, or with one NaN, on one rank of two."""
    right = reduced.ways

    def ways(*args):
        found = right(*args)

        def spoiled(name, spoil):
            def way(x, w):
                y = found[name](x, w)
                return jnp.where(lax.axis_index(AXIS) == 1, spoil(y), y)

            return way

        return {
            "xla": spoiled("xla", lambda y: y * 1.01),
            "xla_dot": spoiled("xla_dot", lambda y: y.at[3, 3].set(jnp.nan)),
        }

    monkeypatch.setattr(reduced, "ways", ways)
    monkeypatch.setattr(reduced.products, "MOST_CALLS", 8)
    record, failures = reduced.run_case(mesh, ReduceCase("tiny", 32, 16, 40), ONCE, {})
    assert len(failures) == 2 and all("relative error" in failure for failure in failures)
    assert set(record.skipped) == {"xla", "xla_dot"} and not record.baselines


def test_ways_of_few_rows(mesh, monkeypatch):
    """Either protocol, the kernel of many rows, and the parts; more w than the L2 holds."""
    case = next(case for case in MATMUL_ALL_REDUCES if case.name == "mmar-m32")
    monkeypatch.setattr(reduced, "_draw", lambda shape, seed: jnp.full(shape[:1], seed))
    monkeypatch.setattr(reduced, "X", P())
    monkeypatch.setattr(reduced, "W", P())
    pairs = reduced.operands(mesh, case)
    assert len({int(w[0]) for _, w in pairs}) == 3
    plans = reduced.plans_of(mesh, case)
    assert list(reduced.ways(mesh, case, plans)) == [
        *("xla", "xla_dot", "pk_dot", "default", "few rows, simple", "lead 1", "unfused")
    ]
    targets = [reduced.target_of(case, plan) for plan in plans]
    op = "pk_jax_matmul_all_reduce"
    assert targets == [f"{op}_few_rows", f"{op}_few_rows", op]


def test_ways_are_those_of_the_plans(mesh):
    plans = [model.choose(H200, 4096, 1280, 1024, 2, lead=lead) for lead in (1, 2)]
    found = reduced.ways(mesh, MATMUL_REDUCE_SCATTERS[0], plans)
    assert list(found) == ["xla", "xla_dot", "pk_dot", "default", "lead 2"]

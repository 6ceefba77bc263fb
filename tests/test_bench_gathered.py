"""The benchmark of all_gather_matmul: what it times, and that a wrong product gets no time."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "benchmarks"))
pytest.importorskip("gathered", reason="needs the checkout, not just the tests")

import gathered

from pk_jax._bench import harness
from pk_jax._bench.ops import AXIS
from pk_jax._tuning import all_gather_matmul_model as model
from pk_jax._tuning.fused_cases import ALL_GATHER_MATMULS, GatherCase
from pk_jax._tuning.hardware import H200

TINY = GatherCase("agmm-tiny", 32, 16, 40)
ONCE = harness.Method(sample_ms=0.0, samples=2, forced=True)


@pytest.fixture
def mesh(mesh_of):
    return mesh_of(**{AXIS: 2})


def test_cases_have_names_of_their_own():
    names = [case.name for case in ALL_GATHER_MATMULS]
    assert len(set(names)) == len(names) and all(name.startswith("agmm-") for name in names)


def test_a_case(mesh, monkeypatch):
    monkeypatch.setattr(gathered.products, "MOST_CALLS", 8)
    record, failures = gathered.run_case(mesh, TINY, ONCE, {})
    assert not failures and not record.skipped
    assert set(record.baselines) == {"xla", "xla_dot"} and record.median_us is None  # no kernels
    assert record.compute_us == record.baselines["xla_dot"]
    assert record.bound_us == max(record.compute_us, record.link_us)
    assert record.link_us == pytest.approx(2 * 32 * 40 / 2 / 370e3)
    assert (record.ranks, record.shape, record.method["calls"]) == (2, [32, 16, 40], 8)


def test_wrong_products_get_no_time(mesh, monkeypatch):
    """A little too large, or with one NaN, on one rank of two."""
    right = gathered.ways

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

    monkeypatch.setattr(gathered, "ways", ways)
    monkeypatch.setattr(gathered.products, "MOST_CALLS", 8)
    record, failures = gathered.run_case(mesh, TINY, ONCE, {})
    assert len(failures) == 2 and all("relative error" in failure for failure in failures)
    assert set(record.skipped) == {"xla", "xla_dot"} and not record.baselines


def test_the_chain_makes_every_product(mesh):
    xs, w = gathered.operands(mesh, TINY)
    for name, way in gathered.ways(mesh, TINY, []).items():
        f = gathered.mapped(mesh, lambda xs, w, way=way: gathered._chain(way, 7, xs, w))
        assert f.lower(xs, w).as_text().count("dot_general") == 7, name


def test_ways_are_those_of_the_plans(mesh):
    best = model.choose(H200, 4096, 1280, 8192, 2)
    other = model.choose(H200, 4096, 1280, 8192, 2, num_comm_blocks=2)
    found = gathered.ways(mesh, TINY, [best, other])
    assert list(found) == ["xla", "xla_dot", "pk_dot", "default", f"{other.tile}/2"]


def test_gathered_rows_are_all_rows_on_each_device(mesh):
    (x, *_), _ = gathered.operands(mesh, TINY)
    rows = gathered.gathered(mesh, x)
    assert rows.shape == (2 * 32, 40)
    for shard in rows.addressable_shards:
        assert jnp.array_equal(jnp.asarray(shard.data), jax.device_get(x))

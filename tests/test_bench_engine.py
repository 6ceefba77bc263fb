"""The measuring engine: chains hold their calls, wrong results get no number, bounds hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pk_jax._bench import data, harness, library_counts, timing, variants
from pk_jax._bench.ops import AXIS, OPS
from pk_jax._tuning.collective_cases import COLLECTIVES, PREFIXES, CollectiveCase, collective_cases

CASE = CollectiveCase("ag-test", "all_gather", (4, 6), axis=1)
STAMP = {
    "date": "2026-01-01T00:00:00+00:00", "gpu": "cpu", "driver": None, "cuda": None,
    "jax": jax.__version__, "commit": None,
}  # fmt: skip
ONCE = harness.Method(sample_ms=0.0, samples=1)


def bench_of(ranks):
    return harness.Bench(jax.make_mesh((ranks,), (AXIS,), devices=jax.devices("cpu")[:ranks]))


@pytest.fixture(scope="module")
def bench():
    return bench_of(2)


@pytest.fixture
def short(monkeypatch):
    """Chains of four calls, so that a test compiles little."""
    monkeypatch.setattr(variants, "SMALL_CALLS", 4)


LEADING = CollectiveCase("ag-leading", "all_gather", (24,))


# Chains


def test_every_call_of_a_chain_is_behind_a_barrier(bench):
    call = OPS["all_gather"].call(lax, LEADING, 2)
    chain = bench.sharded(lambda *xs: timing.chain(call, 7, xs), 3)
    text = chain.lower(*bench.operands(LEADING, 3)).as_text()
    assert text.count("stablehlo.all_gather") == 7
    assert text.count("stablehlo.optimization_barrier") == 8


def test_results_stay_alive_through_two_barriers():
    """A result that one barrier alone reads is dropped by XLA, and its call with it."""

    def chain(x):
        return timing.chain(lambda x: lax.exp(x), 6, [x])

    eqns = jax.make_jaxpr(chain)(jnp.ones(3)).eqns
    results = [eqn.outvars[0] for eqn in eqns if eqn.primitive.name == "exp"]
    barriers = [eqn.invars for eqn in eqns if eqn.primitive.name == "optimization_barrier"]
    readers = [sum(result in operands for operands in barriers) for result in results]
    assert readers == [2, 2, 2, 2, 2, 1]  # the last one is the chain's result


@pytest.mark.parametrize("axis", [0, 1])
def test_compiled_chain_holds_its_calls_and_is_right(bench, axis):
    case = CollectiveCase("ag-test", "all_gather", (4, 6), axis=axis)
    operands = bench.operands(case, 2)
    call = variants.of_case(case, 2, forced=False)["default"].call
    chain = bench.sharded(lambda *xs: timing.chain(call, 5, xs, keep_all=True), 2)
    compiled = chain.lower(*operands).compile()
    timing.check_calls(compiled.as_text(), "all-gather", 5, None)
    for i, result in enumerate(compiled(*operands)):
        assert bench.wrong_elements(case, result, i % 2) == 0


def test_a_carried_chain_writes_one_result_after_another():
    calls = timing.carried_chain(lambda x, y: 10 * y + x, 3, [1, 2], 7)
    assert calls == 7121
    carried = timing.Carried(lambda x, y: y + x, 5)
    assert (carried(1), carried(2), carried.result) == (6, 8, 8)


def test_dependent_chain_alternates(bench):
    calls = timing.dependent_chain(lambda x: x + 1, 3, jnp.zeros(()), lambda y: 10 * y)
    assert calls == 111


HLO = """
%fused (param_0: bf16[4]) -> bf16[4] {
  %param_0 = bf16[4]{0} parameter(0)
  ROOT %negate.1 = bf16[4]{0} negate(%param_0)
}
ENTRY %main (x: bf16[4]) -> bf16[8] {
  %x = bf16[4]{0} parameter(0)
  %call.1 = bf16[8]{0} custom-call(%x), custom_call_target="pk_jax_all_gather", api_version=1
  %tuple.1 = (bf16[4]{0}, /*index=1*/bf16[8]{0}) tuple(%x, %call.1)
  %gte = bf16[4]{0} get-tuple-element(%tuple.1), index=0
  %start = (bf16[4]{0}, bf16[8]{0:T(8,128)}) all-gather-start(%gte), channel_id=1
  %done = bf16[8]{0} all-gather-done(%start)
  ROOT %call.2 = bf16[8]{0} custom-call(%gte), custom_call_target="pk_jax_all_gather"
}
"""


def test_count_instructions():
    counts = timing.count_instructions(HLO)
    assert counts["pk_jax_all_gather"] == 2
    assert counts["all-gather"] == 1
    assert counts["negate"] == 1


def test_check_calls_refuses_other_numbers_and_other_kernels():
    with pytest.raises(timing.ChainError, match="holds 2 pk_jax_all_gather, not 3"):
        timing.check_calls(HLO, "pk_jax_all_gather", 3)
    with pytest.raises(timing.ChainError, match="other kernels"):
        timing.check_calls(HLO, "pk_jax_all_gather", 2)
    timing.check_calls(HLO, "pk_jax_all_gather", 2, frozenset({"all-gather", "negate"}))
    timing.check_calls(HLO, "pk_jax_all_gather", 2, None)


def test_other_kernels():
    counts = timing.other_kernels(HLO, "pk_jax_all_gather")
    assert counts == {"all-gather": 1, "negate": 1}


def test_runs_per_sample():
    assert timing.runs_per_sample(60, 4.0, 20.0) == 84
    assert timing.runs_per_sample(8, 3000.0, 20.0) == 1


def test_a_slow_program_gets_fewer_samples_but_its_50_calls():
    assert timing.affordable_samples(0.001, 1, 60, 50, budget_s=3.0) == 50
    assert timing.affordable_samples(0.5, 1, 60, 50, budget_s=3.0) == 6
    assert timing.affordable_samples(9.0, 1, 60, 50, budget_s=3.0) == 3
    assert timing.affordable_samples(9.0, 1, 8, 50, budget_s=3.0) == 7  # 56 calls


def test_samples_are_counted():
    program = timing.Program(lambda: jnp.zeros(()), (), 60)
    times = timing.time_programs({"a": program}, 0.0, samples=4, budget_s=1e-9)
    assert times["a"].samples == 3


# Cases


def test_cases_have_names_of_their_own():
    assert len({case.name for case in COLLECTIVES}) == len(COLLECTIVES)
    for op in PREFIXES:
        sizes = [case.nbytes for case in collective_cases(op, "sweep")]
        assert (min(sizes), max(sizes), len(set(sizes))) == (1 << 10, 1 << 30, 14)
        assert len(collective_cases(op, "quick")) >= 4


def test_cases_with_a_target_are_the_targets():
    names = {case.name for case in collective_cases(tag="target")}
    assert names == {
        *("ag-16K", "ag-32M", "ag-256M", "a2a-32M", "a2a-256M", "pp-32M", "pp-256M"),
        *("rs-32M", "rs-256M", "ar-8K", "ar-512K", "ar-4M", "ar-64M"),
    }


def test_other_layouts_have_a_leading_case_of_their_size():
    named = {case.name: case for case in COLLECTIVES}
    strided = collective_cases(tag="strided")
    assert {case.op for case in strided} == {"all_gather", "psum_scatter", "all_to_all"}
    for case in strided:
        assert case.strided
        assert named[case.leading].nbytes == case.nbytes
        assert named[case.leading].op == case.op


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_chain_lengths(ranks):
    for case in COLLECTIVES:
        calls = variants.chain_length(case, ranks)
        assert calls == 60 if case.nbytes <= variants.SMALL_BYTES else 8 <= calls <= 60
        assert calls % 2 == 0 or case.nbytes > variants.SMALL_BYTES  # see build_dependent
        if case.nbytes >= 64 << 20:
            assert calls * variants.expected_us(case, ranks) >= 6e3


# Ops


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    "case",
    [
        CollectiveCase("ag", "all_gather", (10,)),
        CollectiveCase("ag-middle", "all_gather", (3, 4, 5), axis=1),
        CollectiveCase("ar", "psum", (7, 3)),
        CollectiveCase("rs", "psum_scatter", (24, 2)),
        CollectiveCase("rs-last", "psum_scatter", (2, 3, 12), axis=2),
        CollectiveCase("a2a", "all_to_all", (24,)),
        CollectiveCase("a2a-forth", "all_to_all", (2, 5, 12, 3), axis=2, concat_axis=1),
        CollectiveCase("a2a-back", "all_to_all", (2, 12, 5, 3), axis=1, concat_axis=2),
        CollectiveCase("pp", "ppermute", (5, 2)),
    ],
    ids=lambda case: case.name,
)
def test_expected_results_are_lax_s(case, ranks):
    bench, op = bench_of(ranks), OPS[case.op]
    (x,) = bench.operands(case, 1)
    result = bench.sharded(op.call(lax, case, ranks), 1)(x)
    assert result.addressable_shards[0].data.shape == op.result_shape(case, ranks)
    assert bench.wrong_elements(case, result, 0) == 0
    assert bench.wrong_elements(case, result, 1) > 0  # another data set
    one_off = jnp.asarray(np.asarray(result))
    one_off = one_off.at[(1,) * one_off.ndim].add(1)
    assert bench.wrong_elements(case, jax.device_put(one_off, result.sharding), 0) == 1


@pytest.mark.parametrize("updates", [1, 3])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_expected_ragged_result(ranks, updates):
    """The slices, moved one by one with NumPy."""
    case = CollectiveCase("ragged", "ragged_all_to_all", (41, 2), updates=updates)
    op, bench = OPS[case.op], bench_of(ranks)
    starts, sent, there, received = op.arguments(case, ranks)
    x = np.asarray(bench.operands(case, 1)[0]).reshape(ranks, 41, 2)
    out = np.zeros((ranks, *op.result_shape(case, ranks)), x.dtype)
    for rank in range(ranks):
        for i in range(ranks * updates):
            peer, rows = i // updates, sent[rank, i]
            begin, to = starts[rank, i], there[rank, i]
            out[peer, to : to + rows] = x[rank, begin : begin + rows]
            assert received[peer, rank * updates + i % updates] == rows
    assert sent.sum() == ranks * 41
    result = jax.device_put(out.reshape(-1, 2), bench.operands(case, 1)[0].sharding)
    assert bench.wrong_elements(case, result, 0) == 0
    assert bench.wrong_elements(case, -result, 0) > 0
    remote = sum(
        sent[r, i] for r in range(ranks) for i in range(ranks * updates) if i // updates != r
    )
    assert op.link_bytes(case, ranks) * ranks >= remote * 4


@pytest.mark.parametrize("op", PREFIXES)
def test_a_case_runs_and_has_its_record(op, short):
    case = CollectiveCase("case", op, (101, 2))
    bench = bench_of(3)
    record, failures = harness.run_case(bench, OPS[op].fit(case, 3), ONCE, STAMP)
    assert failures == []
    assert record.op == op
    assert set(record.skipped) >= set(OPS[op].mechanisms)  # no CUDA here
    assert record.gbps == pytest.approx(record.method["link_bytes"] / record.median_us / 1e3)
    assert record.method["samples"]["default"] == 1


def test_link_bytes():
    size = {op: CollectiveCase("case", op, (800,)) for op in OPS}  # 1600 bytes
    found = {op: OPS[op].link_bytes(case, 4) for op, case in size.items() if not OPS[op].carried}
    assert found == {
        "all_gather": 4800, "psum": 2400, "psum_scatter": 1200, "all_to_all": 1200,
        "ppermute": 1600,
    }  # fmt: skip


def test_the_dimension_that_is_cut_is_rounded_up():
    case = CollectiveCase("rs", "psum_scatter", (4, 10), axis=1)
    assert OPS["psum_scatter"].fit(case, 3).shape == (4, 12)
    assert OPS["psum"].fit(case, 3) == case


class CountingLibrary:
    """Two ranks of this process, whose first communicator is made by the first run."""

    def __init__(self, a_call):
        self.a_call, self.launched = a_call, None

    def communicators(self):
        if self.launched is None:
            self.launched = 0
            return []
        self.launched += self.a_call
        common = {"num_ranks": 2, "launches": self.launched, "workspace_bytes": 8}
        return [{"device": i, "rank": i} | common for i in range(2)]


@pytest.mark.parametrize("a_run, launches", [(4, 1), (8, 2), (5, None), (0, None)])
def test_launches_are_counted(a_run, launches, bench, monkeypatch, short):
    monkeypatch.setattr(library_counts._registry, "library", CountingLibrary(a_run))
    operands = bench.operands(CASE, 2)
    variant = variants.of_case(CASE, 2, forced=False)["nccl"]
    assert harness.build(bench, "nccl", variant, operands).launches == launches


def test_launches_of_ranks_that_differ():
    before = {(0, 0, 2): 3}
    assert library_counts.launches_a_call(before, {(0, 0, 2): 7, (1, 1, 2): 4}, 4) == 1
    assert library_counts.launches_a_call(before, {(0, 0, 2): 7, (1, 1, 2): 8}, 4) is None
    assert library_counts.launches_a_call(None, None, 4) is None


def test_plan_is_read_from_the_call():
    text = (
        '%0 = stablehlo.custom_call @pk_jax_psum(%arg0) {backend_config = {algorithm = "two_shot"'
        ', mechanism = "register", num_blocks = 16 : i64, protocol = "simple"}} : (tensor<4xf32>)\n'
    )
    assert variants.plan_of(text, "pk_jax_psum") == {
        "implementation": "cuda", "mechanism": "register", "protocol": "simple",
        "algorithm": "two_shot", "num_blocks": 16,
    }  # fmt: skip
    assert variants.plan_of(text, "pk_jax_psum_scatter") == {"implementation": "reference"}


def test_data_differ_between_ranks_and_sets():
    position = jnp.arange(64, dtype=jnp.uint32)
    for summed in (False, True):
        shards = [
            np.asarray(data.value(r, s, position, summed).astype(jnp.float32))
            for r in (0, 1)
            for s in (0, 1)
        ]
        assert len({shard.tobytes() for shard in shards}) == 4
        values = np.abs(shards[0])
        if summed:
            assert np.array_equal(values, np.round(values)) and values.max() <= 16
        else:
            assert values.min() >= 0.5 and values.max() < 1.0


def test_a_wrong_result_gets_no_number(bench, monkeypatch, short):
    right = variants.of_case(CASE, 2, forced=False)["default"]
    found = {
        "nccl": right._replace(vendor=True),
        "default": right._replace(call=lambda x: right.call(-x)),
        "tma": right,
    }
    monkeypatch.setattr(variants, "of_case", lambda *args: found)
    record, failures = harness.run_case(bench, CASE, ONCE, STAMP)
    assert any("default" in failure and "wrong elements" in failure for failure in failures)
    assert record.median_us is None
    assert record.gbps is None
    assert "refused" in record.skipped["default"]
    assert record.candidates["tma"] > 0
    assert record.baselines["nccl"] > 0


def raises(error):
    def call(x):
        raise error

    return call


@pytest.mark.parametrize(
    "error",
    (
        ValueError("no such thing"),
        NotImplementedError("no such thing"),
        jax.errors.JaxRuntimeError("UNIMPLEMENTED: no such thing"),
    ),
    ids=lambda error: type(error).__name__,
)
def test_pk_itself_must_be_measured(error, bench, monkeypatch, short):
    right = variants.of_case(CASE, 2, forced=False)["default"]
    wrong = right._replace(call=raises(error))
    found = {"nccl": wrong._replace(vendor=True), "default": right, "tma": wrong}
    monkeypatch.setattr(variants, "of_case", lambda *args: found)
    record, failures = harness.run_case(bench, CASE, ONCE, STAMP)
    assert not failures and set(record.skipped) == {"nccl", "tma"}
    found["default"] = wrong
    record, (failure,) = harness.run_case(bench, CASE, ONCE, STAMP)
    assert failure.startswith(f"{CASE.name} default: ") and "no such thing" in failure
    assert record.median_us is None and "default" in record.skipped


# What the chains become for CUDA


@pytest.mark.parametrize("op", [op for op in PREFIXES if op != "ragged_all_to_all"])
@pytest.mark.parametrize("elements", [4096, 4 << 20])
def test_plan_of_a_lowered_call(op, elements, can_run, lowered):
    case = CollectiveCase("case", op, (elements,))
    bench = bench_of(4)
    names = variants.of_case(case, 4, forced=True)
    assert set(names) == {"nccl", "default", *OPS[op].mechanisms}
    sharding = NamedSharding(bench.mesh, P(AXIS))
    x = jax.ShapeDtypeStruct((4 * elements,), data.DTYPE, sharding=sharding)
    for name, variant in names.items():
        fn = bench.sharded(lambda x, call=variant.call: timing.chain(call, 3, [x]), 1)
        text = lowered(fn, x)
        plan = variants.plan_of(text, OPS[op].target)
        if name == "nccl":
            assert plan == {"implementation": "reference"}
            continue
        assert text.count(f"custom_call @{OPS[op].target}(") == 3
        assert plan["mechanism"] in ("register", "tma", "copy_engine")
        assert plan["mechanism"] == name or name == "default"
        small = elements == 4096 and plan["mechanism"] == "register"
        assert plan["protocol"] == ("ll" if small else "simple")
        assert ("algorithm" in plan) == (op == "psum")

"""The harness measures what it says: chains hold their calls, wrong results get no number."""

import json
import pathlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

# run.py imports its neighbours by their plain names.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "benchmarks"))

import all_gather
import calls
import launch
import library_counts
import records
import report
import run
import timing

from pk_jax._tuning import cases, hardware

RANKS = 2
CASE = all_gather.Case("ag-test", (4, 6), 1, frozenset({"quick"}))
STAMP = {
    "date": "2026-01-01T00:00:00+00:00", "gpu": "cpu", "driver": None, "cuda": None,
    "jax": jax.__version__, "commit": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def bench():
    return all_gather.Bench(jax.make_mesh((RANKS,), ("x",), devices=jax.devices("cpu")[:RANKS]))


# Chains


def test_every_call_of_a_chain_is_behind_a_barrier(bench):
    call = all_gather.nccl_call(CASE._replace(axis=0))
    chain = bench.sharded(lambda *xs: timing.chain(call, 7, xs), 3)
    text = chain.lower(*bench.operands(CASE, 3)).as_text()
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
    case = CASE._replace(axis=axis)
    operands = bench.operands(case, 2)
    call = all_gather.pk_call(case, None)
    chain = bench.sharded(lambda *xs: timing.chain(call, 5, xs, keep_all=True), 2)
    compiled = chain.lower(*operands).compile()
    timing.check_calls(compiled.as_text(), "all-gather", 5, None)
    for i, result in enumerate(compiled(*operands)):
        assert bench.wrong_elements(case, result, i % 2) == 0


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


def test_runs_per_sample():
    assert timing.runs_per_sample(60, 4.0, 20.0) == 84
    assert timing.runs_per_sample(8, 3000.0, 20.0) == 1


# all_gather


def test_cases_have_names_of_their_own():
    found = all_gather.cases()
    assert len({case.id for case in found}) == len(found)
    sizes = [case.nbytes for case in found if "bench" in case.tags]
    assert (min(sizes), max(sizes)) == (1 << 10, 1 << 30)
    quick = {case.id for case in found if "quick" in case.tags}
    assert quick == {"ag-16K", "ag-32M", "ag-256M", "ag-32M-axis1"}


def test_cases_are_the_shared_ones():
    shared = [*cases.all_gather_cases("bench"), *cases.all_gather_cases("strided")]
    assert [case.id for case in all_gather.cases()] == [case.name for case in shared]
    assert all(case.dtype == np.dtype(all_gather.DTYPE).name and case.tiled for case in shared)


class CountingLibrary:
    """Two ranks of this process, whose first communicator is made by the first run."""

    def __init__(self, a_call):
        self.a_call, self.launched = a_call, None

    def communicators(self):
        if self.launched is None:
            self.launched = 0
            return []
        self.launched += self.a_call
        return [
            {
                "device": i,
                "rank": i,
                "num_ranks": 2,
                "launches": self.launched,
                "workspace_bytes": 8,
            }
            for i in range(2)
        ]


@pytest.mark.parametrize("a_run, launches", [(4, 1), (8, 2), (5, None), (0, None)])
def test_launches_are_counted(a_run, launches, bench, monkeypatch):
    monkeypatch.setattr(all_gather, "SMALL_CALLS", 4)
    monkeypatch.setattr(library_counts._registry, "library", CountingLibrary(a_run))
    operands = bench.operands(CASE, 2)
    call = all_gather.nccl_call(CASE)
    assert all_gather.build(bench, CASE, "nccl", call, operands).launches == launches


def test_launches_of_ranks_that_differ():
    before = {(0, 0, 2): 3}
    assert library_counts.launches_a_call(before, {(0, 0, 2): 7, (1, 1, 2): 4}, 4) == 1
    assert library_counts.launches_a_call(before, {(0, 0, 2): 7, (1, 1, 2): 8}, 4) is None
    assert library_counts.launches_a_call(None, None, 4) is None


def test_the_bound_is_of_the_hardware_record():
    assert hardware.H200.store_peak / 1e6 == records.LINK_BYTES_PER_US
    assert hardware.H200.flag_latency * 1e6 == records.FLAG_US


def test_chain_lengths():
    for case in all_gather.cases():
        calls = all_gather.chain_length(case, 2)
        assert calls == 60 if case.nbytes <= all_gather.SMALL_BYTES else 8 <= calls <= 60
        assert calls % 2 == 0 or case.nbytes > all_gather.SMALL_BYTES  # see build_dependent
        if case.nbytes >= 32 << 20:
            assert calls * all_gather.expected_us(case, 2) >= 6e3


def test_plan_is_read_from_the_call():
    text = (
        "%0 = stablehlo.custom_call @pk_jax_all_gather(%arg0) {backend_config = {channel = 0 : i64"
        ', mechanism = "tma", num_blocks = 16 : i64, protocol = "simple"}} : (tensor<4xbf16>)\n'
    )
    assert all_gather.plan_of(text) == {
        "implementation": "cuda", "mechanism": "tma", "protocol": "simple", "num_blocks": 16,
    }  # fmt: skip
    assert all_gather.plan_of("%0 = stablehlo.all_gather") == {"implementation": "reference"}


def test_wrong_results_are_counted(bench):
    (x,) = bench.operands(CASE, 1)
    right = bench.sharded(all_gather.nccl_call(CASE), 1)(x)
    assert bench.wrong_elements(CASE, right, 0) == 0
    assert bench.wrong_elements(CASE, right, 1) > 0
    one_off = jnp.asarray(np.asarray(right)).at[1, 1].multiply(-1)
    one_off = jax.device_put(one_off, right.sharding)
    assert bench.wrong_elements(CASE, one_off, 0) == 1


def test_data_differ_between_ranks_and_sets():
    shards = [np.asarray(all_gather.shard_of(r, s, (64,))) for r in (0, 1) for s in (0, 1)]
    assert len({shard.tobytes() for shard in shards}) == 4
    values = np.abs(shards[0].astype(np.float32))
    assert values.min() >= 0.5
    assert values.max() < 1.0


def test_a_wrong_result_gets_no_number(bench, monkeypatch):
    monkeypatch.setattr(all_gather, "SMALL_CALLS", 4)
    right = all_gather.nccl_call(CASE)
    monkeypatch.setattr(
        all_gather, "pk_call", lambda case, mechanism: lambda x: right(x if mechanism else -x)
    )
    record, failures = all_gather.run_case(bench, CASE, 0.0, 1, STAMP)
    assert any("default" in failure and "wrong elements" in failure for failure in failures)
    assert record.median_us is None
    assert record.gbps is None
    assert "refused" in record.skipped["default"]
    assert record.candidates["tma"] > 0
    assert record.baselines["nccl"] > 0


def test_run_times_and_writes(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(all_gather, "SMALL_CALLS", 4)
    monkeypatch.setattr(all_gather, "cases", lambda: [CASE])
    command = ["--op", "all_gather", "--samples", "1", "--sample-ms", "0", "--out", str(tmp_path)]
    assert run.main(command) == 0
    (path,) = tmp_path.glob("*/all_gather.jsonl")
    assert path.parent.name.endswith(f"x{jax.device_count()}")
    (record,) = records.load(path)
    assert record.id == "ag-test"
    assert record.median_us > 0
    assert record.max_rel_err == 0.0
    assert record.jax == jax.__version__
    assert record.method["calls"] == 4
    assert "ag-test" in capsys.readouterr().out


def test_select():
    found = all_gather.cases()
    assert {c.id for c in run.select(found, "strided", False)} >= {"ag-32M-axis1", "ag-16M-heads"}
    assert [c.id for c in run.select(found, "ag-1G", False)] == ["ag-1G"]
    with pytest.raises(SystemExit, match="no case matches"):
        run.select(found, "ag-7K", False)


# Calls


def test_the_empty_call_is_the_custom_call(bench):
    chain = bench.sharded(lambda x: timing.dependent_chain(calls.empty_call, 5, x, lambda y: y), 1)
    text = chain.lower(bench.operands(CASE, 1)[0]).as_text()
    assert text.count("custom_call @pk_jax_noop") == 5


def lax_for_pk(monkeypatch):
    def gather(x, axis_name, *, tiled, implementation):
        return lax.all_gather(x, axis_name, tiled=tiled)

    monkeypatch.setattr(calls, "pk", types.SimpleNamespace(all_gather=gather))


def test_host_cost(bench, monkeypatch):
    lax_for_pk(monkeypatch)
    # A collective of one shape stands in for the custom call, which has no CPU handler.
    monkeypatch.setattr(calls, "empty_call", lambda x: lax.ppermute(x, "x", [(0, 1), (1, 0)]))
    monkeypatch.setattr(timing, "check_calls", lambda *args: None)
    monkeypatch.setattr(calls, "NUM_CALLS", 4)
    monkeypatch.setattr(all_gather, "SMALL_CALLS", 4)
    ((found, failures),) = calls.host_cost(bench.mesh, 0.0, 2, STAMP)
    assert failures == []
    assert found.candidates["difference"] == found.median_us - found.baselines["empty"]
    assert found.bound_us == found.baselines["empty"] + records.FLAG_US


@pytest.mark.parametrize("order", run.FIRST_USE_ORDERS)
def test_first_use_times_each_first_call(bench, monkeypatch, order):
    lax_for_pk(monkeypatch)
    times = calls.first_use_once(bench.mesh, order)
    turns = ("first", "second")
    assert list(times) == [f"{name}_{turn}_ms" for name in order.split("+") for turn in turns]
    assert min(times.values()) > 0


def test_first_use_record_takes_medians():
    def three(**fields):
        return [{k: v + i for k, v in fields.items()} for i in (1, 0, 2)]

    runs = {
        "lax": three(lax_first_ms=300.0, lax_second_ms=1.0),
        "lax+pk": three(lax_first_ms=300.0, lax_second_ms=1.0, pk_first_ms=40.0, pk_second_ms=1.0),
        "pk": three(pk_first_ms=320.0, pk_second_ms=1.0),
    }
    found = calls.first_use_record(runs, 2, 1, STAMP)
    assert (found.p10_us, found.median_us, found.p90_us) == (40e3, 41e3, 42e3)
    assert found.baselines["nccl_first"] == 301e3
    assert found.candidates == {"pk_alone": 321e3, "pk_beyond_nccl": 20e3}


# Records


def record(**fields):
    return records.Record(
        **({"id": "ag-1M", "op": "all_gather", "ranks": 2, "processes": 1} | fields)
    )


def test_the_newest_record_of_a_case_replaces_the_last(tmp_path):
    path = tmp_path / "box" / "all_gather.jsonl"
    records.save(path, [record(median_us=5.0), record(id="ag-2M", median_us=7.0)])
    records.save(path, [record(median_us=4.0), record(processes=2, median_us=6.0)])
    found = [(r.id, r.processes, r.median_us) for r in records.load(path)]
    assert found == [("ag-1M", 1, 4.0), ("ag-2M", 1, 7.0), ("ag-1M", 2, 6.0)]
    assert [p.name for p in path.parent.iterdir()] == ["all_gather.jsonl"]


def test_records_have_the_common_fields(tmp_path):
    path = tmp_path / "all_gather.jsonl"
    records.save(path, [record(median_us=1 / 3)])
    row = json.loads(path.read_text())
    common = (
        "id op ranks processes dtype shape config median_us p10_us p90_us bound_us compute_us "
        "link_us ratio gbps tflops baselines max_rel_err sms launches extra_bytes date gpu driver "
        "cuda jax commit"
    )
    assert set(common.split()) <= set(row)
    assert row["median_us"] == 0.33333
    assert row["tflops"] is None


def test_fields_of_other_versions_do_not_break_loading(tmp_path):
    path = tmp_path / "all_gather.jsonl"
    row = {"id": "a", "op": "all_gather", "ranks": 2, "processes": 1, "colour": "blue"}
    path.write_text(json.dumps(row) + "\n\n")
    assert records.load(path)[0].id == "a"


def test_box_name():
    assert records.box_name("NVIDIA H200", "gpu", 2) == "h200x2"
    assert records.box_name("NVIDIA H100 80GB HBM3", "gpu", 8) == "h100-80gb-hbm3x8"
    assert records.box_name("cpu", "cpu", 8) == "cpux8"


def test_bound_rises_with_size():
    sizes = [1 << k for k in range(10, 31)]
    bounds = [records.gather_bound_us(size, 2)[0] for size in sizes]
    assert bounds == sorted(bounds)
    assert bounds[0] == pytest.approx(3.7, abs=0.01)
    assert records.gather_bound_us(256 << 20, 2)[0] == pytest.approx(725.5, abs=0.1)
    assert records.gather_bound_us(1 << 20, 8)[1] == pytest.approx(7 * 2.834, abs=0.01)


def test_provenance_names_versions():
    stamp = records.provenance("abc")
    assert stamp["commit"] == "abc"
    assert stamp["jax"] == jax.__version__
    assert stamp["date"].endswith("+00:00")


# Report


def test_replace_marked():
    text = "a\n<!-- bench:t -->\nold\n<!-- /bench:t -->\nz\n"
    once = report.replace_marked(text, "t", "new\nlines\n")
    assert once == "a\n<!-- bench:t -->\nnew\nlines\n<!-- /bench:t -->\nz\n"
    assert report.replace_marked(once, "t", "new\nlines\n") == once


@pytest.mark.parametrize(
    "text",
    ["nothing", "<!-- bench:t -->", "<!-- /bench:t --><!-- bench:t -->", "<!-- bench:t -->" * 2],
)
def test_replace_marked_needs_one_pair(text):
    with pytest.raises(ValueError, match="once each"):
        report.replace_marked(text, "t", "x")


def gpu_records():
    rows = []
    for case in all_gather.cases():
        us = 4.0 + case.nbytes / 350e3
        rows.append(
            record(
                id=case.id,
                shape=list(case.shape),
                config={"implementation": "cuda", "mechanism": "tma", "protocol": "simple"},
                median_us=us,
                bound_us=records.gather_bound_us(case.nbytes, 2)[0],
                gbps=case.nbytes / us / 1e3,
                ratio=1.1,
                speedup=1.4,
                baselines={"nccl": 1.4 * us},
                candidates={"tma": us, "copy_engine": 2 * us},
                method={"axis": case.axis, "bytes_per_rank": case.nbytes},
                date="2026-12-01T10:00:00+00:00",
                gpu="NVIDIA H200",
                driver="580.159",
                cuda="13.0",
                jax="0.11.2",
                commit="abc1234",
            )
        )
    return rows


def test_report_writes_table_and_curve(tmp_path, capsys):
    records.save(tmp_path / "results" / "h200x2" / "all_gather.jsonl", gpu_records())
    readme = tmp_path / "README.md"
    readme.write_text("# x\n<!-- bench:all_gather -->\n<!-- /bench:all_gather -->\nend\n")
    image = tmp_path / "docs" / "all_gather.png"
    command = [
        "--results", str(tmp_path / "results"), "--readme", str(readme), "--image", str(image),
    ]  # fmt: skip
    assert report.main([*command, "--check"]) == 1
    assert report.main(command) == 0
    assert report.main([*command, "--check"]) == 0
    text = readme.read_text()
    assert "| 256 MiB a rank | 2 | 1 | tma | 771 | 1079 | 1.40x | 348 | 1.10 |" in text
    assert "(4096x4096, axis 1)" in text
    assert "2x NVIDIA H200, driver 580.159, CUDA 13.0" in text
    assert text.endswith("<!-- /bench:all_gather -->\nend\n")
    assert image.read_bytes().startswith(b"\x89PNG")


def test_report_without_records(tmp_path, capsys):
    assert report.main(["--results", str(tmp_path)]) == 1
    assert "no records" in capsys.readouterr().err


# Processes


def test_processes_get_their_rank_and_address():
    program = "import sys; print(sys.argv[1:]) if sys.argv[-1] == '0' else None"
    out = launch.run_processes([sys.executable, "-c", program], 2, timeout_s=60, capture=True)
    assert "'--job-size', '2', '--job-rank', '0'" in out
    assert "127.0.0.1:" in out


def test_a_failed_process_ends_the_others():
    program = "import sys, time; time.sleep(600) if sys.argv[-1] == '0' else sys.exit(3)"
    with pytest.raises(RuntimeError, match="process 1 of 2 ended with code 3"):
        launch.run_processes([sys.executable, "-c", program], 2, timeout_s=60)


def test_a_job_without_end_is_cut_short():
    program = "import time; time.sleep(600)"
    with pytest.raises(RuntimeError, match="did not end within"):
        launch.run_processes([sys.executable, "-c", program], 1, timeout_s=0.3)

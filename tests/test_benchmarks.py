"""The checkout's benchmarks: their command line, their reports, and what they measure besides."""

import dataclasses
import pathlib
import sys
import types

import jax
import pytest
from jax import lax

# run.py imports its neighbours by their plain names.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "benchmarks"))

import calls
import launch
import mixed
import report
import run

from pk_jax._bench import collective_matmul, harness, records, reduced, timing, variants
from pk_jax._bench.ops import AXIS, OPS
from pk_jax._tuning import collective_cases

STAMP = {
    "date": "2026-01-01T00:00:00+00:00", "gpu": "cpu", "driver": None, "cuda": None,
    "jax": jax.__version__, "commit": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def bench():
    return harness.Bench(jax.make_mesh((2,), (AXIS,), devices=jax.devices("cpu")[:2]))


# The command line


def test_run_times_and_writes(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(variants, "SMALL_CALLS", 4)
    tiny = (
        collective_cases.CollectiveCase("ag-t", "all_gather", (4, 8), tags=frozenset({"sweep"})),
        collective_cases.CollectiveCase("rs-t", "psum_scatter", (8,), tags=frozenset({"target"})),
    )
    monkeypatch.setattr(collective_cases, "COLLECTIVES", tiny)
    command = ["--op", "collectives", "--samples", "1", "--sample-ms", "0", "--out", str(tmp_path)]
    assert run.main(command) == 0
    (path,) = tmp_path.glob("*/all_gather.jsonl")
    assert path.parent.name.endswith(f"x{jax.device_count()}")
    (record,) = records.load(path)
    assert record.id == "ag-t"
    assert record.median_us > 0
    assert record.max_rel_err == 0.0
    assert record.jax == jax.__version__
    assert record.method["calls"]["default"] == 4
    assert records.load(path.with_name("psum_scatter.jsonl"))[0].id == "rs-t"
    shown = capsys.readouterr().out
    assert shown.index("rs-t") < shown.index("ag-t")  # what has a target comes first
    assert run.main([*command, "--budget", "0", "--commit", "abc"]) == 0
    shown = capsys.readouterr()
    assert "budget" in shown.err and "ag-t" not in shown.out


def test_select():
    names = [c.name for c in run.select(["collectives"], ["target"], False)]
    assert len(names) == 13 and {"ar-8K", "pp-256M"} <= set(names)
    strided = run.select(["all_gather"], ["strided"], False)
    assert {c.name for c in strided} >= {"ag-32M-axis1", "ag-16M-heads"}
    assert [c.name for c in run.select(["psum"], ["ar-1G", "ag-1G"], False)] == ["ar-1G"]
    quick = run.select(["collectives"], None, True)
    assert quick[0].tags >= {"target"} and all(c.tags & {"quick", "target"} for c in quick)
    with pytest.raises(SystemExit, match="no case matches"):
        run.select(["all_gather"], ["ag-7K"], False)


def test_run_of_products_with_a_collective(monkeypatch, tmp_path):
    every = reduced.REDUCE.ways
    few = reduced.REDUCE._replace(
        ways=lambda *args: {name: every(*args)[name] for name in ("xla", "ring", "default")}
    )
    monkeypatch.setattr(reduced, "REDUCE", few)
    tiny = collective_matmul.ON_CPU["matmul_all_reduce"]
    cases = dict.fromkeys(collective_matmul.CASES, ()) | {"matmul_all_reduce": tiny}
    monkeypatch.setattr(collective_matmul, "CASES", cases)
    command = ["--samples", "1", "--sample-ms", "0", "--out", str(tmp_path)]
    assert run.main(["--op", "collective_matmul", "--without", "ring", *command]) == 0
    (path,) = tmp_path.glob("*/matmul_all_reduce.jsonl")
    (record,) = records.load(path)
    assert record.id == "mmar-tiny" and record.median_us > 0 and set(record.baselines) == {"xla"}
    with pytest.raises(SystemExit, match="no case matches"):
        run.main(["--op", "matmul_all_reduce", "--cases", "mmar-m2", *command])


def test_special_ops_run_alone(capsys):
    with pytest.raises(SystemExit):
        run.main(["--op", "mixed", "psum"])
    assert "run alone" in capsys.readouterr().err


# Calls


def test_the_empty_call_is_the_custom_call(bench):
    chain = bench.sharded(lambda x: timing.dependent_chain(calls.empty_call, 5, x, lambda y: y), 1)
    text = chain.lower(bench.operands(calls.CASE, 1)[0]).as_text()
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
    monkeypatch.setattr(variants, "SMALL_CALLS", 4)
    ((found, failures),) = calls.host_cost(bench.mesh, harness.Method(0.0, 2), STAMP)
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


# Mixed


def test_mixed_variants_run_and_are_checked(bench):
    """Every annotation goes through JAX and leaves the results right."""
    for name in ("plain", "collective_no_graph", "metadata_no_graph_few_sms", "nccl_then_pk"):
        program = mixed.build(bench, "all_gather", mixed.VARIANTS[name], mixed.ON_CPU)
        results = program.run(*program.args)
        gemm = results[program.parts.index("gemm")]
        mixed.check(bench, "all_gather", program, mixed.ON_CPU, gemm)
        with pytest.raises(harness.CheckError, match="matmul"):
            mixed.check(bench, "all_gather", program, mixed.ON_CPU, gemm + 9)
        swapped = program._replace(run=lambda *args: [-r for r in program.run(*args)])  # noqa: B023
        with pytest.raises(harness.CheckError, match="wrong elements"):
            mixed.check(bench, "all_gather", swapped, mixed.ON_CPU, None)


def test_annotations_are_in_the_program(bench):
    call = mixed.annotated(OPS["psum"].call(lax, None, 2), "gpu_stream:collective")
    case = mixed.case_of("psum", mixed.ON_CPU)
    for annotation in ("gpu_stream:collective", "metadata:collective"):
        call = mixed.annotated(OPS["psum"].call(lax, case, 2), annotation)
        text = bench.sharded(call, 1).lower(*bench.operands(case, 1)).as_text()
        assert '_xla_stream_annotation = "collective"' in text
        assert 'inlineable = "false"' in text


def test_a_variant_that_kills_its_child_is_noted_and_the_rest_go_on(tmp_path):
    child = tmp_path / "child.py"
    child.write_text(
        "import json, sys\n"
        "names = sys.argv[sys.argv.index('--mixed-names') + 1:sys.argv.index('--job-rank')]\n"
        "print(json.dumps({'header': {'ranks': 2}}))\n"
        "for name in names:\n"
        "    print(json.dumps({'start': name}), flush=True)\n"
        "    if name == 'b': sys.exit(7)\n"
        "    row = {'error': 'unknown'} if name == 'c' else {'us': [1, 1, 1], 'instructions': {}}\n"
        "    print(json.dumps({'name': name} | row), flush=True)\n"
    )
    command = [sys.executable, str(child)]
    header, times, failed = mixed.measure(command, ["a", "b", "c", "d"], 60)
    assert header["ranks"] == 2
    assert list(times) == ["a", "d"]
    assert failed == {"b": "process 0 of 1 ended with code 7", "c": "unknown"}
    child.write_text("raise SystemExit(3)")
    with pytest.raises(RuntimeError, match="code 3"):
        mixed.measure(command, ["a"], 60)


def test_mixed_record():
    header = {"ranks": 2, "sizes": {}, "instructions": {}, "stamp": STAMP}
    times = {"gemm_alone": [100, 1, 1], "pk_alone": [30, 1, 1], "plain": [125, 1, 1]}
    found = mixed.record_of("psum", header, times | {"lax": [150, 1, 1]}, {"stream": "no"})
    assert (found.bound_us, found.ratio, found.speedup) == (100, 1.25, 1.2)
    assert found.skipped == {"stream": "no"}


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


def gpu_records(cases):
    stamp = STAMP | {"gpu": "NVIDIA H200", "driver": "580.159", "cuda": "13.0", "commit": "abc1234"}
    rows = []
    for case in cases:
        link = OPS[case.op].link_bytes(case, 2)
        us = 4.0 + link / 355e3
        rows.append(
            records.Record(
                id=case.name, op=case.op, ranks=2, processes=1, dtype="bfloat16",
                shape=list(case.shape), median_us=us, speedup=1.4, baselines={"nccl": 1.4 * us},
                config={"implementation": "cuda", "mechanism": "tma", "protocol": "simple"},
                method={
                    "axis": case.axis, "concat_axis": case.concat_axis, "link_bytes": link,
                    "bytes_per_rank": case.nbytes,
                },
                **stamp,
            )
        )  # fmt: skip
    return rows


def test_report_writes_tables_and_curves(tmp_path):
    box = tmp_path / "results" / "h200x2"
    for row in gpu_records(collective_cases.COLLECTIVES):
        if row.op != "ppermute":  # no record yet: nothing is said of it
            records.save(box / f"{row.op}.jsonl", [row])
    pages = {"README.md": ("collectives",), "docs/benchmarks.md": ("targets", "layouts")}
    for page, names in pages.items():
        sections = [f"<!-- bench:{name} -->\n<!-- /bench:{name} -->\n" for name in names]
        (tmp_path / page).parent.mkdir(exist_ok=True)
        (tmp_path / page).write_text("# x\n" + "and\n".join(sections) + "end\n")
    command = ["--results", str(tmp_path / "results"), "--root", str(tmp_path)]
    assert report.main([*command, "--check"]) == 1
    assert report.main(command) == 0
    assert report.main([*command, "--check"]) == 0
    readme, text = ((tmp_path / page).read_text() for page in pages)
    assert "| `psum` | 8 KiB: 4.02 us, 1.40x; 512 KiB: 5.48 us, 1.40x; 4 MiB: 15.8 us," in readme
    assert "256 MiB: 353 GB/s, 1.40x |" in readme
    assert "| `ragged_all_to_all` | 16 KiB:" in readme
    assert "| `all_gather`, 256 MiB | 2 | 1 | tma | 760 | 1064 | 1.40x | 353 | 350 GB/s |" in text
    assert "| `psum`, 8 KiB | 2 | 1 | tma | 4.02 | 5.63 | 1.40x | 2.04 | 4.5 us |" in text
    assert "| `all_to_all`, 32 MiB | 2 | 1 | tma | 51.3 |" in text
    assert "350 GB/s (missed) |" in text
    assert "| `all_to_all`, 2x2048x16x128, split 2, concat 1 | 2 | 1 | tma |" in text
    assert "| 1.40x | 1.00 |" in text
    assert "`ppermute`" not in text + readme
    assert "2x NVIDIA H200, driver 580.159, CUDA 13.0" in text
    assert text.endswith("<!-- /bench:layouts -->\nend\n")
    assert (tmp_path / report.IMAGE).read_bytes().startswith(b"\x89PNG")


def test_report_of_mixed():
    header = {"ranks": 2, "sizes": {}, "instructions": {}, "stamp": STAMP}
    times = {"gemm_alone": [100, 1, 1], "pk_alone": [30, 1, 1], "plain": [125, 1, 1]}
    row = mixed.record_of("psum", header, times, {})
    assert "| plain (`psum` 30 us, matmul 100 us) | 125 | 1.25 |" in report.mixed({row.key: row})
    assert report.mixed({}) == ""


def test_each_section_stands_on_a_page():
    root = pathlib.Path(report.__file__).parent.parent
    text = "".join((root / page).read_text() for page in report.PAGES)
    for name in report.SECTIONS:
        assert text.count(f"<!-- bench:{name} -->") == 1


def test_report_of_products():
    row = records.Record(
        id="mm-8x8x8", op="matmul", ranks=1, processes=1, median_us=10.0, tflops=1.5,
        baselines={"xla": 12.0}, speedup=1.2, config={"plan": "64x64"},
        commit="0123456789", date="2026-01-02",
    )  # fmt: skip
    text = report.products({row.key: row})
    assert "| mm-8x8x8 | 64x64 | 10 | 1.5 | 12 | 1.20x |" in text
    assert "Geometric mean 1.200x" in text and "commit 0123456," in text
    assert report.products({}) == ""


def test_report_of_products_with_a_collective():
    row = records.Record(
        id="agmm-x", op="all_gather_matmul", ranks=2, processes=1, median_us=12.0, compute_us=10.0,
        link_us=5.0, ratio=1.2, baselines={"xla": 18.0, "xla_dot": 10.0, "pallas": 15.0},
        config={"kernels": "all_gather_matmul", "num_comm_sms": 4, "num_blocks": 132},
        commit="0123456789", date="2026-01-02",
    )  # fmt: skip
    text = report.fused({row.key: row})
    cells = "agmm-x | `all_gather_matmul` | one kernel, num_comm_sms 4 | 12 | 10 | 5 | 1.20 | 18"
    assert f"| {cells} | 15 | 1.25x |" in text and "commit 0123456," in text
    assert "| over the larger | XLA | Pallas | speed-up over the fastest |" in text
    assert text.endswith("baselines, each in the run of its row: XLA; Pallas.")
    few = dataclasses.replace(
        row, id="mmar-x", op="matmul_all_reduce", baselines={"xla": 18.0, "xla_dot": 10.0},
        config={"kernels": "matmul_all_reduce_few_rows", "protocol": "ll", "num_blocks": 128},
    )  # fmt: skip
    text = report.fused({few.key: few})
    assert "| `matmul_all_reduce` | kernel for few rows, protocol ll | 12 |" in text
    assert (
        "| over the larger | XLA | speed-up over XLA |" in text and "run of its row: XLA." in text
    )
    assert report.fused({}) == ""


def test_report_of_blocks():
    row = records.Record(
        id="mlp-x", op="tensor_parallel_mlp", ranks=2, processes=1, median_us=12.0, compute_us=10.0,
        link_us=5.0, ratio=1.2, baselines={"xla": 18.0, "xla_hiding": 15.0, "xla_local": 10.0},
        config={"kernels": "2 all_gather_matmul, 7 matmul"}, extra_bytes=3 << 20, date="2026-01-02",
    )  # fmt: skip
    text = report.blocks({row.key: row})
    kernels = "2 all_gather_matmul, 7 matmul"
    assert f"| mlp-x | {kernels} | 12 | 10 | 5 | 1.20 | 18 | 15 | 1.25x | 3 |" in text
    assert report.blocks({}) == "Not measured yet."


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

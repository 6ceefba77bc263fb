"""The benchmark of products with a collective: what it times; wrong results get no time."""

import argparse
import dataclasses
import json
import subprocess

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pk_jax._bench import (
    collective_matmul,
    fused,
    fused_bench,
    gathered,
    harness,
    mlp,
    pallas,
    records,
    reduced,
)
from pk_jax._bench.ops import AXIS
from pk_jax._tuning.fused_cases import GatherCase

ONCE = harness.Method(sample_ms=0.0, samples=2, forced=False)
CASES = {
    name: (op, collective_matmul.ON_CPU[op.name][0])
    for name, op in (
        ("gather", gathered.OP),
        ("scatter", reduced.SCATTER),
        ("reduce", reduced.REDUCE),
        ("mlp", mlp.STEP),
    )
}
GATHER = CASES["gather"][1]


@pytest.fixture
def mesh(mesh_of):
    return mesh_of(**{AXIS: 2})


@pytest.fixture(autouse=True)
def short_chains(monkeypatch):
    monkeypatch.setattr(fused_bench, "FEWEST_CALLS", 2)


def only(op, *names, change=lambda name, way: way):
    """An op with some of its ways alone."""
    return op._replace(
        ways=lambda *args: {n: change(n, w) for n, w in op.ways(*args).items() if n in names}
    )


def test_cases_have_names_of_their_own():
    names = [case.name for cases in collective_matmul.CASES.values() for case in cases]
    assert len(set(names)) == len(names)
    prefixes = {
        op: {case.name.split("-")[0] for case in cases}
        for op, cases in collective_matmul.CASES.items()
    }
    assert prefixes == {
        "all_gather_matmul": {"agmm"}, "matmul_reduce_scatter": {"mmrs"},
        "matmul_all_reduce": {"mmar"}, "tensor_parallel_mlp": {"mlp"},
    }  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_case(mesh, name):
    op, case = CASES[name]
    alone = "xla_local" if name == "mlp" else "xla_dot"
    ways = ("xla", "ring", alone, "default")
    record, failures = fused_bench.run_case(mesh, only(op, *ways), case, ONCE, {})
    assert not failures and not record.skipped
    assert set(record.baselines) == {"xla", alone} | ({"ring"} if name != "mlp" else set())
    assert record.compute_us == record.baselines[alone]
    assert record.bound_us == max(record.compute_us, record.link_us)
    moved = {"gather": 64 * 40, "scatter": 64 * 16, "reduce": 2 * 64 * 16, "mlp": 4 * 64 * 16}
    assert record.link_us == pytest.approx(2 * moved[name] / 2 / 370e3)
    others = [us for baseline, us in record.baselines.items() if baseline != alone]
    assert record.speedup == min(others) / record.median_us
    assert 0 < record.max_rel_err < op.limit
    assert record.config == {"kernels": "jax.lax"}
    assert (record.ranks, record.shape, record.method["calls"]) == (2, list(case.shape), 2)
    temps = record.method["temp_bytes"]
    assert record.extra_bytes == temps["default"] - temps["xla"]


@pytest.mark.parametrize("spoil", (lambda y: y * 1.05, lambda y: y.at[3, 3].set(jnp.nan)))
@pytest.mark.parametrize("name", ("gather", "reduce"))
def test_wrong_results_get_no_time(mesh, name, spoil):
    """A little too large, or with one NaN, on one rank of two, in the last part of a result."""

    def spoiled(name, way):
        def call(x, w):
            y, tree = jax.tree.flatten(way.call(x, w))
            y[-1] = jnp.where(lax.axis_index(AXIS) == 1, spoil(y[-1]), y[-1])
            return jax.tree.unflatten(tree, y)

        return way._replace(call=call)

    op, case = CASES[name]
    ways = only(op, "xla", "xla_dot", change=spoiled)
    record, failures = fused_bench.run_case(mesh, ways, case, ONCE, {})
    assert len(failures) == 2 and all("relative error" in failure for failure in failures)
    assert set(record.skipped) == {"xla", "xla_dot"} and not record.baselines


def test_what_cannot_run_is_named(mesh):
    method = ONCE._replace(forced=True)
    op = only(gathered.OP, "xla_windowed", "pk_dot", "intra_sm")
    record, failures = fused_bench.run_case(mesh, op, GATHER, method, {})
    assert "without collective-permute" in record.skipped["xla_windowed"]
    assert "'cpu'" in record.skipped["pk_dot"] and "'cpu'" in record.skipped["intra_sm"]
    assert not failures and record.median_us is None


def test_the_default_that_cannot_run_is_a_failure(mesh):
    op = only(gathered.OP, "pk_dot", change=lambda name, way: way)
    op = op._replace(ways=lambda *args: {"default": gathered.OP.ways(*args)["pk_dot"]})
    _, failures = fused_bench.run_case(mesh, op, GATHER, ONCE, {})
    assert len(failures) == 1 and "'cpu'" in failures[0]


def test_an_error_of_the_runtime(mesh):
    """Names a baseline that could not run; of pk's ops it is a failure."""

    def broken(name, way):
        def call(x, w):
            raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: no such option\nand more")

        return way._replace(call=call)

    op = only(reduced.SCATTER, "ring", "default", change=broken)
    record, failures = fused_bench.run_case(mesh, op, CASES["scatter"][1], ONCE, {})
    assert record.skipped == dict.fromkeys(("ring", "default"), "INVALID_ARGUMENT: no such option")
    assert failures == ["mmrs-tiny default: INVALID_ARGUMENT: no such option"]


def test_what_is_left_out(mesh):
    method = ONCE._replace(without=("ring", "xla_hiding", "xla_windowed", "pk_dot", "pallas"))
    record, _ = fused_bench.run_case(mesh, gathered.OP, GATHER, method, {})
    assert set(record.baselines) == {"xla", "xla_dot"} and not record.skipped
    assert collective_matmul.pallas_of(mesh, [GATHER], method) == {}


def test_rows_that_a_ring_cannot_share(mesh):
    case = dataclasses.replace(CASES["reduce"][1], m=1)
    record, failures = fused_bench.run_case(mesh, only(reduced.REDUCE, "ring"), case, ONCE, {})
    assert "cannot share 1 rows" in record.skipped["ring"] and not failures


def test_a_program_with_a_refused_word(mesh):
    way = fused.Way(gathered.xla, "baseline", refuses="all_gather")
    with pytest.raises(NotImplementedError, match="has all_gather"):
        fused_bench.Bench(mesh, gathered.OP, GATHER).build(way)


@pytest.mark.parametrize("name", CASES)
def test_the_chain_makes_every_product(mesh, name):
    op, case = CASES[name]
    bench = fused_bench.Bench(mesh, op, case)
    for way in ("xla", "default"):
        text = bench.chain(op.ways(case, 2, ONCE)[way], 5).lower(bench.xs, bench.ws).as_text()
        products = {"mlp": 9}.get(name, 1)
        assert text.count("dot_general") == 5 * products


def test_the_larger_operand_comes_from_memory(mesh):
    """A chain has several of it; each is checked with the x that goes with it."""
    many = fused_bench.Bench(mesh, reduced.REDUCE, CASES["reduce"][1])
    assert (len(many.xs), len(many.ws)) == (2, 1)
    case = dataclasses.replace(CASES["reduce"][1], m=2)
    bench = fused_bench.Bench(mesh, reduced.REDUCE, case, 2)
    assert len(bench.xs) == len(bench.ws) == 2
    assert not (bench.ws[0] == bench.ws[1]).all()
    way = reduced.REDUCE.ways(case, 2, ONCE)["xla"]
    assert bench.build(way).error < reduced.REDUCE.limit
    seen = []

    def always_the_first(x, w):
        seen.append(w)
        return way.call(x, seen[0])

    with pytest.raises(harness.CheckError):
        bench.build(way._replace(call=always_the_first))


def test_ways_are_what_a_config_can_force():
    every = ONCE._replace(forced=True, plans=True)
    assert list(gathered.OP.ways(GATHER, 2, ONCE))[-1] == "default"
    assert list(gathered.OP.ways(GATHER, 2, every))[7:] == [
        "sequential", "intra_sm", "inter_sm", "intra_sm 128x256", "intra_sm 128x128",
        "inter_sm 128x256/2", "inter_sm 128x256/4", "inter_sm 128x256/8", "inter_sm 128x256/16",
        "inter_sm 128x128/4", "inter_sm 128x128/16",
    ]  # fmt: skip
    few, many = (dataclasses.replace(CASES["reduce"][1], m=m) for m in (128, 129))
    names = ["sequential", "intra_sm", "intra_sm 128x64"]
    assert list(reduced.REDUCE.ways(few, 2, every))[-3:] == names
    assert list(reduced.REDUCE.ways(many, 2, every))[-2:] == names[:2]


def test_what_the_calls_of_a_program_do():
    call = "%3 = stablehlo.custom_call @pk_jax_all_gather_matmul(%1) {backend_config = {tile = "
    call += '"128x256", num_comm_blocks = 4 : i64, num_blocks = 132 : i64}} : (tensor<4xbf16>)'
    assert fused_bench.config_of(call, {"pk_jax_all_gather_matmul": 1}) == {
        "kernels": "all_gather_matmul", "tile": "128x256", "num_comm_sms": 4, "num_blocks": 132,
    }  # fmt: skip
    name = "pk_jax_matmul_all_reduce_few_rows"
    call = f"%3 = stablehlo.custom_call @{name}(%1) {{backend_config = {{num_blocks = 128 : i64, "
    call += 'protocol = "ll", split_tiles = 0 : i64, split = 2 : i64}} : (tensor<4xbf16>)'
    assert fused_bench.config_of(call, {name: 1}) == {
        "kernels": "matmul_all_reduce_few_rows", "protocol": "ll", "split": 2, "num_blocks": 128,
    }  # fmt: skip
    call = "@pk_jax_matmul_all_reduce(%1) {backend_config = {lead = 1 : i64, num_blocks = 132 : i64"
    assert fused_bench.config_of(call, {"pk_jax_matmul_all_reduce": 1}) == {
        "kernels": "matmul_all_reduce", "lead": 1, "num_blocks": 132,
    }  # fmt: skip
    parts = {"pk_jax_matmul": 2, "pk_jax_all_gather": 1}
    assert fused_bench.config_of("", parts) == {"kernels": "all_gather, 2 matmul"}


# Pallas


def test_pallas_is_lowered_without_symmetric_memory(monkeypatch, mesh):
    """Which is what XLA would bind to a multicast object."""
    pytest.importorskip("absl")
    kernels = pytest.importorskip("jax.experimental.pallas.ops.gpu.collective_matmul_mgpu")

    class Chip:
        core_count = 132

    monkeypatch.setattr(jax, "devices", lambda *args: [Chip()])
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    monkeypatch.setattr(jax, "local_device_count", lambda: 2)
    assert kernels.MatmulDimension["M"].name == "M"
    case = GatherCase("t", 512, 256, 128)
    way = pallas.way(pallas.CONFIGS[0])
    specs = (gathered.OP.x_spec, gathered.OP.w_specs)
    f = jax.shard_map(
        way.call, mesh=mesh, in_specs=specs, out_specs=gathered.OP.out_spec, check_vma=False
    )
    args = [jax.ShapeDtypeStruct(shape, fused.DTYPE) for shape in gathered.draw(case, 2)]
    text = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert way.refuses not in text and "nvshmem" not in text and "multimem" not in text


def test_pallas_in_a_child(monkeypatch):
    """Times, errors, and a child that ends in the middle."""
    lines = [
        {"case": "a", "config": "xla"}, {"case": "a", "config": "one"},
        {"case": "a", "config": "one", "error": "refused: relative error 1"},
        {"case": "a", "config": "two"}, {"case": "a", "config": "xla", "us": [20, 19, 21]},
        {"case": "a", "config": "two", "us": [10, 9, 11]}, {"case": "b", "config": "one"},
    ]  # fmt: skip
    text = "a warning\n" + "".join(json.dumps(line) + "\n" for line in lines) + '{"case": "b'
    found = pallas.parse(text, ["a", "b", "c"], "its process ended with code 1")
    assert pallas.best(found["a"]) == ("two", 10) and set(found["a"]["errors"]) == {"one"}
    assert found["b"]["errors"] == {"one": "its process ended with code 1"}
    assert found["c"]["errors"]["all"].startswith("not tried: its process ended")
    assert pallas.best(found["c"]) is None

    def late(*args, **options):
        assert "nvshmem" not in options["env"]["XLA_FLAGS"]
        raise subprocess.TimeoutExpired("x", 5, output=text.encode())

    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_experimental_enable_nvshmem=true")
    monkeypatch.setattr(subprocess, "run", late)
    cases = [dataclasses.replace(GATHER, name=name) for name in "abc"]
    assert "within 5 s" in pallas.measure(cases, 1, 0.0, 5)["b"]["errors"]["one"]
    ended = subprocess.CompletedProcess([], 1, text, "Timeout (0:00:40)!\nthe stack")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: ended)
    assert "more than 40 s" in pallas.measure(cases, 1, 0.0)["b"]["errors"]["one"]


def test_pallas_is_a_baseline_of_the_record(mesh, monkeypatch):
    (beside,) = collective_matmul.pallas_of(mesh, [GATHER], ONCE).values()
    assert beside.skipped == {"pallas": "it needs GPUs"}
    found = {"us": {"xla": [20, 19, 21], "one": [3, 2, 4], "two": [2, 1, 3]}, "errors": {}}
    monkeypatch.setattr(pallas, "measure", lambda *_: {GATHER.name: found})
    monkeypatch.setattr(collective_matmul, "is_on_gpus", lambda _: True)
    (beside,) = collective_matmul.pallas_of(mesh, [GATHER], ONCE).values()
    op = only(gathered.OP, "xla", "default")
    record, _ = fused_bench.run_case(mesh, op, GATHER, ONCE, {}, beside)
    # A tenth of XLA's time, as there.
    assert record.baselines["pallas"] == pytest.approx(record.baselines["xla"] / 10)
    assert fused.best_baseline(record) == "pallas"
    assert record.speedup == record.baselines["pallas"] / record.median_us
    assert record.method["pallas"] == found | {"config": "two"}


# The command


def arguments(**changes):
    parser = argparse.ArgumentParser()
    collective_matmul.add_arguments(parser)
    return argparse.Namespace(**vars(parser.parse_args([])) | changes)


def test_the_command(mesh, monkeypatch, tmp_path, capsys):
    for name in ("SCATTER", "REDUCE"):
        monkeypatch.setattr(reduced, name, only(getattr(reduced, name), "xla", "default"))
    args = arguments(
        ops=["matmul_reduce_scatter", "matmul_all_reduce"], samples=1, json=tmp_path / "x.jsonl"
    )
    assert collective_matmul.suite(mesh, args) == 0
    shown = capsys.readouterr().out
    assert "jax.lax, on tiny sizes" in shown and "2 cases in" in shown
    assert "mmrs-tiny" in shown and "x bound | xla " in shown
    assert [row.id for row in records.load(args.json)] == ["mmrs-tiny", "mmar-tiny"]


def test_unknown_cases_are_an_argument_error(capsys):
    assert collective_matmul.main(arguments(cases=["agmm-70b-up", "agmm-9"])) == 2
    assert "no case ['agmm-9']" in capsys.readouterr().err


def test_a_wrong_result_fails_the_command(mesh, monkeypatch, capsys):
    record = records.Record("x", "all_gather_matmul", 2, 1, skipped={"default": "refused: 1"})
    monkeypatch.setattr(
        collective_matmul, "results", lambda *args: iter([(record, ["x default: wrong"])])
    )
    assert collective_matmul.suite(mesh, arguments(ops=["all_gather_matmul"])) == 1
    shown = capsys.readouterr()
    assert "x                 not measured: refused: 1" in shown.out
    assert "REFUSED: x default: wrong" in shown.err

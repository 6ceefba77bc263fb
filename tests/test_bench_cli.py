"""`pk-jax bench collectives`, as a user of the installed package runs it."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys

import jax
import pytest

import pk_jax.__main__ as command_line
from pk_jax._bench import collectives, records
from pk_jax._tuning.collective_cases import COLLECTIVES


def run(*arguments, cwd, **environment):
    variables = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "pk_jax", "bench", "collectives", *arguments],
        cwd=cwd,
        env=variables | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_sweep_on_cpu_devices(tmp_path):
    done = run(
        "--ops", "psum", "all_to_all", "--samples", "1", "--json", "out/b.jsonl", "--png", "b.png",
        cwd=tmp_path, JAX_NUM_CPU_DEVICES="3",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the reference, which is jax.lax" in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.endswith("reference")]
    assert [row.split()[0] for row in rows] == ["ar-1K", "a2a-1K"]
    found = [json.loads(line) for line in (tmp_path / "out/b.jsonl").read_text().splitlines()]
    assert [row["op"] for row in found] == ["psum", "all_to_all"]
    assert all(row["median_us"] > 0 and row["ranks"] == 3 for row in found)
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_one_device_is_refused(tmp_path):
    done = run(cwd=tmp_path, JAX_NUM_CPU_DEVICES="1")
    assert done.returncode == 2
    assert "need two devices or more, found 1" in done.stderr
    assert "JAX_NUM_CPU_DEVICES=8" in done.stderr
    assert "Traceback" not in done.stderr


def arguments(**changes):
    parser = argparse.ArgumentParser()
    collectives.add_arguments(parser)
    return argparse.Namespace(**vars(parser.parse_args([])) | changes)


def test_multicast_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    assert collectives.main(arguments()) == 2
    assert "unset NCCL_NVLS_ENABLE" in capsys.readouterr().err


def test_a_picture_needs_matplotlib(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert collectives.main(arguments(png=tmp_path / "x.png")) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_a_wrong_result_fails_the_command(monkeypatch, capsys):
    record = records.Record("ar-1K", "psum", 2, 1, skipped={"default": "refused: 3 wrong"})
    monkeypatch.setattr(
        "pk_jax._bench.harness.run", lambda *args: iter([(record, ["3 wrong elements"])])
    )
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices("cpu")[:2])
    assert collectives.sweep(mesh, arguments()) == 1
    shown = capsys.readouterr()
    assert "not measured: refused: 3 wrong" in shown.out
    assert "REFUSED: 3 wrong elements" in shown.err


@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_bad_samples_are_an_argument_error(value, capsys):
    with pytest.raises(SystemExit) as exit_:
        command_line.main(["bench", "collectives", "--samples", value])
    assert exit_.value.code == 2 and "--samples" in capsys.readouterr().err


def test_products_are_a_suite_of_their_own(capsys):
    assert command_line.main(["bench", "collective-matmul", "--cases", "agmm-9"]) == 2
    assert "no case ['agmm-9']; they are agmm-70b-qkv, " in capsys.readouterr().err


def test_sizes():
    every = collectives.select(["psum", "all_gather"], "full", on_cpu=False)
    assert {c.name for c in every} == {
        c.name for c in COLLECTIVES if c.op in ("psum", "all_gather")
    }
    quick = collectives.select(["all_gather"], "quick", on_cpu=False)
    assert [c.name for c in quick] == ["ag-16K", "ag-1M", "ag-32M", "ag-256M", "ag-32M-axis1"]
    assert [c.name for c in collectives.select(["psum"], "quick", on_cpu=True)] == ["ar-1K"]


def test_a_row_names_times_and_plan():
    record = records.Record(
        "ar-4M", "psum", 2, 1, median_us=14.256, gbps=294.2, baselines={"nccl": 38.7},
        speedup=2.715, config={"mechanism": "register", "protocol": "simple"},
    )  # fmt: skip
    assert collectives.line(record).split() == [
        "ar-4M", "14.26", "294.2", "38.70", "2.71", "register/simple",
    ]  # fmt: skip

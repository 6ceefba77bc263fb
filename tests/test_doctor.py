"""The doctor answers on any machine, in text and in JSON, and cannot be made to wait for ever."""

import itertools
import json

import jax
import pytest

from pk_jax import __main__ as command_line

# The module: the package has a function of this name.
from pk_jax import _doctor as doctor
from pk_jax import _paths, _registry, _selection


@pytest.fixture(scope="module")
def data():
    return doctor.doctor()


def test_report_is_json_and_complete(data):
    assert json.loads(json.dumps(data)) == data
    assert set(data) == {
        "environment", "allocator", "library", "collectives_extension", "devices", "devices_error",
        "ops", "gpus", "links", "links_error", "communicators", "last_error", "versions",
    }  # fmt: skip
    assert data["devices_error"] is None
    assert len(data["devices"]) == jax.device_count()
    assert data["versions"]["jax"] == jax.__version__


def test_every_op_has_a_path_and_a_reason_when_slow(data):
    assert [row["op"] for row in data["ops"]] == list(_paths.OPS)
    for row in data["ops"]:
        assert row["implementation"] in ("cuda", "reference")
        assert (row["reason"] is None) == (row["implementation"] == "cuda")


def test_report_joins_no_job(data):
    assert not jax.distributed.is_initialized()


def test_text_names_every_op_and_version(data):
    text = doctor.render(data)
    for row in data["ops"]:
        assert row["op"] in text
        assert row["reason"] is None or row["reason"] in text
    assert f"jax {data['versions']['jax']}" in text


class FakeLibrary:
    """pk_jax._ffi as it answers on a machine with three GPUs, the last one behind PCIe."""

    def build_info(self):
        return {"cuda_runtime": "13.0", "ffi_api": (0, 4), "arch": "sm_90a", "version": "0.1.0"}

    def topology(self):
        gpu = {
            "name": "NVIDIA H200", "compute_capability": (9, 0), "num_sms": 132, "uuid": "u",
            "copy_engines": 3, "memory_bytes": 141_000_000_000, "pci": "0000:04:00.0", "vmm": True,
        }  # fmt: skip
        yes, no = True, False
        return {
            "driver": "13.0",
            "devices": [gpu | {"ordinal": i} for i in range(3)],
            "peer_access": [[yes, yes, yes], [yes, yes, no], [yes, no, yes]],
            "nvlink": [[no, yes, no], [yes, no, no], [no, no, no]],
        }

    def communicators(self):
        return []

    def last_error(self):
        return None


def test_text_of_a_machine_with_gpus(monkeypatch):
    monkeypatch.setattr(_registry, "library", FakeLibrary())
    data = doctor.doctor()
    assert json.loads(json.dumps(data)) == data
    data["ops"] = [
        {
            "op": op,
            "implementation": "cuda",
            "reason": None,
            "choices": doctor._choices(op, "NVIDIA H200", 2),
        }
        for op in _selection.OPS
    ]
    lines = doctor.render(data).splitlines()
    assert any("CUDA runtime of the library 13.0, FFI 0.4" in line for line in lines)
    assert any("loaded, built for sm_90a" in line for line in lines)
    assert any("NVIDIA H200  sm_90  132 SMs  141 GB  3 copy engines" in line for line in lines)
    assert any(line.split() == ["0", "-", "NVLink", "PCIe"] for line in lines)
    assert any(line.split() == ["1", "NVLink", "-", "none"] for line in lines)
    assert any("1 KiB to" in line and "register (ll)" in line for line in lines)
    assert any("to 1 GiB" in line and "_shot)" in line for line in lines)


def test_without_a_driver_the_reason_is_shown(monkeypatch):
    def no_driver(self):
        raise RuntimeError("no CUDA driver on this machine")

    monkeypatch.setattr(FakeLibrary, "topology", no_driver)
    monkeypatch.setattr(_registry, "library", FakeLibrary())
    assert "no CUDA driver on this machine" in doctor.render(doctor.doctor())


def test_text_of_a_process_whose_kernels_have_run(data):
    communicator = {
        "device": 0, "rank": 1, "num_ranks": 2, "num_processes": 2, "workspace_bytes": 4096,
    }  # fmt: skip
    error = "all_gather: rank 1 waited 2 s for rank 0"
    text = doctor.render(data | {"communicators": [communicator], "last_error": error})
    assert "rank 1 of 2 on device 0, 2 process(es), 4096 bytes" in text
    assert f"Last error of a kernel: {error}" in text


@pytest.mark.parametrize("op", _selection.OPS)
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_choices_cover_all_sizes_once(op, num_ranks):
    choices = doctor._choices(op, "NVIDIA H200", num_ranks)
    if op == "ragged_all_to_all":
        assert choices == []
        return
    assert choices[0]["from_bytes"] == 1 << 10
    assert choices[-1]["to_bytes"] == 1 << 30
    for before, after in itertools.pairwise(choices):
        assert after["from_bytes"] == 2 * before["to_bytes"]
        names = ("mechanism", "protocol", "algorithm")
        how = [[choice.get(name) for name in names] for choice in (before, after)]
        assert how[0] != how[1]


@pytest.mark.parametrize(
    ("variables", "kind", "preallocate", "means"),
    [
        ({}, "default", True, "across processes"),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": ""}, "default", True, "across processes"),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, "default", False, "take the reference"),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, "platform", False, "take the reference"),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "CUDA_ASYNC"}, "cuda_async", False, "no peer can map it"),
    ],
)
def test_allocator(variables, kind, preallocate, means):
    heap = doctor.allocator(variables)
    assert (heap["kind"], heap["preallocate"]) == (kind, preallocate)
    assert means in heap["means"]


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_share_of_memory(name, data):
    heap = doctor.allocator({name: "0.3"})
    assert "takes 0.3 of a GPU at start" in doctor.render(data | {"allocator": heap})


def test_last_error_is_reported(monkeypatch):
    monkeypatch.setattr(FakeLibrary, "last_error", lambda self: "rank 1 waited")
    monkeypatch.setattr(_registry, "library", FakeLibrary())
    assert doctor.doctor(query_devices=False)["last_error"] == "rank 1 waited"


def test_environment_shows_what_matters_and_nothing_else(monkeypatch):
    for name in ("PK_JAX_TIMEOUT_S", "NCCL_NVLS_ENABLE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "0")
    for name in ("MY_JAX_KEY", "HOME_XLA", "CUDA_HOME"):
        monkeypatch.setenv(name, "0")
    shown = doctor.environment()
    assert {"PK_JAX_TIMEOUT_S", "NCCL_NVLS_ENABLE", "CUDA_VISIBLE_DEVICES"} <= set(shown)
    assert not {"MY_JAX_KEY", "HOME_XLA", "CUDA_HOME"} & set(shown)


def test_nccl_version():
    assert doctor.nccl_version(22809) == "2.28.9"


def test_command_line_prints_json(capsys):
    assert command_line.main(["doctor", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [row["op"] for row in printed["ops"]] == list(_paths.OPS)
    # The child changes a variable for itself; the report shows the caller's.
    assert printed["environment"] == doctor.environment()


def test_a_query_that_does_not_end_is_cut_short():
    data = doctor.report_in_child(timeout_s=0.01)
    assert "did not end within 0.01 s" in data["devices_error"]
    assert data["versions"]["jax"] == jax.__version__
    assert "did not end" in doctor.render(data)


def test_a_backend_that_fails_is_reported(monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "no_such_platform")
    assert command_line.main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "JAX devices: none:" in text
    assert "no_such_platform" in text


def test_bench_needs_a_checkout(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command_line, "__file__", str(tmp_path / "site" / "pk_jax" / "x.py"))
    assert command_line.main(["bench"]) == 2
    assert "checkout" in capsys.readouterr().err


def test_bench_passes_its_options_on(monkeypatch, tmp_path):
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "run.py").write_text("import sys; sys.exit(len(sys.argv))")
    monkeypatch.chdir(tmp_path)
    assert command_line.main(["bench", "--op", "all_gather"]) == 3


@pytest.mark.parametrize("value", ["inf", "nan", "0", "-1", "soon"])
def test_a_bad_timeout_is_an_argument_error(value, capsys):
    with pytest.raises(SystemExit) as exit_:
        command_line.main(["doctor", "--timeout", value])
    assert exit_.value.code == 2 and "--timeout" in capsys.readouterr().err

"""The package as installed: metadata, command, typing, imports without a GPU; the build's pins."""

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import check_kernels
import pytest

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

try:
    DISTRIBUTION = importlib.metadata.distribution("pk_jax")
except importlib.metadata.PackageNotFoundError:
    DISTRIBUTION = None
installed = pytest.mark.skipif(DISTRIBUTION is None, reason="pk_jax is on the path, not installed")


compiled = pytest.mark.skipif(
    importlib.util.find_spec("pk_jax._ffi") is None, reason="a pure-Python install"
)


def python(*arguments: str, **variables: str) -> str:
    """Runs this Python apart from pytest, warnings being errors, and returns what it printed."""
    environment = {**os.environ, **variables}
    command = [sys.executable, "-W", "error", *arguments]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def parts(requirement: str) -> frozenset[str]:
    """Splits a requirement into its name and its bounds, which builds may reorder."""
    return frozenset(re.findall(r"\w+(?=[<>=])|[<>=]+[\d.]+", requirement))


@installed
def test_metadata_matches_pyproject():
    project = PYPROJECT["project"]
    metadata = DISTRIBUTION.metadata
    assert metadata["Version"] == project["version"]
    assert metadata["License-Expression"] == "Apache-2.0"
    required = [r for r in DISTRIBUTION.requires if "extra" not in r]
    assert set(map(parts, required)) == set(map(parts, project["dependencies"]))
    assert metadata.get_all("Provides-Extra") == ["cuda13"]


@installed
def test_running_jax_is_in_the_supported_range():
    version = tuple(map(int, importlib.metadata.version("jax").split(".")[:3]))
    assert (0, 11, 2) <= version < (0, 13)


@installed
def test_console_command_loads():
    (command,) = DISTRIBUTION.entry_points.select(group="console_scripts")
    assert command.name == "pk-jax"
    assert callable(command.load())


def test_typed_marker_is_beside_the_package():
    spec = importlib.util.find_spec("pk_jax")
    assert any((Path(p) / "py.typed").exists() for p in spec.submodule_search_locations)


def test_import_initialises_no_backend():
    # The user chooses platforms, devices and processes after importing. JAX refuses this update
    # once it has a backend.
    code = """
import jax
import pk_jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 3)
print(jax.device_count())
"""
    variables = {"XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "1"}
    assert python("-c", code, **variables).strip() == "3"


@compiled
def test_compiled_module_loads_without_a_driver():
    code = """
from pk_jax import _ffi
print(sorted(_ffi.handlers()))
info = _ffi.build_info()
assert info["arch"] == "sm_90a", info
print(info["version"])
"""
    *_, version = python("-c", code, CUDA_VISIBLE_DEVICES="").split()
    assert version == PYPROJECT["project"]["version"]


@compiled
def test_compiled_module_has_a_stub():
    spec = importlib.util.find_spec("pk_jax")
    stubs = [Path(p) / "_ffi.pyi" for p in spec.submodule_search_locations]
    assert any("def handlers" in stub.read_text() for stub in stubs if stub.exists())


def test_pins():
    """Build and tools are reproducible; the headers are those of the oldest supported jaxlib."""
    build = PYPROJECT["tool"]["scikit-build"]["build"]["requires"]
    groups = [r for group in PYPROJECT["dependency-groups"].values() for r in group]
    for requirement in [*PYPROJECT["build-system"]["requires"], *build, *groups]:
        assert isinstance(requirement, dict) or "==" in requirement, requirement
    assert len([r for r in build if r.startswith("nvidia-")]) == 5
    oldest = re.search(r">=([\d.]+)", PYPROJECT["project"]["dependencies"][1])[1]
    assert f"jaxlib=={oldest}" in build
    assert f"jax=={oldest}" in (ROOT / "Makefile").read_text()


def test_a_missing_python_is_explained(tmp_path: Path):
    (tmp_path / "python3").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python3").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    environment["PYTHON"] = "no-such-python"
    result = subprocess.run(
        [ROOT / "scripts" / "find_python.sh"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "PYTHON=no-such-python is not a Python 3.12 or newer" in result.stderr


def test_kernel_check_finds_spills_and_dropped_instructions():
    kernels, losses = check_kernels.parse_log(
        "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to ...\n"
        "ptxas info    : Compiling entry function '_Z1aPf' for 'sm_90a'\n"
        "ptxas info    : Function properties for _Z1aPf\n"
        "    368 bytes stack frame, 724 bytes spill stores, 744 bytes spill loads\n"
        "ptxas info    : Used 64 registers, used 1 barriers, 368 bytes cumulative stack size\n"
        "ptxas info    : Compiling entry function '_Z1bPf' for 'sm_90a'\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 8 registers, used 0 barriers, 1024 bytes smem\n"
    )
    assert len(losses) == 1
    assert [(k.name, k.registers, k.spill_bytes) for k in kernels] == [
        ("_Z1aPf", 64, 1468),
        ("_Z1bPf", 8, 0),
    ]
    assert kernels[1].shared_bytes == 1024

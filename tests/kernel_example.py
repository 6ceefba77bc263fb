"""The example of docs/write_a_kernel.md as tests use it: a copy of its folder, built once."""

import contextlib
import filecmp
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

import pk_jax as pk

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "write_a_kernel"
NAME = "librms_norm_gather.so"
# Where `make wheel` compiles the example with the headers that it installs.
MADE = ROOT / "build" / "wheel"

_temporary = tempfile.TemporaryDirectory(prefix="write_a_kernel")


@functools.cache
def folder() -> Path:
    """A copy of the example, without what may have been built there."""
    copy = Path(_temporary.name) / "example"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return copy


@functools.cache
def headers() -> Path:
    """pk_jax.get_include(), or the test is skipped."""
    try:
        return Path(pk.get_include())
    except ImportError as error:
        pytest.skip(str(error))


def in_numpy(x, weight, eps):
    """A rank's part of the example's result, in float64."""
    wide = x.astype(np.float64)
    normal = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps)
    return normal * weight.astype(np.float64)


def relative(folder: Path) -> list[str]:
    """The files below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@functools.cache
def library() -> Path:
    """The example's library in the copy, or the test is skipped for want of a compiler."""
    built = folder() / NAME
    if nvcc := _nvcc():
        command = [sys.executable, str(folder() / "build.py"), "--include", str(headers())]
        command += ["--include", jax.ffi.include_dir()]
        done = subprocess.run(
            command, env={**os.environ, "CUDACXX": nvcc}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
    elif MADE.is_dir():
        made, stage = MADE / "write_a_kernel" / NAME, MADE / "stage" / "pk_jax" / "include"
        assert made.is_file(), "make wheel did not compile the example"
        assert relative(stage) == relative(headers())
        _, *different = filecmp.cmpfiles(stage, headers(), relative(stage), shallow=False)
        assert different == [[], []], f"not the headers of the wheel that is installed: {different}"
        shutil.copy(made, built)
    else:
        pytest.skip("no nvcc, and no build/wheel where `make wheel` left the example's library")
    return built


@functools.cache
def module():
    """The example's Python module, with its library wherever there is one."""
    with contextlib.suppress(pytest.skip.Exception):
        library()
    path = folder() / "rms_norm_gather.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def _nvcc() -> str | None:
    """The compiler that the build of pk_jax would find."""
    finder = [sys.executable, str(ROOT / "cmake" / "find_cuda_wheels.py")]
    wheels = subprocess.run(finder, capture_output=True, text=True, check=True).stdout.strip()
    found = f"{wheels}/bin/nvcc" if wheels else shutil.which("nvcc")
    return os.environ.get("CUDACXX") or found

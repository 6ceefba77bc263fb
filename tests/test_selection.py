"""Which path an op takes and why, decided from records alone."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import pytest

from pk_jax import _paths, _selection
from pk_jax._capability import Capability, Gpu

VERSION = "pk_jax 0.1.0, jaxlib 0.11.2"


def machine(processes, gpus_each, hosts=1, **fields):
    """Records of a job: GPUs numbered through, hosts filled in order, every GPU reaches all."""
    count = processes * gpus_each
    per_host = processes // hosts
    records = []
    for index in range(processes):
        ids = range(index * gpus_each, (index + 1) * gpus_each)
        gpus = tuple(
            Gpu(i, f"gpu{i}", (9, 0), {f"gpu{j}": True for j in range(count) if j != i})
            for i in ids
        )
        host = f"host{index // per_host}"
        records.append(Capability(index, host, version=VERSION, gpus=gpus, **fields))
    return records


def changed(records, index, **fields):
    return [dataclasses.replace(r, **fields) if i == index else r for i, r in enumerate(records)]


def with_gpu(records, index, position, **fields):
    gpus = list(records[index].gpus)
    gpus[position] = dataclasses.replace(gpus[position], **fields)
    return changed(records, index, gpus=tuple(gpus))


CAN = {
    "one process, two GPUs": ([[0, 1]], machine(1, 2)),
    "one process, groups": ([[0, 2], [3, 1]], machine(1, 4)),
    "a process per GPU": ([[0, 1]], machine(2, 1)),
    "groups inside hosts": ([[0, 1], [2, 3]], machine(4, 1, hosts=2)),
    "one process without preallocation": ([[0, 1]], machine(1, 2, preallocate=False)),
    "one process with the platform allocator": ([[0, 1]], machine(1, 2, allocator="platform")),
    "bfc by name": ([[0, 1]], machine(2, 1, allocator="bfc")),
    "groups inside processes without one heap": (
        [[0, 1], [2, 3]],
        machine(2, 2, allocator="platform"),
    ),
    "no access outside the group": (
        [[0, 1], [2, 3]],
        with_gpu(machine(1, 4), 0, 0, reaches={"gpu1": True, "gpu2": False, "gpu3": False}),
    ),
    "GPUs that the process does not see": (
        [[0, 1]],
        with_gpu(with_gpu(machine(2, 1), 0, 0, reaches={}), 1, 0, reaches={}),
    ),
    "the largest group": ([list(range(72))], machine(1, 72)),
}


@pytest.mark.parametrize("name", CAN)
def test_cuda(name):
    assert _selection.why_not_cuda(*CAN[name]) is None


CANNOT = {
    "library": (
        [[0, 1]],
        changed(machine(1, 2), 0, problem="the extension library is not there"),
        "the extension library is not there",
    ),
    "library of another process": (
        [[0, 1]],
        changed(machine(2, 1), 1, problem="jaxlib 0.11.1 is too old"),
        "process 1: jaxlib 0.11.1 is too old",
    ),
    "library of a process in another group": (
        [[0, 1], [2, 3]],
        changed(machine(4, 1), 3, problem="no driver"),
        "process 3: no driver",
    ),
    "versions": (
        [[0, 1]],
        changed(machine(2, 1), 1, version="pk_jax 0.2.0"),
        "different versions of pk_jax and jaxlib: ['pk_jax 0.1.0, jaxlib 0.11.2', 'pk_jax 0.2.0']",
    ),
    "cuda_async": (
        [[0, 1]],
        machine(1, 2, allocator="cuda_async"),
        "XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async",
    ),
    "compute capability": (
        [[0, 1]],
        with_gpu(machine(1, 2), 0, 1, compute_capability=(8, 0)),
        "device 1 has compute capability 8.0, and the kernels are built for 9.0",
    ),
    "newer compute capability": (
        [[0, 1]],
        with_gpu(machine(1, 2), 0, 0, compute_capability=(10, 0)),
        "device 0 has compute capability 10.0",
    ),
    "hosts": (
        [[0, 1], [2, 3], [1, 2]],
        machine(4, 1, hosts=2),
        "the axis crosses hosts: devices 1 (process 1) and 2 (process 2)",
    ),
    "platform allocator": (
        [[0, 1]],
        changed(machine(2, 1), 1, allocator="platform"),
        "process 1 shares memory with other processes, and its heap is not one exportable region",
    ),
    "preallocation": (
        [[0, 1]],
        changed(machine(2, 1), 0, preallocate=False),
        "XLA_PYTHON_CLIENT_PREALLOCATE=false",
    ),
    "peer access": (
        [[0, 3], [1, 2]],
        with_gpu(machine(1, 4), 0, 2, reaches={"gpu1": False, "gpu0": True, "gpu3": True}),
        "device 2 has no peer access to device 1",
    ),
    "peer access between processes": (
        [[0, 1]],
        with_gpu(machine(2, 1), 0, 0, reaches={"gpu1": False}),
        "device 0 has no peer access to device 1",
    ),
    "atomics": (
        [[0, 3], [1, 2]],
        with_gpu(
            machine(1, 4),
            0,
            2,
            reaches={"gpu1": False, "gpu0": True, "gpu3": True},
            without_atomics=("gpu1",),
        ),
        "devices 2 and 1 reach each other over PCIe without native atomics; pk_jax needs NVLink",
    ),
    "atomics between processes": (
        [[0, 1]],
        with_gpu(machine(2, 1), 0, 0, reaches={"gpu1": False}, without_atomics=("gpu1",)),
        "devices 0 and 1 reach each other over PCIe without native atomics",
    ),
    "unknown device": ([[0, 7]], machine(1, 2), "no process described device 7"),
    "ranks": ([list(range(73))], machine(1, 73), "a group of 73 ranks is larger than 72"),
}


@pytest.mark.parametrize("name", CANNOT)
def test_reference(name):
    groups, records, text = CANNOT[name]
    assert text in _selection.why_not_cuda(groups, records)


def test_reasons_are_distinct():
    texts = [_selection.why_not_cuda(groups, records) for groups, records, _ in CANNOT.values()]
    assert len(set(texts)) == len(texts) and all(texts)


@pytest.mark.parametrize("dtype", ["bool", "int8", "float8_e4m3fn", "bfloat16", "complex128"])
def test_dtypes_that_move(dtype):
    assert _selection.why_not_dtype(jnp.dtype(dtype)) is None


@pytest.mark.parametrize("dtype", ["int2", "int4", "uint4", "float4_e2m1fn"])
def test_dtypes_smaller_than_a_byte(dtype):
    assert f"dtype {dtype} is smaller than a byte" in _selection.why_not_dtype(jnp.dtype(dtype))


REDUCED = {  # dtype -> the ops that take it
    "float32": {"psum", "psum_scatter", "pmax", "pmin", "pmean"},
    "bfloat16": {"psum", "psum_scatter", "pmax", "pmin", "pmean"},
    "uint8": {"psum", "psum_scatter", "pmax", "pmin", "pmean"},
    "int64": {"psum", "psum_scatter", "pmax", "pmin", "pmean"},
    "complex64": {"psum", "psum_scatter", "pmean"},
    "bool": {"pmax", "pmin"},
    "float8_e4m3fn": set(),
    "int4": set(),
}


@pytest.mark.parametrize("dtype", REDUCED)
@pytest.mark.parametrize("op", ["psum", "psum_scatter", "pmax", "pmin", "pmean"])
def test_dtypes_that_are_reduced(op, dtype):
    reason = _selection.why_not_dtype(jnp.dtype(dtype), op)
    assert (reason is None) == (op in REDUCED[dtype])
    assert reason is None or f"dtype {dtype}" in reason


def test_groups_of_different_sizes():
    assert _selection.why_not_sizes([[0, 1], [2, 3]]) is None
    assert "different sizes [1, 3]" in _selection.why_not_sizes([[2], [0, 1, 3]])
    decision = _selection.decide("psum", jnp.dtype("float32"), [[2], [0, 1, 3]], None)
    assert decision.path == "reference" and "groups of one size" in decision.reason


def test_extended_dtypes():
    assert "extended dtype" in _selection.why_not_dtype(jax.random.key(0).dtype)


# What the doctor shows.


def test_paths_on_the_cpu():
    rows = _paths.paths()
    assert {row.op for row in rows} == _selection.TAKEN.difference(_selection.FURTHER_CALLS)
    for op, path, reason in rows:
        assert path == "reference" and reason.startswith(op)
        assert "'cpu'" in reason


def test_log_once(caplog, monkeypatch):
    monkeypatch.setattr(_selection, "_logged", set())
    warning = _selection.Decision("reference", "no driver", logging.WARNING)
    with caplog.at_level(logging.INFO, "pk_jax"):
        for op in ("all_gather", "all_gather", "psum"):
            _selection.log_once(op, warning)
        _selection.log_once("psum", _selection.Decision("reference", "small"))
    logged = [(r.levelname, r.message) for r in caplog.records]
    assert logged == [
        ("WARNING", "all_gather takes the reference: no driver"),
        ("WARNING", "psum takes the reference: no driver"),
        ("INFO", "psum takes the reference: small"),
    ]

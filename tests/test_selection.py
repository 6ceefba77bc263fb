"""Which path an op takes and why, from records alone, and how processes come to the same choice."""

import dataclasses
import logging
import types

import jax
import jax.numpy as jnp
import pytest

from pk_jax import _capability, _compat, _registry, _selection
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


def test_extended_dtypes():
    assert "extended dtype" in _selection.why_not_dtype(jax.random.key(0).dtype)


# From devices to a decision, with a fake library and fake devices.


class Device:
    platform = "gpu"

    def __init__(self, client, index, process_index=0):
        self.client, self.id, self.process_index = client, index, process_index
        self.local_hardware_id = index


class Client:
    platform_version = "PJRT C API\ncuda 13000"

    def __init__(self, index=0, devices=()):
        self._index, self._devices = index, devices

    def process_index(self):
        return self._index

    def local_devices(self):
        return [Device(self, i, self._index) for i in self._devices]


class Library(types.SimpleNamespace):
    def __init__(self, gpus=2, error=None):
        super().__init__(announced=[], asked=0)
        self.gpus, self.error = gpus, error

    def build_info(self):
        return {"cuda_runtime": "13.0", "version": "0.1.0"}

    def topology(self):
        self.asked += 1
        if self.error:
            raise RuntimeError(self.error)
        seen = range(self.gpus)
        devices = [{"ordinal": i, "uuid": f"gpu{i}", "compute_capability": [9, 0]} for i in seen]
        return {"devices": devices, "peer_access": [[i != j for j in seen] for i in seen]}

    def set_local_devices(self, ids):
        self.announced.append(ids)

    def host_id(self):
        return "host0"


@pytest.fixture
def library(monkeypatch):
    fake = Library()
    monkeypatch.setattr(_registry, "library", fake)
    for name in ("ALLOCATOR", "PREALLOCATE"):
        monkeypatch.delenv(f"XLA_PYTHON_CLIENT_{name}", raising=False)
    return fake


def decide(client, dtype="float32", op="all_gather", devices=2):
    members = [Device(client, i) for i in range(devices)]
    return _selection.decide(op, jnp.dtype(dtype), [list(range(devices))], members)


def test_decision_for_two_gpus(library):
    client = Client(devices=(0, 1))
    assert decide(client) == decide(client) == _selection.Decision("cuda")
    # The library learnt once which GPU is which device, and was asked once.
    assert library.announced == [{0: 0, 1: 1}] and library.asked == 1


def test_decision_with_gpus_renumbered(library, monkeypatch):
    client = Client()
    devices = [Device(client, 40), Device(client, 41)]
    devices[0].local_hardware_id, devices[1].local_hardware_id = 1, 0
    monkeypatch.setattr(client, "local_devices", lambda: devices)
    (record,) = _capability.of_processes(devices)
    assert [(gpu.id, gpu.uuid) for gpu in record.gpus] == [(41, "gpu0"), (40, "gpu1")]
    assert record.gpus[0].reaches == {"gpu1": True}
    assert library.announced == [{1: 40, 0: 41}]


@pytest.mark.parametrize(
    "dtype, op, text",
    [
        ("int4", "all_gather", "smaller than a byte"),
        ("float32", "psum", "psum has no CUDA implementation yet"),
    ],
)
def test_decision_by_request(dtype, op, text, library):
    decision = decide(Client(devices=(0, 1)), dtype, op)
    assert decision.path == "reference" and decision.level == logging.INFO
    assert text in decision.reason
    assert library.asked == 0  # a request that cannot be served asks nothing of the machine


def test_decision_by_environment(library, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "CUDA_async")
    decision = decide(Client(devices=(0, 1)))
    assert decision.level == logging.WARNING and "cuda_async" in decision.reason


@pytest.mark.parametrize("value, one_heap", [("false", False), ("0", False), ("true", True)])
def test_preallocation(value, one_heap, library, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", value)
    assert _capability.describe(Client(devices=(0, 1))).one_heap is one_heap


def test_no_driver(library):
    library.error = "CUDA driver version is insufficient"
    assert decide(Client(devices=(0, 1))).reason == "CUDA driver version is insufficient"


def test_a_bug_does_not_fall_through(library, monkeypatch):
    monkeypatch.setattr(library, "topology", lambda: {}["devices"])
    with pytest.raises(KeyError):
        decide(Client(devices=(0, 1)))


def test_library_for_another_cuda(library, monkeypatch):
    monkeypatch.setattr(Client, "platform_version", "PJRT C API\ncuda 12080")
    reason = decide(Client(devices=(0, 1))).reason
    assert "built for CUDA 13 and JAX's plugin for CUDA 12" in reason
    assert "install jax[cuda13]" in reason


def test_library_missing(library, monkeypatch):
    monkeypatch.setattr(_registry, "library", None)
    monkeypatch.setattr(_registry, "load_error", ImportError("libfoo.so: cannot open"))
    reason = decide(Client(devices=(0, 1))).reason
    assert "pk_jax._ffi is not there (ImportError: libfoo.so: cannot open)" in reason


def test_jaxlib_too_old(library, monkeypatch):
    monkeypatch.setattr(_compat, "jaxlib_version", lambda: (0, 11, 1))
    reason = decide(Client(devices=(0, 1))).reason
    assert "jaxlib 0.11.1 has no FFI Collectives extension; install jaxlib >= 0.11.2" in reason


@pytest.mark.parametrize("mesh", ["abstract", "of CPUs"])
def test_devices_unknown(mesh, library):
    devices = None if mesh == "abstract" else jax.devices("cpu")[:2]
    decision = _selection.decide("all_gather", jnp.dtype("int8"), [[0, 1]], devices)
    assert "the CUDA devices are not known here" in decision.reason
    assert "jax.set_mesh(mesh)" in decision.reason


# Several processes.


class Board:
    """A key-value store like jax.distributed's, which counts."""

    def __init__(self):
        self.values, self.reads, self.writes, self.timeouts = {}, 0, 0, []

    def key_value_set(self, key, value, allow_overwrite=False):
        self.writes += 1
        self.values[key] = value

    def blocking_key_value_get(self, key, timeout_ms):
        self.reads += 1
        self.timeouts.append(timeout_ms)
        if key not in self.values:
            raise RuntimeError("DEADLINE_EXCEEDED")
        return self.values[key]


@pytest.fixture
def board(library, monkeypatch):
    fake = Board()
    monkeypatch.setattr(_compat, "distributed_client", lambda: fake)
    library.gpus = 1
    return fake


def publish(board, record):
    board.values[f"pk_jax/capability/{record.index}"] = record.to_json()


def decide_as(index, board):
    """The decision of one process of two with a GPU each."""
    client = Client(index, devices=(0,))
    members = [Device(client, i, process_index=i) for i in range(2)]
    client.local_devices = lambda: [Device(client, index, index)]
    client.local_devices()[0].local_hardware_id = 0
    return _selection.decide("all_gather", jnp.dtype("float32"), [[0, 1]], members), client


def test_records_survive_the_store():
    for records in (machine(2, 2), with_gpu(machine(1, 2), 0, 1, compute_capability=(8, 6))):
        for record in records:
            assert Capability.from_json(record.to_json()) == record


@pytest.mark.parametrize("problem", [None, "no driver"])
def test_processes_agree(problem, board, monkeypatch):
    monkeypatch.setattr(
        _capability,
        "describe",
        lambda client: changed(machine(2, 1), 0, problem=problem)[client.process_index()],
    )
    for record in changed(machine(2, 1), 0, problem=problem):
        publish(board, record)
    first, _ = decide_as(0, board)
    second, _ = decide_as(1, board)
    assert first == second
    assert first.path == ("cuda" if problem is None else "reference")
    assert first.reason == ("" if problem is None else "process 0: no driver")


def test_a_record_is_published_and_read_once(board):
    publish(board, machine(2, 1)[1])
    client = Client(0, devices=(0,))
    members = [Device(client, 0, 0), Device(client, 1, 1)]
    for _ in range(3):
        records = _capability.of_processes(members)
    assert [record.index for record in records] == [0, 1]
    assert (board.writes, board.reads) == (1, 1)
    assert set(board.values) == {"pk_jax/capability/0", "pk_jax/capability/1"}
    assert Capability.from_json(board.values["pk_jax/capability/0"]) == records[0]


def test_a_process_alone_waits_for_nobody(board):
    client = Client(0, devices=(0,))
    assert [r.index for r in _capability.of_processes([Device(client, 0, 0)])] == [0]
    assert (board.writes, board.reads) == (1, 0)  # but others may wait for it


def test_a_process_that_says_nothing(board, monkeypatch):
    monkeypatch.setattr(_capability, "EXCHANGE_TIMEOUT_S", 2)
    with pytest.raises(RuntimeError, match="process 1 did not say within 2 s what it can do"):
        decide_as(0, board)
    assert board.timeouts == [2000]


def test_several_processes_without_a_store(library, monkeypatch):
    monkeypatch.setattr(_compat, "distributed_client", lambda: None)
    decision, _ = decide_as(0, None)
    assert decision.path == "reference" and "no jax.distributed store" in decision.reason


# What the doctor shows.


def test_paths_on_the_cpu():
    rows = _selection.paths()
    assert [row.op for row in rows] == list(_selection.OPS)
    for op, path, reason in rows:
        assert path == "reference" and reason.startswith(op) and "'cpu'" in reason


def test_paths_on_gpus(library):
    client = Client(devices=(0, 1))
    rows = {row.op: row for row in _selection.paths(client.local_devices())}
    assert rows["all_gather"] == ("all_gather", "cuda", "")
    assert rows["psum"][1:] == ("reference", _selection.why_no_kernel("psum"))


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

"""From devices to a decision, with a fake library, fake devices and a fake key-value store.

What one process says of itself, and how several come to the same choice.
"""

import dataclasses
import logging
import types

import jax
import jax.numpy as jnp
import pytest

from pk_jax import _capability, _compat, _paths, _registry, _selection
from pk_jax._capability import Capability, Gpu
from pk_jax._primitives import ragged

HANDLERS = tuple(
    f"pk_jax_{op}"
    for op in (
        *("all_gather", "all_to_all", "ppermute", "psum", "psum_scatter", "ragged_all_to_all"),
    )
)


def two_processes(problem=None):
    """The records of two processes with a GPU each; `problem` is the first one's."""
    version = f"pk_jax 0.1.0, jaxlib {'.'.join(map(str, _compat.jaxlib_version()))}"
    return [
        Capability(
            index,
            "host0",
            version=version,
            problem=problem if index == 0 else None,
            gpus=(Gpu(index, f"gpu{index}", (9, 0), {}),),
            handlers=HANDLERS,
            checks="0",
        )
        for index in range(2)
    ]


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
        self.gpus, self.error, self.nvlink = gpus, error, None

    def build_info(self):
        return {"cuda_runtime": "13.0", "version": "0.1.0"}

    def handlers(self):
        return dict.fromkeys(HANDLERS)

    def topology(self):
        self.asked += 1
        if self.error:
            raise RuntimeError(self.error)
        seen = range(self.gpus)
        common = {"compute_capability": [9, 0], "num_sms": 132}
        devices = [{"ordinal": i, "uuid": f"gpu{i}", **common} for i in seen]
        reached = [[i != j for j in seen] for i in seen]
        return {"devices": devices, "peer_access": reached, "nvlink": self.nvlink or reached}

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
    assert [gpu.num_sms for gpu in record.gpus] == [132, 132]
    assert library.announced == [{1: 40, 0: 41}]


@pytest.mark.parametrize(
    "dtype, op, text",
    [
        ("int4", "all_gather", "smaller than a byte"),
        ("float8_e5m2", "psum", "dtype float8_e5m2 has no CUDA sum"),
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


def test_decision_over_pcie(library):
    library.nvlink = [[False, False], [False, False]]
    decision = decide(Client(devices=(0, 1)))
    assert decision.path == "reference" and decision.level == logging.WARNING
    assert decision.reason == (
        "devices 0 and 1 reach each other over PCIe without native atomics; pk_jax needs NVLink"
    )


def test_ways_to_the_other_gpus(library, monkeypatch):
    library.gpus, no, yes = 4, False, True
    library.nvlink = [[no, yes, no, yes], [yes, no, no, no], [no] * 4, [no] * 4]
    topology = library.topology()
    topology["peer_access"][0][3] = no  # whatever is said of its atomics
    monkeypatch.setattr(library, "topology", lambda: topology)
    gpu = _capability.describe(Client(devices=(0, 1))).gpus[0]
    assert gpu.reaches == {"gpu1": True, "gpu2": False, "gpu3": False}
    assert gpu.without_atomics == ("gpu2",)


def test_an_empty_allocator_is_the_default(library, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "")
    record = _capability.describe(Client(devices=(0, 1)))
    assert record.allocator == "default" and record.one_heap


@pytest.mark.parametrize(
    "variables, fraction",
    [
        ({}, "0.75"),
        ({"XLA_CLIENT_MEM_FRACTION": ".5"}, ".5"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".4"}, ".4"),
        ({"XLA_CLIENT_MEM_FRACTION": "", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".4"}, ".4"),
    ],
)
def test_share_of_memory(variables, fraction):
    assert _capability.heap(variables).mem_fraction == fraction


@pytest.mark.parametrize(
    "value, one_heap",
    # As jaxlib reads it: FALSE is none of its words.
    [("false", False), ("0", False), ("true", True), ("", True), ("FALSE", True)],
)
def test_preallocation(value, one_heap, library, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", value)
    assert _capability.describe(Client(devices=(0, 1))).one_heap is one_heap


def test_decision_with_axes_left_to_xla(library):
    client = Client(devices=(0, 1))
    members = [Device(client, i) for i in range(2)]
    decision = _selection.decide("all_gather", jnp.dtype("int8"), [[0, 1]], members, ("dp",))
    assert decision.path == "reference" and decision.level == logging.WARNING
    assert "axes ('dp',) are not manual here" in decision.reason
    assert "axis_names of jax.shard_map" in decision.reason


def test_registration(library, monkeypatch):
    registered = []
    library.types = lambda: {"State": "ids"}
    library.handlers = lambda: {"pk_jax_all_gather": {"execute": "capsule"}}
    library.last_error = lambda: None
    monkeypatch.setattr(_registry._errors, "install", lambda *_: None)
    for name in ("register_ffi_type", "register_ffi_target"):
        monkeypatch.setattr(jax.ffi, name, lambda *args, **kw: registered.append((*args, kw)))
    _registry._register()
    cuda = {"platform": "CUDA"}
    assert registered == [
        ("State", "ids", cuda),
        ("pk_jax_all_gather", {"execute": "capsule"}, cuda),
    ]


def test_no_driver(library):
    library.error = "CUDA driver version is insufficient"
    assert decide(Client(devices=(0, 1))).reason == "CUDA driver version is insufficient"


def test_a_library_of_older_sources(library):
    names = [name for name in reversed(HANDLERS) if name != "pk_jax_psum"]
    library.handlers = lambda: dict.fromkeys(names)
    client = Client(devices=(0, 1))
    for op in _selection.OPS:
        decision = decide(client, op=op)
        if op in ("psum", "pmax", "pmin", "pmean"):
            text = f"the extension library has no kernel for {op}; rebuild pk_jax"
            assert decision == _selection.Decision("reference", text, logging.WARNING)
        else:
            assert decision.path == "cuda"
    (record,) = _capability.of_processes(client.local_devices())
    assert record.handlers == tuple(sorted(names))


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
    gpu = Gpu(3, "gpu3", (8, 6), {"gpu1": True, "gpu2": False}, ("gpu2",), 114)
    odd = Capability(1, "host", "platform", False, "0.1", "no driver", (gpu, gpu), ("a", "b"), "1")
    for record in (*two_processes(), odd):
        assert Capability.from_json(record.to_json()) == record


@pytest.mark.parametrize("problem", [None, "no driver"])
def test_processes_agree(problem, board, monkeypatch):
    monkeypatch.setattr(
        _capability,
        "describe",
        lambda client: two_processes(problem)[client.process_index()],
    )
    for record in two_processes(problem):
        publish(board, record)
    first, _ = decide_as(0, board)
    second, _ = decide_as(1, board)
    assert first == second
    assert first.path == ("cuda" if problem is None else "reference")
    assert first.reason == ("" if problem is None else "process 0: no driver")


def test_a_process_with_a_library_of_older_sources(board):
    old = dataclasses.replace(two_processes()[1], handlers=("pk_jax_psum",), host_id="host0")
    publish(board, old)
    decision, _ = decide_as(0, board)
    text = "process 1: the extension library has no kernel for all_gather; rebuild pk_jax"
    assert decision.reason == text


def test_processes_that_differ_in_checks(board, monkeypatch):
    first, second = two_processes()
    assert _selection.why_checks_differ(False, [first, second]) is None
    changed = [first, dataclasses.replace(second, checks="1")]
    for here, there in ((False, "process 1 started with '1'"), (True, "process 0 started with")):
        assert there in _selection.why_checks_differ(here, changed)
    monkeypatch.setenv("PK_JAX_CHECKS", "1")
    publish(board, second)
    client = Client(0, devices=(0,))
    members = [Device(client, 0, 0), Device(client, 1, 1)]
    monkeypatch.setattr(_compat, "mesh_devices", lambda ctx: members)
    with pytest.raises(RuntimeError, match="PK_JAX_CHECKS is '1' here, and process 1 started"):
        ragged._check_processes(None)
    monkeypatch.setattr(_compat, "mesh_devices", lambda ctx: members[:1])
    ragged._check_processes(None)


def test_a_record_is_published_and_read_once(board):
    publish(board, two_processes()[1])
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


def test_paths_on_gpus(library):
    client = Client(devices=(0, 1))
    rows = {row.op: row for row in _paths.paths(client.local_devices())}
    assert rows["all_gather"] == ("all_gather", "cuda", "")
    assert rows["psum"] == ("psum", "cuda", "")


def test_paths_of_products_on_gpus(library):
    """Which of them the kernels of the library can run, and what else they wait for."""

    def path_of(op, devices=(0, 1)):
        rows = _paths.paths(Client(devices=devices).local_devices())
        return next(row[1:] for row in rows if row.op == op)

    for op, path in (("matmul", "reference"), ("matmul_all_reduce", "unfused")):
        assert path_of(op)[0] == path and f"no kernel for {op}" in path_of(op)[1]
    names = [*HANDLERS, "pk_jax_matmul", "pk_jax_matmul_all_reduce"]
    library.handlers = lambda: dict.fromkeys(names)
    _capability.renew()
    assert path_of("matmul") == ("reference", _selection.SLOWER)
    path, reason = path_of("matmul_all_reduce")
    assert path == "cuda" and "one kernel where" in reason
    assert path_of("matmul_all_reduce", (0,))[0] == "unfused"
    assert path_of("attention")[0] == "reference"
    library.handlers = lambda: dict.fromkeys(
        [*HANDLERS, "pk_jax_attention", "pk_jax_attention_backward"]
    )
    _capability.renew()
    assert path_of("attention")[0] == "cuda" and "heads of up to 256" in path_of("attention")[1]
    assert path_of("ring_attention") == ("unfused", _selection.NO_RING)


def test_ops_loaded_later_are_seen_in_a_run_of_one_process(library, monkeypatch):
    client, names = Client(devices=(0, 1)), [*HANDLERS]
    library.handlers = lambda: dict.fromkeys(names)
    assert "was loaded" in decide(client, op="mine").reason
    names.append("pk_jax_mine")
    assert decide(client, op="mine").path == "reference"
    monkeypatch.setattr(_capability._compat, "distributed_client", lambda: object())
    _capability.renew()
    monkeypatch.setattr(_capability._compat, "distributed_client", lambda: None)
    assert decide(client, op="mine").path == "reference"  # other processes may have read the record
    _capability.renew()
    assert decide(client, op="mine").path == "cuda"

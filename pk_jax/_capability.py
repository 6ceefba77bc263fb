"""What one process can do for the CUDA path, and how the processes of a run tell each other."""

import dataclasses
import json
import os
import re
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pk_jax import _compat, _registry
from pk_jax._compat import Device

# Long enough for the slowest process to trace its way to its first pk op.
EXCHANGE_TIMEOUT_S = 300

# The environment variable that asks for checks at run time, read when a program is lowered.
CHECKS = "PK_JAX_CHECKS"

_KEY = "pk_jax/capability/{}"


class Heap(NamedTuple):
    """XLA's GPU heap as the environment asks for it.

    Attributes:
        allocator: its kind.
        preallocate: whether it is to be reserved at the start.
        mem_fraction: the share of a GPU that it takes then.
    """

    allocator: str
    preallocate: bool
    mem_fraction: str = "0.75"

    @property
    def one_region(self) -> bool:
        """Whether all of it lies in one region, which other processes can map."""
        return self.preallocate and self.allocator in ("default", "bfc")


def heap(variables: Mapping[str, str]) -> Heap:
    """The heap that `variables` ask for, read as jaxlib reads them; empty ones count as unset."""
    return Heap(
        variables.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() or "default",
        variables.get("XLA_PYTHON_CLIENT_PREALLOCATE", "") not in ("0", "false", "False"),
        variables.get("XLA_CLIENT_MEM_FRACTION")
        or variables.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
        or "0.75",
    )


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU of a process.

    Attributes:
        id: JAX's global device id.
        uuid: the GPU's own name, the same in every process.
        compute_capability: (major, minor).
        reaches: uuid of each other GPU the process sees -> whether the kernels of this GPU can work
            on its memory: by peer access and with atomics, as over NVLink.
        without_atomics: uuids of those that fail for the atomics alone, as over PCIe.
        num_sms: SMs of the GPU; 0 where nobody asked.
    """

    id: int
    uuid: str
    compute_capability: tuple[int, int]
    reaches: dict[str, bool]
    without_atomics: tuple[str, ...] = ()
    num_sms: int = 0


@dataclasses.dataclass(frozen=True)
class Capability:
    """One process: what pk_jax found in it.

    Attributes:
        index: process index in the run.
        host_id: equal exactly for processes that can pass each other file descriptors.
        allocator: kind of XLA's heap: "default", "platform", "cuda_async" and so on.
        preallocate: whether the heap is asked to be reserved at the start.
        version: versions of pk_jax and jaxlib.
        problem: why the kernels cannot run in this process at all; None if they can.
        gpus: the GPUs of the process.
        handlers: names of the custom calls that its library has, sorted.
        checks: PK_JAX_CHECKS; None where nobody could ask the process.
    """

    index: int
    host_id: str = ""
    allocator: str = "default"
    preallocate: bool = True
    version: str = ""
    problem: str | None = None
    gpus: tuple[Gpu, ...] = ()
    handlers: tuple[str, ...] = ()
    checks: str | None = None

    @property
    def one_heap(self) -> bool:
        """Whether all of XLA's memory lies in one region that can be exported."""
        return Heap(self.allocator, self.preallocate).one_region

    def to_json(self) -> str:
        """The record as text."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Capability":
        """The record that `to_json` wrote."""
        fields = json.loads(text)
        gpus = tuple(
            Gpu(**gpu | {key: tuple(gpu[key]) for key in ("compute_capability", "without_atomics")})
            for gpu in fields.pop("gpus")
        )
        handlers = tuple(fields.pop("handlers", ()))
        return cls(**fields, gpus=gpus, handlers=handlers)


# Records by process index, for each JAX client: a client lives as long as one distributed run, so
# a record is published once and read once in it. Weak, so as not to keep a backend alive.
_records: weakref.WeakKeyDictionary[Any, dict[int, Capability]] = weakref.WeakKeyDictionary()


def of_processes(devices: Sequence[Device]) -> list[Capability]:
    """The records of the processes that own the devices, by process index.

    Raises:
        RuntimeError: a process did not publish its record.
    """
    client = devices[0].client
    me = client.process_index()
    indices = sorted({device.process_index for device in devices})
    board = _compat.distributed_client()
    if board is None and indices != [me]:
        # The same in every process, so the choice still agrees.
        problem = "the run has several processes but no jax.distributed store to agree through"
        return [Capability(index, problem=problem) for index in indices]
    known = _records.setdefault(client, {})
    if me not in known:
        known[me] = describe(client)
        if board is not None:
            board.key_value_set(_KEY.format(me), known[me].to_json(), allow_overwrite=True)
    for index in indices:
        if index not in known:
            known[index] = _read(board, index)
    return [known[index] for index in indices]


def renew() -> None:
    """Lets this process describe itself again, unless others may have read what it said."""
    if _compat.distributed_client() is None:
        _records.clear()


def describe(client: Any) -> Capability:
    """This process's record.

    It is asked for before the first call to a handler, so it also tells the library which of its
    GPUs is which JAX device.
    """
    problem = _registry.why_missing() or _other_cuda(client)
    found = heap(os.environ)
    base = Capability(
        index=client.process_index(),
        allocator=found.allocator,
        preallocate=found.preallocate,
        version=_versions(),
        problem=problem,
        checks=os.environ.get(CHECKS) or "0",
    )
    if problem is not None:
        return base
    base = dataclasses.replace(base, handlers=tuple(sorted(_registry.library.handlers())))
    try:
        topology = _registry.library.topology()
    except RuntimeError as error:
        return dataclasses.replace(base, problem=str(error))
    ids = {device.local_hardware_id: device.id for device in client.local_devices()}
    _registry.library.set_local_devices(ids)
    return dataclasses.replace(base, host_id=_registry.library.host_id(), gpus=_gpus(topology, ids))


def _gpus(topology: dict[str, Any], ids: dict[int, int]) -> tuple[Gpu, ...]:
    """The GPUs that JAX uses, with their way to every GPU the process sees."""
    seen = topology["devices"]
    gpus = []
    rows = zip(seen, topology["peer_access"], topology["nvlink"], strict=True)
    for device, access, atomics in rows:
        if device["ordinal"] not in ids:
            continue
        others = [
            (other["uuid"], bool(access[i]), bool(access[i] and atomics[i]))
            for i, other in enumerate(seen)
            if other["uuid"] != device["uuid"]
        ]
        gpus.append(
            Gpu(
                id=ids[device["ordinal"]],
                uuid=device["uuid"],
                compute_capability=tuple(device["compute_capability"]),
                reaches={uuid: usable for uuid, _, usable in others},
                without_atomics=tuple(u for u, mapped, usable in others if mapped and not usable),
                num_sms=device["num_sms"],
            )
        )
    return tuple(gpus)


def _other_cuda(client: Any) -> str | None:
    """Whether XLA's CUDA plugin and our library were built for different CUDA majors."""
    found = re.search(r"cuda (\d+)", client.platform_version)
    built = _registry.cuda_runtime()
    if found is None or built is None or int(found[1]) // 1000 == built[0]:
        return None
    return (
        f"pk_jax was built for CUDA {built[0]} and JAX's plugin for CUDA {int(found[1]) // 1000}; "
        f"install jax[cuda{built[0]}] or rebuild pk_jax"
    )


def _versions() -> str:
    build = _registry.library.build_info()["version"] if _registry.library is not None else "none"
    return f"pk_jax {build}, jaxlib {'.'.join(map(str, _compat.jaxlib_version()))}"


def _read(board: Any, index: int) -> Capability:
    try:
        text = board.blocking_key_value_get(_KEY.format(index), EXCHANGE_TIMEOUT_S * 1000)
    except Exception as error:
        raise RuntimeError(
            f"pk_jax: process {index} did not say within {EXCHANGE_TIMEOUT_S} s what it can do. "
            "Every process of the mesh must reach the same pk op; look there for an earlier error"
        ) from error
    return Capability.from_json(text)

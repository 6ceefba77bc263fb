"""What this machine can do, and which path each op takes on it and why.

`doctor` asks JAX for its devices, as any JAX program does, so it starts a backend if none is there
yet; it joins no job and runs no kernel. The command line runs it in a process of its own with a
time limit, because a GPU driver in a bad state can leave that question unanswered for ever.
"""

import contextlib
import ctypes
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import jax

from pk_jax import _capability, _compat, _paths, _registry
from pk_jax._tuning import cost_model, hardware
from pk_jax._tuning.cost_model import Work

# Read from the environment by pk_jax, JAX, XLA, CUDA or NCCL, with a bearing on paths or speed.
_VARIABLES = re.compile(
    r"PK_JAX_\w+|XLA_\w+|JAX_\w+|NCCL_\w+|CUDA_(VISIBLE_DEVICES|MODULE_LOADING|LAUNCH_BLOCKING"
    r"|DEVICE_MAX_CONNECTIONS|MPS_\w+)|NVIDIA_VISIBLE_DEVICES|TF_GPU_ALLOCATOR"
)
_DIRECT = "peers map it, so kernels read and write XLA's buffers without staging"
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from pk_jax._doctor import child_main; child_main()"
)


def doctor(query_devices: bool = True) -> dict[str, Any]:
    """What the command line prints, as data that JSON can hold.

    Args:
        query_devices: ask JAX and the CUDA driver for the devices, and with them for the paths of
            the ops. Without, those parts are empty.
    """
    # Before the devices, which load libraries and set variables of their own.
    out: dict[str, Any] = {"environment": environment(), "allocator": allocator(os.environ)}
    out["library"] = _library()
    out["collectives_extension"] = _compat.jaxlib_version() >= _registry.OLDEST_JAXLIB
    out |= _devices() if query_devices else {"devices": [], "devices_error": None, "ops": []}
    out |= _links() if query_devices else {"gpus": [], "links": None, "links_error": None}
    out |= _live()
    out["versions"] = library_versions()  # last: NCCL is asked once it is loaded
    return json.loads(json.dumps(out))  # the library's tuples become lists


def report_in_child(timeout_s: float) -> dict[str, Any]:
    """`doctor` in a process of its own; without its device parts if that fails or does not end."""
    try:
        child = subprocess.Popen(
            # -P and the explicit path: the child finds the very pk_jax that this process runs.
            [sys.executable, "-P", "-c", _CHILD, json.dumps(sys.path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    except OSError as error:
        return doctor(query_devices=False) | {"devices_error": f"cannot start Python: {error}"}
    try:
        stdout, stderr = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=5)  # no longer: a process inside a stuck driver never ends
        reason = (
            f"the device query did not end within {timeout_s:g} s; "
            "the GPU driver may be stuck (does nvidia-smi answer?)"
        )
        return doctor(query_devices=False) | {"devices_error": reason}
    if child.returncode == 0:
        return json.loads(stdout.splitlines()[-1])
    last = (stderr.strip().splitlines() or ["no message"])[-1]
    reason = f"the device query ended with code {child.returncode}: {last}"
    return doctor(query_devices=False) | {"devices_error": reason}


def child_main() -> None:
    """Prints the report as one line of JSON, without taking the GPUs' memory for it."""
    before = doctor(query_devices=False)
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    print(json.dumps(doctor() | {key: before[key] for key in ("environment", "allocator")}))


def environment() -> dict[str, str]:
    """The variables that are set and matter, sorted by name."""
    return {k: v for k, v in sorted(os.environ.items()) if _VARIABLES.fullmatch(k)}


def allocator(variables: Mapping[str, str]) -> dict[str, Any]:
    """The kind of XLA's GPU heap that `variables` ask for, and what it means for peers."""
    heap = _capability.heap(variables)
    if heap.allocator == "cuda_async":
        means = "no peer can map it, so every op takes the reference"
    elif heap.one_region:
        means = f"{_DIRECT}, in one process and across processes"
    else:
        means = f"{_DIRECT}; across processes ops take the reference, as it is not one region"
    return {
        "kind": heap.allocator,
        "preallocate": heap.one_region,
        "mem_fraction": heap.mem_fraction,
        "means": means,
    }


def library_versions() -> dict[str, str | None]:
    """Versions of everything involved; None for what is not there."""
    from pk_jax import __version__  # the package may still be importing this module

    build = _registry.library.build_info() if _registry.library is not None else {}
    return {
        "pk_jax": __version__,
        "python": platform.python_version(),
        "jax": _distribution("jax"),
        "jaxlib": _distribution("jaxlib"),
        "jax_cuda_plugin": _distribution("jax-cuda13-plugin") or _distribution("jax-cuda12-plugin"),
        "cuda_runtime": build.get("cuda_runtime"),
        "ffi_api": ".".join(map(str, build["ffi_api"])) if "ffi_api" in build else None,
        "driver": _kernel_driver(),
        "driver_cuda": _topology()[0].get("driver"),
        "nccl": _nccl(),
    }


def _library() -> dict[str, Any]:
    build = _registry.library.build_info() if _registry.library is not None else {}
    return {
        "loaded": _registry.library is not None,
        "usable": _registry.why_missing() is None,
        "reason": _registry.why_missing(),
        "arch": build.get("arch"),
    }


def _devices() -> dict[str, Any]:
    try:
        devices = jax.devices()
    except Exception as error:  # a report says what is wrong; JAX raises many kinds here
        text = f"{type(error).__name__}: {error}".rstrip(": ")
        return {"devices": [], "devices_error": text, "ops": []}
    listed = [
        {
            "id": device.id,
            "process": device.process_index,
            "local": device.process_index == jax.process_index(),
            "platform": device.platform,
            "kind": device.device_kind,
            "local_hardware_id": getattr(device, "local_hardware_id", None),
        }
        for device in devices
    ]
    return {"devices": listed, "devices_error": None, "ops": _ops()}


def _ops() -> list[dict[str, Any]]:
    """The path of each op among this process's devices.

    Only those: what the other processes of a job can do is theirs to say, and would be waited for.
    """
    devices = jax.local_devices()
    rows: list[dict[str, Any]] = []
    for op, implementation, reason in _paths.paths(devices):
        row = {"op": op, "implementation": implementation, "reason": reason or None, "choices": []}
        if implementation == "cuda":
            row["choices"] = _choices(op, devices[0].device_kind, len(devices))
        rows.append(row)
    return rows


def _choices(op: str, device_kind: str, num_ranks: int) -> list[dict[str, Any]]:
    """What the cost model picks from 1 KiB to 1 GiB a rank, neighbours with one choice joined.

    Empty for an op whose sizes are known on the device alone.
    """
    op = {"pmax": "psum", "pmin": "psum", "pmean": "psum"}.get(op, op)
    if op not in cost_model.MECHANISMS:
        return []
    record = hardware.lookup(device_kind)
    rows: list[dict[str, Any]] = []
    for size in (1 << shift for shift in range(10, 31)):
        choice = cost_model.choose(record, Work(op, size, num_ranks, size))
        how = {"mechanism": choice.mechanism, "protocol": choice.protocol}
        if choice.algorithm:
            how["algorithm"] = choice.algorithm
        if rows and how.items() <= rows[-1].items():
            rows[-1]["to_bytes"] = size
        else:
            rows.append({"from_bytes": size, "to_bytes": size, **how})
    return rows


def _links() -> dict[str, Any]:
    topology, error = _topology()
    links = None
    if topology:
        links = {"peer_access": topology["peer_access"], "nvlink": topology["nvlink"]}
    return {"gpus": topology.get("devices", []), "links": links, "links_error": error}


def _live() -> dict[str, Any]:
    """What pk_jax's kernels have built and met in this process so far."""
    library = _registry.library
    return {
        "communicators": library.communicators() if library is not None else [],
        "last_error": _registry.last_error(),
    }


def _topology() -> tuple[dict[str, Any], str | None]:
    if _registry.library is None:
        return {}, "unknown without the compiled library"
    try:
        return _registry.library.topology(), None
    except RuntimeError as error:
        return {}, str(error)


def _kernel_driver() -> str | None:
    path = pathlib.Path("/proc/driver/nvidia/version")
    try:
        found = re.search(r"\b(\d{3,}(?:\.\d+)+)\b", path.read_text())
    except OSError:
        return None
    return found.group(1) if found else None


def _nccl() -> str | None:
    """The version of the NCCL that is loaded here; of the installed wheel if none is loaded yet."""
    try:
        maps = pathlib.Path("/proc/self/maps").read_text()
        found = re.search(r"(/\S*libnccl\.so\S*)", maps)
        if found:
            code = ctypes.c_int()
            ctypes.CDLL(found.group(1)).ncclGetVersion(ctypes.byref(code))
            return nccl_version(code.value)
    except (OSError, AttributeError):
        pass  # the wheel's version is as good an answer
    return _distribution("nvidia-nccl-cu13") or _distribution("nvidia-nccl-cu12")


def nccl_version(code: int) -> str:
    """22809 gives '2.28.9'."""
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"


def _distribution(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def render(data: dict[str, Any]) -> str:
    """The report as text."""
    sections = [_versions_text, _library_text, _devices_text, _links_text, _memory_text, _ops_text]
    return "\n\n".join(section(data) for section in sections)


def _versions_text(data: dict[str, Any]) -> str:
    version = {k: v or "not found" for k, v in data["versions"].items()}
    return "\n".join(
        [
            f"pk_jax {version['pk_jax']}",
            f"  Python {version['python']}, jax {version['jax']}, jaxlib {version['jaxlib']}, "
            f"CUDA plugin {version['jax_cuda_plugin']}",
            f"  CUDA runtime of the library {version['cuda_runtime']}, FFI {version['ffi_api']}",
            f"  GPU driver {version['driver']} (CUDA {version['driver_cuda']}), "
            f"NCCL {version['nccl']}",
        ]
    )


def _library_text(data: dict[str, Any]) -> str:
    library = data["library"]
    state = f"loaded, built for {library['arch']}" if library["loaded"] else "not loaded"
    if library["reason"]:
        state = f"not usable: {library['reason']}"
    live = "".join(
        f"\nCommunicator: rank {c['rank']} of {c['num_ranks']} on device {c['device']}, "
        f"{c['num_processes']} process(es), {c['workspace_bytes']} bytes"
        for c in data["communicators"]
    )
    if data["last_error"]:
        live += f"\nLast error of a kernel: {data['last_error']}"
    extension = "present" if data["collectives_extension"] else "missing (needs jaxlib >= 0.11.2)"
    return f"Compiled library: {state}\nFFI Collectives extension: {extension}{live}"


def _devices_text(data: dict[str, Any]) -> str:
    if data["devices_error"]:
        return f"JAX devices: none: {data['devices_error']}"
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for device in data["devices"]:
        by_kind.setdefault(f"{device['kind']} ({device['platform']})", []).append(device)
    processes = len({device["process"] for device in data["devices"]})
    if not by_kind:
        return "JAX devices: not asked for"
    counts = ", ".join(f"{len(group)} x {kind}" for kind, group in by_kind.items())
    return f"JAX devices: {counts}; {processes} process{'es' if processes != 1 else ''}"


def _links_text(data: dict[str, Any]) -> str:
    if not data["links"]:
        return f"GPUs and links: {data['links_error'] or 'not asked for'}"
    rows = [
        f"  {gpu['ordinal']}  {gpu['name']}  sm_{''.join(map(str, gpu['compute_capability']))}  "
        f"{gpu['num_sms']} SMs  {gpu['memory_bytes'] / 1e9:.0f} GB  "
        f"{gpu['copy_engines']} copy engines  {gpu['pci']}"
        + ("" if gpu["vmm"] else "  no virtual memory management")
        for gpu in data["gpus"]
    ]
    return "\n".join(["GPUs", *rows, "Access of row to column", *_matrix(data["links"])])


def _matrix(links: dict[str, list[list[bool]]]) -> list[str]:
    def cell(row: int, column: int) -> str:
        if row == column:
            return "-"
        if not links["peer_access"][row][column]:
            return "none"
        return "NVLink" if links["nvlink"][row][column] else "PCIe"

    size = range(len(links["peer_access"]))
    header = "     " + "".join(f"{column:>8}" for column in size)
    return [header, *(f"  {row:>3}" + "".join(f"{cell(row, c):>8}" for c in size) for row in size)]


def _memory_text(data: dict[str, Any]) -> str:
    heap = data["allocator"]
    taken = f"takes {heap['mem_fraction']} of a GPU at start" if heap["preallocate"] else "grows"
    variables = [f"  {k}={v}" for k, v in data["environment"].items()] or ["  none set"]
    return "\n".join(
        [f"XLA's GPU heap: {heap['kind']}, {taken}: {heap['means']}", "Environment", *variables]
    )


def _ops_text(data: dict[str, Any]) -> str:
    if not data["ops"]:
        return "Ops: unknown without devices"
    width = max(len(row["op"]) for row in data["ops"])
    lines = []
    for row in data["ops"]:
        why = f": {row['reason']}" if row["reason"] else ""
        lines.append(f"  {row['op']:<{width}}  {row['implementation']}{why}")
        for choice in row["choices"]:
            sizes = f"{_bytes(choice['from_bytes'])} to {_bytes(choice['to_bytes'])} a rank"
            details = ", ".join(choice[k] for k in ("protocol", "algorithm") if k in choice)
            how = f"{choice['mechanism']} ({details})"
            lines.append(f"  {'':<{width}}    {sizes}: {how}")
    return "\n".join(["Ops on this process's devices as one axis", *lines])


def _bytes(count: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << shift:
            return f"{count >> shift} {unit}"
    return f"{count} B"

"""Which implementation an op runs with, and why.

Two halves. `why_not_cuda` and `why_not_dtype` are pure functions over plain records. Around them
stands what gathers the records: each process describes itself once (`Capability`), and in a
multi-process run publishes the description and reads the others', because every process compiles
the same program and so must come to the same choice.
"""

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pk_jax import _capability, _compat
from pk_jax._capability import Capability
from pk_jax._compat import Device

logger = logging.getLogger("pk_jax")

OPS = (
    "all_gather",
    "psum",
    "pmax",
    "pmin",
    "pmean",
    "psum_scatter",
    "all_to_all",
    "ppermute",
    "ragged_all_to_all",
)

# The ops that are composed of CUDA inside hosts and jax.lax across.
HIERARCHICAL_OPS = ("all_gather", "psum", "pmax", "pmin", "pmean", "psum_scatter")

# The ops that do arithmetic. A pmean is a psum.
_SUMS = ("psum", "pmean", "psum_scatter")
_REDUCTIONS = (*_SUMS, "pmax", "pmin")
PRODUCTS = ("matmul", "ragged_dot")
COLLECTIVE_PRODUCTS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
ATTENTION = ("attention", "ring_attention", "ulysses_attention")
ATTENTION_BACKWARD = "attention_backward"

# The ops whose kernels are for halves (matmul has one for float8 as well).
_OF_HALVES = (*PRODUCTS, *COLLECTIVE_PRODUCTS, ATTENTION[0], ATTENTION_BACKWARD)

# What no library may call its op: ops and custom calls of pk_jax.
FURTHER_CALLS = (
    "matmul_reduce_scatter_few_rows",
    "matmul_all_reduce_few_rows",
    ATTENTION_BACKWARD,
    "noop",
)
TAKEN = frozenset((*OPS, *PRODUCTS, *COLLECTIVE_PRODUCTS, *ATTENTION, *FURTHER_CALLS))

# The ops that are another's custom call.
_CALLS: dict[str, str] = dict.fromkeys(("pmax", "pmin", "pmean"), "psum")

# What the pointer table of a communicator has room for.
MAX_RANKS = 72

COMPUTE_CAPABILITY = (9, 0)

# What jax.Device.platform says of a CUDA device: JAX's own word for it, and XLA's.
GPU_PLATFORMS = ("gpu", "cuda")


@dataclasses.dataclass(frozen=True)
class Decision:
    """The path of an op, and if it is not "cuda" the reason.

    Attributes:
        path: "cuda", "reference", "hierarchical" or "unfused".
        reason: why it is not "cuda".
        level: logging level that the reason deserves: a warning if a change to the machine or to
            its settings would make the op faster.
    """

    path: str
    reason: str = ""
    level: int = logging.INFO


def decide(
    op: str,
    dtype: Any,
    groups: Sequence[Sequence[int]],
    devices: Sequence[Device] | None,
    auto_axes: Sequence[Any] = (),
) -> Decision:
    """The path of an op that is being lowered for CUDA.

    Args:
        op: name of the op.
        dtype: the operand's.
        groups: logical ids of the ranks of each group.
        devices: the devices by logical id; None if the mesh has none.
        auto_axes: mesh axes that are not manual.

    Raises:
        RuntimeError: another process of the run did not say what it can do.
    """
    reason = why_not_dtype(dtype, op) or why_not_sizes(groups)
    if reason is not None:
        return Decision("reference", reason)
    if devices is None or devices[0].platform not in GPU_PLATFORMS:
        return Decision("reference", _NO_DEVICES)
    if auto_axes:
        return Decision("reference", why_auto_axes(auto_axes), logging.WARNING)
    ids = [[devices[i].id for i in group] for group in groups]
    records = _capability.of_processes(devices)
    reason = why_not_cuda(ids, records) or why_no_kernel(op, records)
    if reason is not None:
        return Decision("reference", reason, logging.WARNING)
    return Decision("cuda")


def num_sms(devices: Sequence[Device]) -> int | None:
    """SMs of the smallest of some devices, as their processes tell; None if none does."""
    if devices[0].platform not in GPU_PLATFORMS:
        return None
    ids = {device.id for device in devices}
    records = _capability.of_processes(devices)
    found = [gpu.num_sms for process in records for gpu in process.gpus if gpu.id in ids]
    return min(found, default=0) or None


def why_not_dtype(dtype: Any, op: str | None = None) -> str | None:
    """Why the CUDA path cannot move elements of a dtype, nor reduce them in an op; None if it can.

    Args:
        dtype: the operand's.
        op: the op; None asks for moving alone.
    """
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return f"dtype {dtype} is an extended dtype, and only plain elements are moved"
    if _compat.bits_per_element(dtype) < 8:
        return f"dtype {dtype} is smaller than a byte, and only whole bytes are moved"
    if op in _OF_HALVES:
        if dtype.name in _HALVES or (op == "matmul" and dtype.name == FLOAT8):
            return None
        return f"dtype {dtype} has no CUDA {op}; the kernels multiply {_HALVES}"
    if op not in _REDUCTIONS or jnp.issubdtype(dtype, jnp.integer) or dtype.name in _FLOATS:
        return None
    if op in _SUMS:
        if dtype.name in _COMPLEX:
            return None
        return f"dtype {dtype} has no CUDA sum; the kernels add integers, {_FLOATS} and {_COMPLEX}"
    if dtype.name == "bool":
        return None
    return f"dtype {dtype} has no CUDA {op}; the kernels compare bool, integers and {_FLOATS}"


def why_not_sizes(groups: Sequence[Sequence[int]]) -> str | None:
    """Why the CUDA path cannot serve groups of these sizes; None if it can."""
    sizes = [len(group) for group in groups]
    if len(set(sizes)) > 1:
        return f"the groups have different sizes {sizes}, and the kernels take groups of one size"
    return None


def why_not_cuda(groups: Iterable[Sequence[int]], capabilities: Sequence[Capability]) -> str | None:
    """Why the CUDA path cannot serve groups of devices; None if it can.

    Every group counts, also those this process is not in: one program serves them all.

    Args:
        groups: global device ids of the ranks of each group.
        capabilities: one record for each process that owns one of the devices.
    """
    groups = list(groups)
    several = len(capabilities) > 1
    for process in capabilities:
        if process.problem is not None:
            return f"process {process.index}: {process.problem}" if several else process.problem
    versions = {process.version for process in capabilities}
    if len(versions) > 1:
        return f"the processes run different versions of pk_jax and jaxlib: {sorted(versions)}"
    for process in capabilities:
        if process.allocator == "cuda_async" and any(len(group) > 1 for group in groups):
            return (
                "XLA's heap is a cuda_async pool (XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async), which "
                "no peer can map; unset XLA_PYTHON_CLIENT_ALLOCATOR"
            )
    owner = {gpu.id: (process, gpu) for process in capabilities for gpu in process.gpus}
    for group in groups:
        reason = _why_not_group([(i, *owner[i]) if i in owner else (i,) for i in group])
        if reason is not None:
            return reason
    return None


def why_no_kernel(op: str, capabilities: Sequence[Capability]) -> str | None:
    """Why the library of a process, built from other sources, cannot run an op; None if it can."""
    for process in capabilities:
        if f"pk_jax_{_CALLS.get(op, op)}" not in process.handlers:
            where = f"process {process.index}: " if len(capabilities) > 1 else ""
            if op in (*OPS, *_OF_HALVES):
                return f"{where}the extension library has no kernel for {op}; rebuild pk_jax"
            return (
                f"{where}no library with a kernel for {op} was loaded; call pk_jax.load_ops() in "
                "every process before its first pk op is lowered"
            )
    return None


def why_checks_differ(checks: bool, capabilities: Sequence[Capability]) -> str | None:
    """Why processes would compile different programs, for some with PK_JAX_CHECKS=1.

    Args:
        checks: whether this process is about to compile with checks.
        capabilities: the records of all processes of the program.
    """
    wanted = "1" if checks else "0"
    for process in capabilities:
        if process.checks not in (None, wanted):
            return (
                f"{_capability.CHECKS} is {wanted!r} here, and process {process.index} started "
                f"with {process.checks!r}; all processes must have one value, set before their "
                "first pk op"
            )
    return None


def inner_axes(
    sizes: Mapping[Any, int], runs: Callable[[tuple[Any, ...]], bool]
) -> tuple[Any, ...]:
    """The axes that an op is composed of inside hosts: of those that run, the most ranks.

    Args:
        sizes: the axes of the op and their sizes, in its order.
        runs: whether the kernels can serve groups over some of the axes.

    Returns:
        Some of the axes, in their order; among equal sizes the later ones, whose ranks are
        neighbours. Empty if nothing can run, or if it is not several axes.
    """
    axes = [axis for axis in sizes if sizes[axis] > 1]
    found: list[tuple[Any, ...]] = []
    for count in range(1, len(axes)):
        found += itertools.combinations(axes[::-1], count)
    found.sort(key=lambda some: -math.prod(sizes[axis] for axis in some))
    for some in found:
        if runs(some[::-1]):
            return some[::-1]
    return ()


def why_hierarchical(axes: Sequence[Any], inner: Sequence[Any], reason: str) -> str:
    """What to say of an op that is composed, since the kernels cannot serve all its axes."""
    outer = tuple(axis for axis in axes if axis not in inner)
    return f"CUDA over {tuple(inner)} and jax.lax over {outer}, since {reason}"


def why_platform(op: str, *platforms: str) -> str:
    """What to say of an op lowered for a platform other than CUDA, or for several at once."""
    names = " and ".join(map(repr, platforms))
    return (
        f"{op} is lowered for platform {names}, and its kernels need CUDA devices; "
        "implementation=None runs it through jax.lax there"
    )


def why_too_long(op: str, size: int, most: int) -> str:
    """What to say of an op with a dimension that its kernels do not count."""
    return f"the kernels of {op} take dimensions of {most} at most, got {size}; split it"


def why_mixed(op: str, x: Any, w: Any, out: Any) -> str:
    """What to say of a product whose dtypes the kernels do not combine."""
    float8 = f", and two of {FLOAT8} to any of these" if op == "matmul" else ""
    return (
        f"{x} times {w} to {out} has no CUDA {op}; the kernels multiply two of {_HALVES} alike, "
        f"to the same or to float32{float8}"
    )


def why_auto_axes(axes: Sequence[Any]) -> str:
    """What to say of an op inside a shard_map that leaves mesh axes to XLA."""
    return (
        f"the mesh axes {tuple(axes)} are not manual here, and XLA would replicate the operand "
        "over them before a custom call; add them to the axis_names of jax.shard_map"
    )


_logged: set[tuple[str, str]] = set()


def log_once(op: str, decision: Decision) -> None:
    """Logs why an op does not take the kernels alone, the first time for that reason."""
    if (op, decision.reason) not in _logged:
        _logged.add((op, decision.reason))
        ways = {"hierarchical": "the hierarchical path", "unfused": "its parts one after the other"}
        way = ways.get(decision.path, "the reference")
        logger.log(decision.level, "%s takes %s: %s", op, way, decision.reason)


_FLOATS = ("float64", "float32", "float16", "bfloat16")
_COMPLEX = ("complex64", "complex128")
_HALVES = ("float16", "bfloat16")
FLOAT8 = "float8_e4m3fn"

SLOWER = (
    "the kernels are not as fast as XLA's product at every shape yet; implementation='cuda', or a "
    "tile, runs them"
)
NO_TANGENT = (
    "the kernels of attention are its values and their cotangents, and tangents, as of jax.jvp, "
    "are jax.lax"
)
NO_RING = (
    "there is no one kernel for a ring; implementation=None composes it of pk.ppermute and "
    "attention on each device, on the paths of their own"
)
MAPPED = (
    "a map over all operands is one batched product, for which there are no kernels; jax.lax.map "
    "runs them one by one"
)
NAMED = (
    "the operands' types name mesh axes, which folding their dimensions into rows would lose; call "
    "it inside jax.shard_map"
)
PARTITIONED = (
    "XLA partitions this program over several devices, and a custom call would make it gather the "
    "operands on each; call it inside jax.shard_map"
)

ALONE = (
    "a group of one rank has no peers, which the kernels of custom ops are for; the reference "
    "means the same there"
)

CROSSES_HOSTS = "the axis crosses hosts"
_NO_DEVICES = (
    "the CUDA devices are not known here (an AbstractMesh, jax.export or a mesh of other devices); "
    "pass jax.shard_map a concrete mesh or call jax.set_mesh(mesh)"
)


def _why_not_group(members: Sequence[tuple[Any, ...]]) -> str | None:
    if len(members) > MAX_RANKS:
        return f"a group of {len(members)} ranks is larger than {MAX_RANKS}"
    for member in members:
        if len(member) == 1:
            return f"no process described device {member[0]}"
        if member[2].compute_capability != COMPUTE_CAPABILITY:
            have = ".".join(map(str, member[2].compute_capability))
            need = ".".join(map(str, COMPUTE_CAPABILITY))
            return (
                f"device {member[0]} has compute capability {have}, and the kernels are built for "
                f"{need} (Hopper)"
            )
    first, first_process, _ = members[0]
    for device, process, _ in members:
        if process.host_id != first_process.host_id:
            return (
                f"{CROSSES_HOSTS}: devices {first} (process {first_process.index}) and "
                f"{device} (process {process.index}) cannot share memory"
            )
    if len({process.index for _, process, _ in members}) > 1:
        for _, process, _ in members:
            if not process.one_heap:
                return (
                    f"process {process.index} shares memory with other processes, and its heap is "
                    "not one exportable region (XLA_PYTHON_CLIENT_ALLOCATOR=platform or "
                    "XLA_PYTHON_CLIENT_PREALLOCATE=false); unset both"
                )
    for device, _, gpu in members:
        for other, _, peer in members:
            # A GPU that the process does not see is not in `reaches`; the communicator's round
            # trip then tells.
            if gpu.uuid == peer.uuid or gpu.reaches.get(peer.uuid, True):
                continue
            if peer.uuid in gpu.without_atomics:
                return (
                    f"devices {device} and {other} reach each other over PCIe without native "
                    "atomics; pk_jax needs NVLink"
                )
            return f"device {device} has no peer access to device {other}"
    return None

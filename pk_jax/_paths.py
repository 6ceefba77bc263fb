"""The path each op takes on some devices and why, as `pk-jax doctor` shows it."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pk_jax import _selection
from pk_jax._compat import Device
from pk_jax._selection import Decision

OPS = (
    *_selection.OPS,
    *_selection.PRODUCTS,
    *_selection.COLLECTIVE_PRODUCTS,
    *_selection.ATTENTION,
)


class Path(NamedTuple):
    """One row of `paths`; "cuda" has a reason only where it is not the whole answer."""

    op: str
    path: str
    reason: str


def paths(devices: Sequence[Device] | None = None) -> list[Path]:
    """The path each op takes in a group of all the devices (this process's backend by default).

    Collectives are asked for float32, products and attention for bfloat16.
    """
    devices = list(devices if devices is not None else jax.devices())
    rows = []
    for op in OPS:
        if devices[0].platform not in _selection.GPU_PLATFORMS:
            reason = _selection.why_platform(op, devices[0].platform)
            decision = Decision("reference", reason)
        elif op in _selection.PRODUCTS:
            decision = _of_product(op, devices)
        elif op in _selection.COLLECTIVE_PRODUCTS:
            decision = _of_collective_product(op, devices)
        elif op == "attention":
            decision = _of_attention(op, devices)
        elif op in _selection.ATTENTION:
            decision = Decision("unfused", _selection.NO_RING if "ring" in op else _ULYSSES)
        else:
            decision = _of_collective(op, devices)
        rows.append(Path(op, decision.path, decision.reason))
    return rows


def _of_collective(op: str, devices: Sequence[Device]) -> Decision:
    decision = _selection.decide(op, jnp.dtype("float32"), [range(len(devices))], devices)
    if op in _selection.HIERARCHICAL_OPS and _selection.CROSSES_HOSTS in decision.reason:
        return dataclasses.replace(decision, reason=f"{decision.reason}; {_COMPOSED}")
    return decision


def _of_product(op: str, devices: Sequence[Device]) -> Decision:
    alone = [[i] for i in range(len(devices))]
    decision = _selection.decide(op, jnp.dtype("bfloat16"), alone, devices)
    return Decision("reference", _selection.SLOWER) if decision.path == "cuda" else decision


def _of_attention(op: str, devices: Sequence[Device]) -> Decision:
    alone = [[i] for i in range(len(devices))]
    decisions = [
        _selection.decide(name, jnp.dtype("bfloat16"), alone, devices)
        for name in (op, _selection.ATTENTION_BACKWARD)
    ]
    refused = next((each for each in decisions if each.path != "cuda"), None)
    return refused or Decision("cuda", _OF_HALVES)


def _of_collective_product(op: str, devices: Sequence[Device]) -> Decision:
    if len(devices) == 1:
        return Decision("unfused", "one rank has nothing to gather or to sum")
    decision = _selection.decide(op, jnp.dtype("bfloat16"), [range(len(devices))], devices)
    if decision.path == "cuda":
        return dataclasses.replace(decision, reason=_BY_TIME)
    return dataclasses.replace(decision, path="unfused", reason=f"{decision.reason}; {_PARTS}")


_COMPOSED = (
    "over a tuple of axes of which some stay inside a host the op is hierarchical, CUDA inside and "
    "jax.lax across"
)
_BY_TIME = (
    "one kernel where that is expected to be faster than the collective and the product one after "
    "the other, which take the paths of their own"
)
_PARTS = "the collective and the product take the paths of their own, one after the other"
_OF_HALVES = (
    "of float16 and bfloat16 and heads of up to 256, in the backward pass of up to 128; all else, "
    "and tangents, are jax.lax"
)
_ULYSSES = "pk.all_to_all before and after attention on each device, on the paths of their own"

"""What is measured of a case: its variants, the length of their chains, the plan of a call."""

import dataclasses
import math
import re
from typing import Any, NamedTuple

from jax import lax

import pk_jax as pk
from pk_jax._bench.ops import OPS, Call, row_major
from pk_jax._tuning.collective_cases import CollectiveCase as Case

SMALL_BYTES = 256 << 10
SMALL_CALLS = 60
L2_BYTES = 60 << 20
# lax.ragged_all_to_all may be this slow, in bytes a microsecond (one update a peer).
SLOWEST_BYTES_PER_US = 3e3
MANY_UPDATES = 32
# Suffix of a variant's chain with an elementwise kernel between calls.
DEPENDENT = "+elementwise"


def plan_of(stablehlo: str, target: str) -> dict[str, Any]:
    """What the first call to `target` of a lowered program is going to do: its attributes."""
    found = re.search(rf"@{target}\(.*", stablehlo)
    if found is None:
        return {"implementation": "reference"}
    plan: dict[str, Any] = {"implementation": "cuda"}
    for name in ("mechanism", "protocol", "algorithm"):
        value = re.search(rf'\b{name} = "(\w+)"', found.group(0))
        if value:
            plan[name] = value.group(1)
    blocks = re.search(r"num_blocks = (\d+)", found.group(0))
    plan["num_blocks"] = int(blocks.group(1)) if blocks else None
    return plan


def expected_us(case: Case, ranks: int, slow: bool = False) -> float:
    """A rough time of a call, for the length of chains and samples: the same in every process."""
    rate = SLOWEST_BYTES_PER_US if slow else 300e3
    return 4.0 + OPS[case.op].link_bytes(case, ranks) / rate


def chain_length(case: Case, ranks: int, slow: bool = False) -> int:
    """60 for small messages; for large ones as many as take at least 20 ms, and never under 8."""
    if case.nbytes <= SMALL_BYTES and not slow:
        return SMALL_CALLS
    return max(8, min(SMALL_CALLS, math.ceil(20e3 / expected_us(case, ranks, slow))))


def num_data_sets(case: Case) -> int:
    """So many operands that a large one comes from memory and not from the L2; else a few."""
    if case.nbytes <= SMALL_BYTES:
        return 4
    return max(2, min(16, math.ceil(2 * L2_BYTES / case.nbytes)))


class Variant(NamedTuple):
    """One way to do a case's work.

    Attributes:
        call: the call.
        case: the case, with other slices for a baseline that does the same work by them.
        vendor: whether it is lax's.
    """

    call: Call
    case: Case
    vendor: bool = False


def of_case(case: Case, ranks: int, forced: bool) -> dict[str, Variant]:
    """The variants of a case by name: "nccl" is lax's same call, "default" what pk chooses."""
    op = OPS[case.op]

    def vendor(case: Case) -> Variant:
        call = op.call(lax, case, ranks)
        return Variant(row_major(call) if case.strided else call, case, True)

    found = {"nccl": vendor(case)}
    if op.carried and case.updates == 1 and case.shape[0] >= MANY_UPDATES * ranks**2:
        found[f"nccl_{MANY_UPDATES}_updates"] = vendor(
            dataclasses.replace(case, updates=MANY_UPDATES)
        )
    found["default"] = Variant(op.call(pk, case, ranks), case)
    for mechanism in op.mechanisms if forced else ():
        options = {"implementation": "cuda", "config": pk.Config(mechanism=mechanism)}
        found[mechanism] = Variant(op.call(pk, case, ranks, **options), case)
    return found

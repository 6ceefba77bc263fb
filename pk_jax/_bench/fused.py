"""Products with a collective: what a benchmark has to know of an op, and the ways to do its work.

The ops are in `gathered.py`, `reduced.py` and `mlp.py`; `fused_bench.py` checks and times them.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import pk_jax as pk
from pk_jax._bench import harness, records
from pk_jax._bench.ops import AXIS

DTYPE = jnp.bfloat16

# The arithmetic without the collective, in records.
ALONE = ("xla_dot", "pk_dot", "xla_local", "pk_local")

HIDING: dict[str, Any] = {"xla_gpu_enable_latency_hiding_scheduler": True}
WINDOWED = HIDING | {"xla_gpu_threshold_for_windowed_einsum_mib": 0}

Call = Callable[[Any, Any], Any]


class Way(NamedTuple):
    """One way to do a case's work, or a part of it.

    Attributes:
        call: (x, w) of a rank -> its result.
        kind: "pk"; "baseline"; or "alone", the arithmetic without the collective.
        options: XLA's, for this program.
        whole: `call` takes whole arrays, which XLA's partitioner cuts.
        needs: an instruction without which the program is not what its name says.
        refuses: a word that must not be in the lowered program.
    """

    call: Call
    kind: str = "pk"
    options: Mapping[str, Any] = {}  # never changed
    whole: bool = False
    needs: str | None = None
    refuses: str | None = None


class Op(NamedTuple):
    """A kind of product with a collective.

    Attributes:
        name: of the op.
        x_spec: how x lies over the ranks.
        w_specs: how each weight lies; one spec for one weight, which is then no tuple.
        out_spec: how the result lies, if it is whole arrays.
        draw: (case, ranks) -> the whole shape of x and those of the weights, as w_specs.
        local: x of a rank -> what its arithmetic alone takes.
        want: (x, w) of a rank -> its result, in the dtype of x.
        want_alone: (local(x), w) -> the arithmetic alone.
        ways: (case, ranks, method) -> the ways, by name; "default" and "xla" among them.
        flops: case -> of a rank.
        link_bytes: (case, ranks) -> that a rank receives.
        limit: the largest relative norm of an error that rounding explains.
    """

    name: str
    x_spec: P
    w_specs: Any
    out_spec: P
    draw: Callable[[Any, int], tuple[Any, Any]]
    local: Callable[[Any], Any]
    want: Call
    want_alone: Call
    ways: Callable[[Any, int, harness.Method], dict[str, Way]]
    flops: Callable[[Any], float]
    link_bytes: Callable[[Any, int], float]
    limit: float = 4e-3


def schedules(
    op: Callable[..., Any], names: Iterable[str], plans: Iterable[pk.Config] = ()
) -> dict[str, Way]:
    """The op by each schedule, and by further Configs; those of one kernel cannot fall back."""
    found = {}
    for config in [*(pk.Config(schedule=name) for name in names), *plans]:
        one = config.schedule != "sequential"
        name = str(config.schedule)
        if config.tile is not None:
            name += f" {config.tile[0]}x{config.tile[1]}"
        if config.num_comm_sms is not None:
            name += f"/{config.num_comm_sms}"
        call = functools.partial(op, config=config, implementation="cuda" if one else None)
        found[name] = Way(lambda x, w, call=call: call(x, w, AXIS))
    return found


def dot(x: Any, w: Any) -> Any:
    """The product as XLA's user would write it."""
    return jnp.matmul(x, w, preferred_element_type=x.dtype)


def alone() -> dict[str, Way]:
    """The product without the collective."""
    return {
        "xla_dot": Way(dot, "alone"),
        "pk_dot": Way(functools.partial(pk.matmul, implementation="cuda"), "alone"),
    }


def best_baseline(record: records.Record) -> str | None:
    """The name of the fastest baseline that does the whole work."""
    whole = {k: us for k, us in record.baselines.items() if k not in ALONE}
    return min(whole, key=whole.__getitem__, default=None)

"""all_gather_matmul: what is gathered and multiplied, and the ways to do it."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import pk_jax as pk
from pk_jax._bench import fused, harness
from pk_jax._bench.ops import AXIS
from pk_jax._tuning import all_gather_matmul_model as model
from pk_jax._tuning.fused_cases import GatherCase

# SMs that push and do nothing else, by tile, beside what the model chooses.
PUSHING_SMS = {(128, 256): (2, 4, 8, 16), (128, 128): (4, 16)}

gather = functools.partial(lax.all_gather, axis_name=AXIS, tiled=True)


def draw(case: GatherCase, ranks: int) -> tuple[Any, Any]:
    """Rows of all ranks; the weights of all, side by side."""
    return (case.m, case.k), (case.k, case.p * ranks)


def xla(x: Any, w: Any) -> Any:
    """What a user of XLA writes."""
    return fused.dot(gather(x), w)


def ring(x: Any, w: Any) -> Any:
    """Multiplies the rows that are here while the next ones come from the neighbour."""
    ranks, me = lax.axis_size(AXIS), lax.axis_index(AXIS)
    y = jnp.zeros((ranks * x.shape[0], w.shape[1]), x.dtype)
    for step in range(ranks):
        coming = lax.ppermute(x, AXIS, [(i, (i - 1) % ranks) for i in range(ranks)])
        at = (me + step) % ranks * x.shape[0]
        y = lax.dynamic_update_slice_in_dim(y, fused.dot(x, w), at, 0)
        if step < ranks - 1:
            x = coming
    return y


def plans() -> list[pk.Config]:
    """The kernel's tiles and numbers of SMs that push."""
    found = [pk.Config(schedule="intra_sm", tile=(t.rows, t.cols)) for t in model.TILES]
    return found + [
        pk.Config(schedule="inter_sm", tile=tile, num_comm_sms=number)
        for tile, numbers in PUSHING_SMS.items()
        for number in numbers
    ]


def ways(case: GatherCase, ranks: int, method: harness.Method) -> dict[str, fused.Way]:
    """The ways to do a case, by name."""
    del case, ranks
    found = {
        "xla": fused.Way(xla, "baseline"),
        "xla_hiding": fused.Way(xla, "baseline", fused.HIDING),
        "ring": fused.Way(ring, "baseline", fused.HIDING, needs="collective-permute"),
        "xla_windowed": fused.Way(
            fused.dot, "baseline", fused.WINDOWED, whole=True, needs="collective-permute"
        ),
        **fused.alone(),
        "default": fused.Way(lambda x, w: pk.all_gather_matmul(x, w, AXIS)),
    }
    if method.forced:
        names = ("sequential", "intra_sm", "inter_sm")
        found |= fused.schedules(pk.all_gather_matmul, names, plans() if method.plans else ())
    return found


OP = fused.Op(
    name="all_gather_matmul",
    x_spec=P(AXIS),
    w_specs=P(None, AXIS),
    out_spec=P(None, AXIS),
    draw=draw,
    local=gather,
    want=xla,
    want_alone=fused.dot,
    ways=ways,
    flops=lambda case: 2.0 * case.m * case.p * case.k,
    link_bytes=lambda case, ranks: 2 * case.m * case.k * (ranks - 1) / ranks,
)

"""matmul_reduce_scatter and matmul_all_reduce: what is summed, and the ways to do it."""

import functools
from typing import Any

from jax import lax
from jax.sharding import PartitionSpec as P

import pk_jax as pk
from pk_jax._bench import fused, harness
from pk_jax._bench.ops import AXIS
from pk_jax._tuning import few_rows_model
from pk_jax._tuning.fused_cases import ReduceCase


def draw(case: ReduceCase, ranks: int) -> tuple[Any, Any]:
    """Both operands of all ranks, along what is summed over."""
    return (case.m, case.k * ranks), (case.k * ranks, case.p)


def scatter(x: Any, w: Any) -> Any:
    """What a user of XLA writes."""
    return lax.psum_scatter(fused.dot(x, w), AXIS, tiled=True)


def reduce(x: Any, w: Any) -> Any:
    """What a user of XLA writes."""
    return lax.psum(fused.dot(x, w), AXIS)


def ring_scatter(x: Any, w: Any) -> Any:
    """Makes the rows of one rank while the sum of the ones before travels to its neighbour."""
    ranks, me = lax.axis_size(AXIS), lax.axis_index(AXIS)
    if x.shape[0] % ranks:
        raise ValueError(f"a ring of {ranks} ranks cannot share {x.shape[0]} rows")
    rows = x.shape[0] // ranks

    def part(of: Any) -> Any:
        return fused.dot(lax.dynamic_slice_in_dim(x, of % ranks * rows, rows, 0), w)

    total = part(me + ranks - 1)
    for step in range(2, ranks + 1):
        total = lax.ppermute(total, AXIS, [(i, (i + 1) % ranks) for i in range(ranks)])
        total = total + part(me + ranks - step)
    return total


def ring_reduce(x: Any, w: Any) -> Any:
    """The same, and all ranks' rows gathered."""
    return lax.all_gather(ring_scatter(x, w), AXIS, tiled=True)


def ways(
    case: ReduceCase, ranks: int, method: harness.Method, *, all_reduce: bool
) -> dict[str, fused.Way]:
    """The ways to do a case, by name."""
    del ranks
    op = pk.matmul_all_reduce if all_reduce else pk.matmul_reduce_scatter
    xla, ring = (reduce, ring_reduce) if all_reduce else (scatter, ring_scatter)
    found = {
        "xla": fused.Way(xla, "baseline"),
        "xla_hiding": fused.Way(xla, "baseline", fused.HIDING),
        "ring": fused.Way(ring, "baseline", fused.HIDING, needs="collective-permute"),
    }
    if not all_reduce:
        found["xla_windowed"] = fused.Way(
            fused.dot, "baseline", fused.WINDOWED, whole=True, needs="collective-permute"
        )
    found |= fused.alone() | {"default": fused.Way(lambda x, w: op(x, w, AXIS))}
    if not method.forced:
        return found
    # Of few rows both kernels: the one for them is asked for by its tile.
    few = [pk.Config(schedule="intra_sm", tile=few_rows_model.TILE)]
    few = few if case.m <= few_rows_model.MOST_ROWS else []
    return found | fused.schedules(op, ("sequential", "intra_sm"), few)


def _op(name: str, want: fused.Call, out_spec: P, all_reduce: bool) -> fused.Op:
    def link_bytes(case: ReduceCase, ranks: int) -> float:
        return 2 * case.m * case.p * (ranks - 1) / ranks * (1 + all_reduce)

    return fused.Op(
        name=name,
        x_spec=P(None, AXIS),
        w_specs=P(AXIS),
        out_spec=out_spec,
        draw=draw,
        local=lambda x: x,
        want=want,
        want_alone=fused.dot,
        ways=functools.partial(ways, all_reduce=all_reduce),
        flops=lambda case: 2.0 * case.m * case.p * case.k,
        link_bytes=link_bytes,
    )


SCATTER = _op("matmul_reduce_scatter", scatter, P(AXIS), False)
REDUCE = _op("matmul_all_reduce", reduce, P(), True)

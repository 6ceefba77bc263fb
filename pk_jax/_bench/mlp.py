"""The gated block of a network in tensor parallelism, with its gradients: pk's ops against XLA's.

Between blocks each rank has its rows of the activations. One gather serves both weights of the way
in, and the gradients are the same two ops once more.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

import pk_jax as pk
from pk_jax._bench import fused, harness
from pk_jax._bench.gathered import gather
from pk_jax._bench.ops import AXIS
from pk_jax._tuning.fused_cases import MlpCase

Block = Callable[[Any, Any], Any]

# Rounding between the products, and in silu, adds up to half of it. A tile of wrong numbers among a
# thousand is 4e-2.
LIMIT = 2e-2


def draw(case: MlpCase, ranks: int) -> tuple[Any, Any]:
    """Rows of all ranks, and the weights up, gate and down."""
    up, down = (case.width, case.hidden * ranks), (case.hidden * ranks, case.width)
    return (case.rows, case.width), (up, up, down)


def gated(up: Any, gate: Any) -> Any:
    """What stands between the products."""
    return jax.nn.silu(gate) * up


def xla(x: Any, w: Any) -> Any:
    """The block as a user of XLA writes it."""
    up, gate, down = w
    rows = gather(x)
    return lax.psum_scatter(
        fused.dot(gated(fused.dot(rows, up), fused.dot(rows, gate)), down), AXIS, tiled=True
    )


def local(rows: Any, w: Any) -> Any:
    """The arithmetic alone, on rows that are there."""
    up, gate, down = w
    return fused.dot(gated(fused.dot(rows, up), fused.dot(rows, gate)), down)


def pk_local(rows: Any, w: Any) -> Any:
    """The same by pk's product."""
    up, gate, down = w
    dot = functools.partial(pk.matmul, implementation="cuda")
    return dot(gated(dot(rows, up), dot(rows, gate)), down)


def block(x: Any, w: Any) -> Any:
    """The block of pk's ops."""
    up, gate, down = w
    return pk.matmul_reduce_scatter(gated(*pk.all_gather_matmul(x, (up, gate), AXIS)), down, AXIS)


def step(f: Block, x: Any, w: Any) -> Any:
    """The result, and the gradients of x and of all weights, for a cotangent like x."""
    y, pull = jax.vjp(f, x, w)
    return y, pull(x)


def ways(case: MlpCase, ranks: int, method: harness.Method) -> dict[str, fused.Way]:
    """The ways to do a case, by name."""
    del ranks

    def of(f: Block, *args: Any) -> fused.Way:
        return fused.Way(functools.partial(step, f) if case.gradients else f, *args)

    found = {
        "xla": of(xla, "baseline"),
        "xla_hiding": of(xla, "baseline", fused.HIDING),
        "xla_local": of(local, "alone"),
        "pk_local": of(pk_local, "alone"),
        "default": of(block),
    }
    for schedule in ("sequential", "intra_sm") if method.forced else ():
        # As a default, which the ops of the gradients have, too.
        way = found["default"]
        call = pk.use_config(schedule=schedule)(way.call)
        found[schedule] = way._replace(call=call)
    return found


def op(gradients: bool) -> fused.Op:
    """The block, or its whole step."""

    def of(f: Block) -> fused.Call:
        return functools.partial(step, f) if gradients else f

    return fused.Op(
        name="tensor_parallel_mlp",
        x_spec=P(AXIS),
        w_specs=(P(None, AXIS), P(None, AXIS), P(AXIS)),
        out_spec=P(AXIS),
        draw=draw,
        local=gather,
        want=of(xla),
        want_alone=of(local),
        ways=ways,
        flops=lambda case: 6.0 * case.rows * case.width * case.hidden * (3 if gradients else 1),
        # In and out, and back the same way.
        link_bytes=lambda case, ranks: (
            (4 if gradients else 2) * 2 * case.rows * case.width * (ranks - 1) / ranks
        ),
        limit=LIMIT,
    )


STEP, FORWARD = op(True), op(False)

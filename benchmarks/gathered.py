"""all_gather_matmul: the fused kernel against XLA's all_gather and dot, and against the dot alone.

Checked against fp32 on every rank before anything is timed. The bound is the larger of the product
alone, of rows that are gathered already (XLA's or pk.matmul's, whichever is faster in this run),
and of the bytes over the link at the fastest rate that SMs have reached. A chain takes several
operands in turn.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import products
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pk_jax._bench import harness, records, timing
from pk_jax._bench.ops import AXIS
from pk_jax._primitives import all_gather_matmul_call, matmul
from pk_jax._tuning import all_gather_matmul_model as model
from pk_jax._tuning import hardware, matmul_model
from pk_jax._tuning.fused_cases import GatherCase

OP = "all_gather_matmul"
# What does less than the op: rows that are gathered already.
ALONE = ("xla_dot", "pk_dot")
# Tiles, and blocks that push and do nothing else (0: all push), beside what the model chooses.
FORCED = {(128, 256): (0, 2, 4, 8, 16), (128, 128): (0, 4, 16)}

Way = Callable[[Any, Any], Any]


def run(
    mesh: Mesh, cases: Iterable[GatherCase], method: harness.Method, stamp: dict[str, Any]
) -> Iterator[tuple[records.Record, list[str]]]:
    """Yields the record of each case, and what was wrong."""
    for case in cases:
        yield run_case(mesh, case, method, stamp)


def run_case(
    mesh: Mesh, case: GatherCase, method: harness.Method, stamp: dict[str, Any]
) -> tuple[records.Record, list[str]]:
    """Checks and times one case: each way to make the product, on operands drawn once."""
    xs, w = operands(mesh, case)
    all_rows = [gathered(mesh, x) for x in xs]
    plans = plans_of(mesh, case) if mesh.devices.flat[0].platform == "gpu" else []
    chosen = plans if method.forced else plans[:1]
    programs: dict[str, timing.Program] = {}
    errors: dict[str, float] = {}
    failures, skipped = [], {}
    count = products.num_calls(as_product(case))
    for name, way in ways(mesh, case, chosen).items():
        rows = all_rows if name in ALONE else xs
        compiled = mapped(mesh, functools.partial(_chain, way, count)).lower(rows, w).compile()
        errors[name] = largest_error(mesh, compiled, rows, xs, w, count)
        if name not in ("xla", *ALONE):
            timing.check_calls(compiled.as_text(), f"pk_jax_{OP}", count)
        if not errors[name] <= products.LIMIT:
            skipped[name] = f"refused: relative error {errors[name]:.2e}"
            failures.append(f"{case.name} {name}: relative error {errors[name]:.2e}")
            continue
        expected = products.expected_us(as_product(case))
        programs[name] = timing.Program(compiled, (rows, w), count, expected)
    times = timing.time_programs(programs, method.sample_ms, method.samples, method.budget_s)
    return record(mesh, case, times, errors, plans, skipped, method, stamp), failures


def as_product(case: GatherCase) -> Any:
    """The product of one rank."""
    return products.MatmulCase(case.name, case.m, case.p, case.k)


def operands(mesh: Mesh, case: GatherCase) -> tuple[list[jax.Array], jax.Array]:
    """Several x, cut by rows, and the weights of all ranks, cut by columns."""
    x, w = NamedSharding(mesh, P(AXIS)), NamedSharding(mesh, P(None, AXIS))
    count = max(2, min(8, math.ceil((120 << 20) / (2 * case.m * case.k // mesh.size))))
    draw = {s: jax.jit(_draw, static_argnums=0, out_shardings=s) for s in (x, w)}
    xs = [draw[x]((case.m, case.k), seed) for seed in range(count)]
    return xs, draw[w]((case.k, case.p * mesh.size), count)


def _draw(shape: tuple[int, ...], seed: Any) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, products.DTYPE)


def gathered(mesh: Mesh, x: jax.Array) -> jax.Array:
    """A copy of all rows on each device, one under the other, as shard_map cuts them."""
    return _gather(mesh)(x, None)


@functools.cache
def _gather(mesh: Mesh) -> Any:
    return mapped(mesh, lambda x, _: lax.all_gather(x, AXIS, tiled=True), P(AXIS))


def mapped(mesh: Mesh, f: Any, out: Any = P(None, AXIS)) -> Any:  # noqa: B008
    """f(x, w) of each rank's x (or list of them) and w, jitted."""
    specs = (P(AXIS), P(None, AXIS))
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False))


def plans_of(mesh: Mesh, case: GatherCase) -> list[model.Plan]:
    """The chosen plan, then some with other tiles and numbers of SMs that push."""
    kind = hardware.lookup(mesh.devices.flat[0].device_kind)
    sizes = (kind, case.m // mesh.size, case.p, case.k, mesh.size)
    best = model.choose(*sizes)
    others = [
        model.choose(*sizes, tile=tile, num_comm_blocks=number)
        for tile, numbers in FORCED.items()
        for number in numbers
    ]
    return [best, *(plan for plan in others if plan != best)]


def ways(mesh: Mesh, case: GatherCase, plans: list[model.Plan]) -> dict[str, Way]:
    """The ways to make the product, by name; "default" is what the model chooses."""
    devices = [device.id for device in mesh.devices.flat]
    site = {
        "groups": np.arange(mesh.size, dtype=np.int64),
        "devices": np.array(devices, np.int64),
        "group_size": np.int64(mesh.size),
        "channel": np.int64(0),
    }
    dot = functools.partial(jnp.matmul, preferred_element_type=products.DTYPE)

    def fused(x: Any, w: Any, plan: model.Plan) -> Any:
        _, ((y,),) = all_gather_matmul_call.call(
            x[None],
            [w],
            site=site,
            plan=plan,
            transpose_w=False,
            dtype=np.dtype(products.DTYPE),
            num_sms=plan.num_blocks,
            own_rows=False,
        )
        return y

    found: dict[str, Way] = {
        "xla": lambda x, w: dot(lax.all_gather(x, AXIS, tiled=True), w),
        "xla_dot": dot,
    }
    if plans:
        alone = matmul_model.choose(case.m, case.p, case.k, plans[0].num_blocks)
        found["pk_dot"] = functools.partial(
            matmul.call,
            transpose_a=False,
            transpose_b=False,
            dtype=np.dtype(products.DTYPE),
            plan=alone,
        )
    for i, plan in enumerate(plans):
        name = f"{plan.tile}/{plan.num_comm_blocks}" if i else "default"
        found[name] = functools.partial(fused, plan=plan)
    return found


def _chain(way: Way, count: int, xs: list[Any], w: Any) -> Any:
    return timing.chain(lambda x: way(x, w), count, xs)


def largest_error(
    mesh: Mesh, compiled: Any, rows: list[Any], xs: list[Any], w: Any, count: int
) -> float:
    """The largest relative norm of an error on any rank, each operand last in turn."""
    found = []
    for i in range(len(xs)):
        turned = rows[i:] + rows[:i]
        last = (i + (count - 1) % len(xs)) % len(xs)
        # NumPy's max, which passes on NaN; not all of XLA's do between devices.
        found.append(float(np.max(_error(mesh)(compiled(turned, w), xs[last], w))))
    return max(found, key=lambda error: math.inf if math.isnan(error) else error)


@functools.cache
def _error(mesh: Mesh) -> Any:
    def error(got: Any, x: Any, w: Any) -> Any:
        rows = lax.all_gather(x, AXIS, tiled=True).astype(jnp.float32)
        want = jnp.matmul(rows, w.astype(jnp.float32), precision="highest")
        mine = jnp.linalg.norm(got.astype(jnp.float32) - want) / jnp.linalg.norm(want)
        return lax.all_gather(mine, AXIS)

    specs = (P(None, AXIS), P(AXIS), P(None, AXIS))
    return jax.jit(jax.shard_map(error, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False))


def record(
    mesh: Mesh,
    case: GatherCase,
    times: dict[str, timing.Timing],
    errors: dict[str, float],
    plans: list[model.Plan],
    skipped: dict[str, str],
    method: harness.Method,
    stamp: dict[str, Any],
) -> records.Record:
    """The record of a case."""
    ours, xla = times.get("default"), times.get("xla")
    link = 2 * case.m * case.k * (mesh.size - 1) / mesh.size / records.LINK_BYTES_PER_US
    alone = [times[name].median for name in ALONE if name in times]
    bound = max(min(alone, default=0.0), link)
    flops = 2 * case.m * case.p * case.k
    others = {k: t.median for k, t in times.items() if k not in ("default", "xla", *ALONE)}
    return records.Record(
        id=case.name,
        op=OP,
        ranks=mesh.size,
        processes=jax.process_count(),
        dtype=jnp.dtype(products.DTYPE).name,
        shape=[case.m, case.p, case.k],
        config={"tile": plans[0].tile, "num_comm_sms": plans[0].num_comm_blocks} if plans else None,
        median_us=ours.median if ours else None,
        p10_us=ours.p10 if ours else None,
        p90_us=ours.p90 if ours else None,
        bound_us=bound,
        compute_us=min(alone) if alone else None,
        link_us=link,
        ratio=ours.median / bound if ours else None,
        tflops=flops / ours.median / 1e6 if ours else None,
        baselines={k: times[k].median for k in ("xla", *ALONE) if k in times},
        speedup=xla.median / ours.median if ours and xla else None,
        candidates=others,
        max_rel_err=errors.get("default"),
        sms=plans[0].num_comm_blocks if plans else None,
        extra_bytes=0 if plans else None,
        skipped=skipped,
        method={
            "calls": products.num_calls(as_product(case)),
            "sample_ms": method.sample_ms,
            "samples": {k: t.samples for k, t in times.items()},
            "p10_p90": {k: [t.p10, t.p90] for k, t in times.items()},
            "expected_us": {f"{p.tile}/{p.num_comm_blocks}": p.seconds * 1e6 for p in plans},
        },
        **stamp,
    )

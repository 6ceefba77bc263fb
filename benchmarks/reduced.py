"""matmul_reduce_scatter and matmul_all_reduce: the fused kernel against XLA's dot and sum.

Checked against fp32 on every rank before anything is timed. The bound is the larger of the product
alone (XLA's or pk.matmul's, whichever is faster in this run), and of the bytes over the link at the
fastest rate that SMs have reached. A chain takes several operands in turn; of few rows, whose time
is that of reading w, several w too, and the op's parts are timed as kernels of their own.
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

import pk_jax as pk
from pk_jax._bench import harness, records, timing
from pk_jax._bench.ops import AXIS
from pk_jax._primitives import few_rows_call, matmul, matmul_reduce_call
from pk_jax._tuning import few_rows_model, hardware, matmul_model
from pk_jax._tuning import matmul_reduce_model as model
from pk_jax._tuning.fused_cases import ReduceCase

# What does less than the op: no sum over ranks.
ALONE = ("xla_dot", "pk_dot")
# The op's parts, one kernel after the other.
PARTS = "unfused"
# Rounds that blocks send ahead, tried beside what the model chooses.
LEADS = (2, 3)

X, W = P(None, AXIS), P(AXIS)
Way = Callable[[Any, Any], Any]
Plan = model.Plan | few_rows_model.Plan


def run(
    mesh: Mesh, cases: Iterable[ReduceCase], method: harness.Method, stamp: dict[str, Any]
) -> Iterator[tuple[records.Record, list[str]]]:
    """Yields the record of each case, and what was wrong."""
    for case in cases:
        yield run_case(mesh, case, method, stamp)


def op_of(case: ReduceCase) -> str:
    """The op's name."""
    return "matmul_all_reduce" if case.all_reduce else "matmul_reduce_scatter"


def run_case(
    mesh: Mesh, case: ReduceCase, method: harness.Method, stamp: dict[str, Any]
) -> tuple[records.Record, list[str]]:
    """Checks and times one case: each way to make the product, on operands drawn once."""
    pairs = operands(mesh, case)
    plans = plans_of(mesh, case) if mesh.devices.flat[0].platform == "gpu" else []
    chosen = plans if method.forced else plans[:1]
    named = {label(plan) if i else "default": plan for i, plan in enumerate(plans)}
    programs: dict[str, timing.Program] = {}
    errors: dict[str, float] = {}
    failures, skipped = [], {}
    alike = products.MatmulCase(case.name, case.m, case.p, case.k)
    count = products.num_calls(alike)
    for name, way in ways(mesh, case, chosen).items():
        chain = mapped(mesh, functools.partial(_chain, way, count), [(X, W)] * len(pairs))
        compiled = chain.lower(pairs).compile()
        summed = name not in ALONE
        errors[name] = largest_error(mesh, case, compiled, pairs, count, summed)
        if name not in ("xla", PARTS, *ALONE):
            timing.check_calls(compiled.as_text(), target_of(case, named[name]), count)
        if not errors[name] <= products.LIMIT:
            skipped[name] = f"refused: relative error {errors[name]:.2e}"
            failures.append(f"{case.name} {name}: relative error {errors[name]:.2e}")
            continue
        programs[name] = timing.Program(compiled, (pairs,), count, products.expected_us(alike))
    times = timing.time_programs(programs, method.sample_ms, method.samples, method.budget_s)
    method_used = {
        "calls": count,
        "sample_ms": method.sample_ms,
        "samples": {k: t.samples for k, t in times.items()},
        "p10_p90": {k: [t.p10, t.p90] for k, t in times.items()},
        "expected_us": {label(p): p.seconds * 1e6 for p in plans},
    }
    made = record(mesh, case, times, errors, plans, skipped)
    return records.Record(**made, method=method_used, **stamp), failures


def operands(mesh: Mesh, case: ReduceCase) -> list[tuple[jax.Array, jax.Array]]:
    """Several x and w, or one w for all if there are many rows, cut along what is summed over."""
    x, w = NamedSharding(mesh, X), NamedSharding(mesh, W)
    few = case.m <= products.FEW_ROWS
    elements = case.k * case.p if few else case.m * case.k
    count = max(2, min(8, math.ceil((120 << 20) / (2 * elements))))
    draw = {s: jax.jit(_draw, static_argnums=0, out_shardings=s) for s in (x, w)}
    xs = [draw[x]((case.m, case.k * mesh.size), seed) for seed in range(count)]
    ws = [draw[w]((case.k * mesh.size, case.p), count + i) for i in range(count if few else 1)]
    return [(x, ws[i % len(ws)]) for i, x in enumerate(xs)]


def _draw(shape: tuple[int, ...], seed: Any) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, products.DTYPE)


def mapped(mesh: Mesh, f: Any, pairs: list[Any]) -> Any:
    """f(pairs) of each rank's x and w, by their specs, its results stacked by rank, jitted."""
    stacked = lambda pairs: f(pairs)[None]  # noqa: E731
    specs = {"in_specs": (pairs,), "out_specs": P(AXIS)}
    return jax.jit(jax.shard_map(stacked, mesh=mesh, check_vma=False, **specs))


def plans_of(mesh: Mesh, case: ReduceCase) -> list[Plan]:
    """The chosen plan, then some with other leads; of few rows, then their other protocol."""
    kind = hardware.lookup(mesh.devices.flat[0].device_kind)
    sizes = (kind, case.m, case.p, case.k, mesh.size)
    choose = functools.partial(model.choose, *sizes, all_reduce=case.all_reduce)
    if case.m > products.FEW_ROWS:
        return [choose(lead=lead) for lead in (1, *LEADS)]
    choose_few = functools.partial(few_rows_model.choose, *sizes, all_reduce=case.all_reduce)
    few = [choose_few(protocol=protocol) for protocol in ("ll", "simple")]
    plans: list[Plan] = sorted(filter(None, few), key=lambda plan: plan.seconds)
    return [*plans, choose()]


def label(plan: Plan) -> str:
    """The plan's name in tables."""
    return f"lead {plan.lead}" if isinstance(plan, model.Plan) else f"few rows, {plan.protocol}"


def target_of(case: ReduceCase, plan: Plan) -> str:
    """The custom call of a plan."""
    few = isinstance(plan, few_rows_model.Plan)
    return f"pk_jax_{op_of(case)}" + few * "_few_rows"


def ways(mesh: Mesh, case: ReduceCase, plans: list[Plan]) -> dict[str, Way]:
    """The ways to make the product, by name; "default" is what the model chooses."""
    site = {
        "groups": np.arange(mesh.size, dtype=np.int64),
        "devices": np.array([device.id for device in mesh.devices.flat], np.int64),
        "group_size": np.int64(mesh.size),
        "channel": np.int64(0),
    }
    dot = functools.partial(jnp.matmul, preferred_element_type=products.DTYPE)

    def xla(x: Any, w: Any) -> Any:
        if case.all_reduce:
            return lax.psum(dot(x, w), AXIS)
        return lax.psum_scatter(dot(x, w), AXIS, tiled=True)

    found: dict[str, Way] = {"xla": xla, "xla_dot": dot}
    if plans:
        found["pk_dot"] = functools.partial(
            matmul.call,
            transpose_a=False,
            transpose_b=False,
            dtype=np.dtype(products.DTYPE),
            plan=matmul_model.choose(case.m, case.p, case.k, plans[0].num_blocks),
        )
    for i, plan in enumerate(plans):
        many = isinstance(plan, model.Plan)
        call: Any = matmul_reduce_call.call if many else few_rows_call.call
        found[label(plan) if i else "default"] = functools.partial(
            call, site=site, plan=plan, transpose_w=False, all_reduce=case.all_reduce
        )
    if plans and isinstance(plans[0], few_rows_model.Plan):
        found[PARTS] = functools.partial(parts, case)
    return found


def parts(case: ReduceCase, x: Any, w: Any) -> Any:
    """The product by its kernel, and after it the sum by its own."""
    y = pk.matmul(x, w, implementation="cuda")
    if case.all_reduce:
        return pk.psum(y, AXIS, implementation="cuda")
    return pk.psum_scatter(y, AXIS, tiled=True, implementation="cuda")


def _chain(way: Way, count: int, pairs: list[Any]) -> Any:
    return timing.chain(lambda pair: way(*pair), count, pairs)


def largest_error(
    mesh: Mesh, case: ReduceCase, compiled: Any, pairs: list[Any], count: int, summed: bool
) -> float:
    """The largest relative norm of an error on any rank, each pair last in turn."""
    found = []
    for i in range(len(pairs)):
        last = (i + (count - 1) % len(pairs)) % len(pairs)
        got = compiled(pairs[i:] + pairs[:i])
        errors = _error(mesh, case.all_reduce, summed)(got, *pairs[last])
        found.append(float(np.asarray(errors).max()))  # NumPy's keeps a NaN of any rank
    return max(found, key=lambda error: math.inf if math.isnan(error) else error)


@functools.cache
def _error(mesh: Mesh, all_reduce: bool, summed: bool) -> Any:
    def error(got: Any, x: Any, w: Any) -> Any:
        want = jnp.matmul(x.astype(jnp.float32), w.astype(jnp.float32), precision="highest")
        if summed:
            sum_of = lax.psum if all_reduce else functools.partial(lax.psum_scatter, tiled=True)
            want = sum_of(want, AXIS)
        return (jnp.linalg.norm(got[0].astype(jnp.float32) - want) / jnp.linalg.norm(want))[None]

    specs = {"in_specs": (P(AXIS), X, W), "out_specs": P(AXIS)}
    return jax.jit(jax.shard_map(error, mesh=mesh, check_vma=False, **specs))


def config_of(plan: Plan) -> dict[str, Any]:
    """What a record says of the plan."""
    if isinstance(plan, model.Plan):
        return {"lead": plan.lead}
    return {"protocol": plan.protocol, "split_tiles": plan.split_tiles, "split": plan.split}


def record(
    mesh: Mesh,
    case: ReduceCase,
    times: dict[str, timing.Timing],
    errors: dict[str, float],
    plans: list[Plan],
    skipped: dict[str, str],
) -> dict[str, Any]:
    """What the record of a case says, but for how it was made."""
    ours, xla = times.get("default"), times.get("xla")
    sent = 2 * case.m * case.p * (mesh.size - 1) / mesh.size * (1 + case.all_reduce)
    link = sent / records.LINK_BYTES_PER_US
    alone = [times[name].median for name in ALONE if name in times]
    bound = max(min(alone, default=0.0), link)
    others = {k: t.median for k, t in times.items() if k not in ("default", "xla", *ALONE)}
    return {
        "id": case.name,
        "op": op_of(case),
        "ranks": mesh.size,
        "processes": jax.process_count(),
        "dtype": jnp.dtype(products.DTYPE).name,
        "shape": [case.m, case.p, case.k],
        "config": config_of(plans[0]) if plans else None,
        "median_us": ours.median if ours else None,
        "p10_us": ours.p10 if ours else None,
        "p90_us": ours.p90 if ours else None,
        "bound_us": bound,
        "compute_us": min(alone) if alone else None,
        "link_us": link,
        "ratio": ours.median / bound if ours else None,
        "tflops": 2 * case.m * case.p * case.k / ours.median / 1e6 if ours else None,
        "baselines": {k: times[k].median for k in ("xla", *ALONE) if k in times},
        "speedup": xla.median / ours.median if ours and xla else None,
        "candidates": others,
        "max_rel_err": errors.get("default"),
        "sms": plans[0].num_blocks if plans else None,
        "extra_bytes": plans[0].scratch_bytes if plans else None,
        "skipped": skipped,
    }

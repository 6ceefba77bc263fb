"""Matrix products of one GPU: each plan of the kernel against XLA's dot, in one run.

Products are checked against fp32 before anything is timed, on normal numbers. A chain takes several
first operands in turn, so that a large one comes from memory as in a network.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pk_jax._bench import harness, records, timing
from pk_jax._primitives import matmul as primitive
from pk_jax._reference import matmul as reference
from pk_jax._tuning import hardware, matmul_model
from pk_jax._tuning.matmul_cases import MatmulCase

DTYPE = jnp.bfloat16
# The relative norm of what rounding the result does, with room.
LIMIT = 4e-3
MOST_CALLS = 60
CHAIN_US = 20e3
EXPECTED_FLOPS = 650e12


def run(
    cases: Iterable[MatmulCase], method: harness.Method, stamp: dict[str, Any]
) -> Iterator[tuple[records.Record, list[str]]]:
    """Yields the record of each case, and what was wrong."""
    for case in cases:
        yield run_case(case, method, stamp)


def run_case(
    case: MatmulCase, method: harness.Method, stamp: dict[str, Any]
) -> tuple[records.Record, list[str]]:
    """Checks and times one case: XLA's dot, the plan that the model chooses, and the others."""
    firsts, second = operands(case)
    programs: dict[str, timing.Program] = {}
    errors: dict[str, float] = {}
    failures, skipped = [], {}
    plans = plans_of(case)
    for name, product in products(case, plans, method.forced).items():
        fn = jax.jit(functools.partial(chain, product, num_calls(case)))
        compiled = fn.lower(firsts, second).compile()
        if name != "xla" and plans:
            timing.check_calls(compiled.as_text(), "pk_jax_matmul", num_calls(case))
        errors[name] = largest_error(case, compiled, firsts, second)
        if not errors[name] <= LIMIT:
            skipped[name] = f"refused: relative error {errors[name]:.2e}"
            failures.append(f"{case.name} {name}: relative error {errors[name]:.2e}")
            continue
        args = (firsts, second)
        programs[name] = timing.Program(compiled, args, num_calls(case), expected_us(case))
    times = timing.time_programs(programs, method.sample_ms, method.samples, method.budget_s)
    return record(case, times, errors, plans, skipped, method, stamp), failures


def operands(case: MatmulCase) -> tuple[list[jax.Array], jax.Array]:
    """Several first operands, more than the L2 holds if they are large, and the second one."""
    size = 2 * case.m * case.k
    count = max(2, min(8, math.ceil((120 << 20) / size)))
    *keys, last_key = jax.random.split(jax.random.key(0), count + 1)
    shape = (case.k, case.m) if case.transpose_a else (case.m, case.k)
    second = (case.n, case.k) if case.transpose_b else (case.k, case.n)
    draw = jax.jit(lambda key, shape: jax.random.normal(key, shape, DTYPE), static_argnums=1)
    return [draw(key, shape) for key in keys], draw(last_key, second)


def plans_of(case: MatmulCase) -> list[matmul_model.Plan]:
    """The chosen plan, then the others; none where there are no kernels."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return []
    num_sms = hardware.lookup(device.device_kind).num_sms
    sizes = (case.m, case.n, case.k, num_sms)
    best = matmul_model.choose(*sizes)
    return [best, *(plan for plan in matmul_model.candidates(*sizes) if plan != best)]


def products(
    case: MatmulCase, plans: list[matmul_model.Plan], forced: bool
) -> dict[str, Callable[[Any, Any], Any]]:
    """The ways to make the product, by name; "default" is what the model chooses."""
    params = {"transpose_a": case.transpose_a, "transpose_b": case.transpose_b, "dtype": DTYPE}
    found = {"xla": functools.partial(reference.matmul, precision=None, **params)}
    for i, plan in enumerate(plans if forced else plans[:1]):
        found[label(plan) if i else "default"] = functools.partial(
            primitive.call, plan=plan, **params | {"dtype": np.dtype(DTYPE)}
        )
    return found


def label(plan: matmul_model.Plan) -> str:
    """Its tile, and the parts of its last tiles if they are split."""
    return plan.tile + (f"/{plan.split_tiles}by{plan.split}" if plan.split_tiles else "")


def num_calls(case: MatmulCase) -> int:
    """As many as take 20 ms, 8 to 60."""
    return max(8, min(MOST_CALLS, math.ceil(CHAIN_US / expected_us(case))))


def expected_us(case: MatmulCase) -> float:
    """A rough time of a call."""
    return 4.0 + 2 * case.m * case.n * case.k / EXPECTED_FLOPS * 1e6


def chain(product: Any, count: int, firsts: list[Any], second: Any) -> Any:
    """`count` products in one program, of the first operands in turn; the last one's result."""
    return timing.chain(lambda first: product(first, second), count, firsts)


def largest_error(case: MatmulCase, compiled: Any, firsts: list[Any], second: Any) -> float:
    """The relative norm of the error of a chain's last result, each first operand last in turn."""
    found = []
    for i in range(len(firsts)):
        turned = firsts[i:] + firsts[:i]
        first = turned[(num_calls(case) - 1) % len(turned)]
        result = compiled(turned, second)
        found.append(float(_error(result, first, second, case.transpose_a, case.transpose_b)))
    return max(found, key=lambda error: math.inf if math.isnan(error) else error)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _error(result: Any, first: Any, second: Any, transpose_a: bool, transpose_b: bool) -> Any:
    a, b = (x.astype(jnp.float32) for x in (first, second))
    a, b = a.T if transpose_a else a, b.T if transpose_b else b
    want = jnp.matmul(a, b, precision="highest")
    return jnp.linalg.norm(result.astype(jnp.float32) - want) / jnp.linalg.norm(want)


def record(
    case: MatmulCase,
    times: dict[str, timing.Timing],
    errors: dict[str, float],
    plans: list[matmul_model.Plan],
    skipped: dict[str, str],
    method: harness.Method,
    stamp: dict[str, Any],
) -> records.Record:
    """The record of a case; its bound is XLA's time, so that a ratio below 1 is faster."""
    ours, xla = times.get("default"), times.get("xla")
    flops = 2 * case.m * case.n * case.k
    return records.Record(
        id=case.name,
        op="matmul",
        ranks=1,
        processes=1,
        dtype=jnp.dtype(DTYPE).name,
        shape=[case.m, case.n, case.k],
        config={"plan": label(plans[0])} if plans else None,
        median_us=ours.median if ours else None,
        p10_us=ours.p10 if ours else None,
        p90_us=ours.p90 if ours else None,
        bound_us=xla.median if xla else None,
        compute_us=xla.median if xla else None,
        ratio=ours.median / xla.median if ours and xla else None,
        tflops=flops / ours.median / 1e6 if ours else None,
        baselines={"xla": xla.median} if xla else {},
        candidates={k: t.median for k, t in times.items() if k not in ("default", "xla")},
        max_rel_err=errors.get("default"),
        sms=plans[0].num_blocks if plans else None,
        extra_bytes=plans[0].scratch_bytes if plans else None,
        skipped=skipped,
        method={
            "calls": num_calls(case),
            "sample_ms": method.sample_ms,
            "samples": {k: t.samples for k, t in times.items()},
            "p10_p90": {k: [t.p10, t.p90] for k, t in times.items()},
            "transposed": [case.transpose_a, case.transpose_b],
        },
        **stamp,
    )

"""Attention of one GPU, forward and with its gradients, against cuDNN's and XLA's in one run.

Both are jax.nn.dot_product_attention's. All results are checked against attention in fp32, block by
block, on normal numbers, before anything is timed. A chain takes several operands in turn.
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

import pk_jax as pk
from pk_jax._bench import harness, records, timing
from pk_jax._reference import attention as reference
from pk_jax._reference.attention import Places, Spec
from pk_jax._tuning.attention_cases import AttentionCase

DTYPE = products.DTYPE
# The relative norms of what rounding of results and of weights does, with room.
LIMIT, LIMIT_OF_GRADIENTS = 8e-3, 1.2e-2
EXPECTED_FLOPS = 450e12
DATA_SETS = 2
# XLA's own has all logits at once, in fp32.
MOST_LOGIT_BYTES = 8 << 30

Operands = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def run(
    cases: Iterable[AttentionCase], method: harness.Method, stamp: dict[str, Any]
) -> Iterator[tuple[records.Record, list[str]]]:
    """Yields the record of each case, and what was wrong."""
    for case in cases:
        yield run_case(case, method, stamp)


def run_case(
    case: AttentionCase, method: harness.Method, stamp: dict[str, Any]
) -> tuple[records.Record, list[str]]:
    """Checks and times one case: ours as "default", then the others."""
    sets = [operands(case, seed) for seed in range(DATA_SETS)]
    wants = [expected(case, each) for each in sets]
    programs: dict[str, timing.Program] = {}
    errors: dict[str, list[float]] = {}
    failures: list[str] = []
    skipped: dict[str, str] = {}
    for name, call in ways(case).items():
        if name in method.without:
            continue
        if name == "xla" and logit_bytes(case) > MOST_LOGIT_BYTES:
            skipped[name] = f"its logits are {logit_bytes(case) >> 30} GiB"
            continue
        fn = jax.jit(functools.partial(timing.chain, call, num_calls(case)))
        try:
            compiled = fn.lower(sets).compile()
            errors[name] = largest_errors(case, compiled, sets, wants)
        except (ValueError, RuntimeError) as error:  # JaxRuntimeError is one
            if name == "default":
                raise
            skipped[name] = (str(error).splitlines() or [type(error).__name__])[0]
            continue
        if name == "default" and on_gpu():
            check_kernels(case, compiled.as_text())
        if not right(errors[name]):
            told = ", ".join(f"{error:.2e}" for error in errors[name])
            skipped[name] = f"refused: relative errors {told}"
            failures.append(f"{case.name} {name}: relative errors {told}")
            continue
        programs[name] = timing.Program(compiled, (sets,), num_calls(case), expected_us(case))
    times = timing.time_programs(programs, method.sample_ms, method.samples, method.budget_s)
    return record(case, times, errors, skipped, method, stamp), failures


def on_gpu() -> bool:
    return jax.devices()[0].platform == "gpu"


def operands(case: AttentionCase, seed: int) -> Operands:
    """Query, key, value, and the cotangent of the result."""
    of_rows = (case.batch, case.rows, case.heads, case.width)
    of_keys = (case.batch, case.rows, case.kv_heads, case.width)
    shapes = (of_rows, of_keys, of_keys, of_rows)
    query, key, value, cotangent = (
        products.draw_one(shape, 4 * seed + i) for i, shape in enumerate(shapes)
    )
    return query, key, value, cotangent


def ways(case: AttentionCase) -> dict[str, Callable[[Operands], Any]]:
    """The ways to make it, by name; of operands, the result and with a gradient all of these."""
    asked = {"is_causal": case.is_causal}
    path = "cuda" if on_gpu() else "reference"
    functions = {"default": functools.partial(pk.attention, implementation=path, **asked)}
    for name in ("cudnn", "xla"):
        functions[name] = functools.partial(
            jax.nn.dot_product_attention, implementation=name, **asked
        )
    return {name: functools.partial(_call, case, f) for name, f in functions.items()}


def _call(case: AttentionCase, f: Callable[..., Any], operands: Operands) -> tuple[Any, ...]:
    *xs, cotangent = operands
    if not case.gradient:
        return (f(*xs),)
    out, pull = jax.vjp(f, *xs)
    return out, *pull(cotangent)


@functools.partial(jax.jit, static_argnums=0)
def expected(case: AttentionCase, operands: Operands) -> tuple[Any, ...]:
    """In fp32, of products that are exact."""
    query, key, value, cotangent = (x.astype(jnp.float32) for x in operands)
    right = 0 if case.is_causal else None
    spec = Spec(case.width**-0.5, right=right, precision=jax.lax.Precision.HIGHEST)
    params = {"spec": spec, "dtype": jnp.dtype("float32")}
    out, lse = reference.attention(query, key, value, Places(), **params)
    if not case.gradient:
        return (out,)
    given = (query, key, value, out, lse, cotangent, jnp.zeros_like(lse))
    return out, *reference.backward(*given, Places(), **params)


def largest_errors(
    case: AttentionCase, compiled: Any, sets: list[Operands], wants: list[tuple[Any, ...]]
) -> list[float]:
    """The relative norms of the errors of a chain's last results, each data set last in turn."""
    found = []
    for i in range(len(sets)):
        at = (i + num_calls(case) - 1) % len(sets)
        results = compiled(sets[i:] + sets[:i])
        found.append([float(_error(*pair)) for pair in zip(results, wants[at], strict=True)])
    return np.max(found, 0).tolist()  # NaN if one is


def right(errors: list[float]) -> bool:
    """Whether a result, and its gradients if there are any, are as near as rounding leaves them."""
    limits = [LIMIT, *[LIMIT_OF_GRADIENTS] * (len(errors) - 1)]
    return all(error <= limit for error, limit in zip(errors, limits, strict=True))


@jax.jit
def _error(got: Any, want: Any) -> Any:
    return jnp.linalg.norm((got.astype(jnp.float32) - want).ravel()) / jnp.linalg.norm(want.ravel())


def check_kernels(case: AttentionCase, text: str) -> None:
    """Raises unless each call is the kernels' own; forward, nothing else is in the chain."""
    targets = ["pk_jax_attention"] + ["pk_jax_attention_backward"] * case.gradient
    for target in targets:
        timing.check_calls(text, target, num_calls(case), None if case.gradient else frozenset())


def logit_bytes(case: AttentionCase) -> int:
    return 4 * case.batch * case.heads * case.rows**2


def num_calls(case: AttentionCase) -> int:
    """As many as take 20 ms, 8 to 60."""
    calls = math.ceil(products.CHAIN_US / expected_us(case))
    return max(8, min(products.MOST_CALLS, calls))


def expected_us(case: AttentionCase) -> float:
    """A rough time of a call."""
    return 4.0 + case.flops / EXPECTED_FLOPS * 1e6


def record(
    case: AttentionCase,
    times: dict[str, timing.Timing],
    errors: dict[str, list[float]],
    skipped: dict[str, str],
    method: harness.Method,
    stamp: dict[str, Any],
) -> records.Record:
    """The record of a case; its bound is cuDNN's time, so that a ratio below 1 is faster."""
    ours, cudnn = times.get("default"), times.get("cudnn")
    return records.Record(
        id=case.name,
        op="attention",
        ranks=1,
        processes=1,
        dtype=jnp.dtype(DTYPE).name,
        shape=[case.batch, case.rows, case.heads, case.kv_heads, case.width],
        config={"path": "cuda" if on_gpu() else "reference"},
        median_us=ours.median if ours else None,
        p10_us=ours.p10 if ours else None,
        p90_us=ours.p90 if ours else None,
        bound_us=cudnn.median if cudnn else None,
        ratio=ours.median / cudnn.median if ours and cudnn else None,
        tflops=case.flops / ours.median / 1e6 if ours else None,
        baselines={k: t.median for k, t in times.items() if k != "default"},
        speedup=cudnn.median / ours.median if ours and cudnn else None,
        max_rel_err=max(errors["default"]) if "default" in errors else None,
        skipped=skipped,
        method={
            "calls": num_calls(case),
            "sample_ms": method.sample_ms,
            "samples": {k: t.samples for k, t in times.items()},
            "p10_p90": {k: [t.p10, t.p90] for k, t in times.items()},
            "causal": case.is_causal,
            "gradient": case.gradient,
            "tflops": {k: case.flops / t.median / 1e6 for k, t in times.items()},
        },
        **stamp,
    )

"""Matrix products of one GPU: each plan of the kernel against XLA's product, in one run.

Products are checked against fp32 before anything is timed, on normal numbers. A chain takes several
first operands in turn, so that a large one comes from memory as in a network. What products have in
common is here, with the plain one; `grouped.py` has the one by groups of rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pk_jax._bench import harness, records, timing
from pk_jax._primitives import matmul as primitive
from pk_jax._reference import matmul as reference
from pk_jax._tuning import hardware, matmul_model
from pk_jax._tuning.matmul_cases import MatmulCase

DTYPE = jnp.bfloat16  # of results
FLOAT8 = "float8_e4m3fn"
# The relative norm of what rounding the result does, with room.
LIMIT = 4e-3
MOST_CALLS = 60
FEW_ROWS = 128
CHAIN_US = 20e3
EXPECTED_FLOPS = 650e12


class Op(NamedTuple):
    """A kind of product.

    Attributes:
        name: of the op; its custom call is named after it.
        operands: case -> several first operands, and what the product takes besides.
        plans_of: case -> the chosen plan, then the others; none where there are no kernels.
        products: (case, plans, forced) -> the ways to make the product, by name.
        label: a plan's name.
        error: (case, result, first operand, the other ones) -> relative norm of its error.
        about: case -> its shape, and what else its record says of it.
    """

    name: str
    operands: Callable[[Any], tuple[list[jax.Array], Any]]
    plans_of: Callable[[Any], list[Any]]
    products: Callable[[Any, list[Any], bool], dict[str, Callable[[Any, Any], Any]]]
    label: Callable[[Any], str]
    error: Callable[[Any, Any, Any, Any], Any]
    about: Callable[[Any], tuple[list[int], dict[str, Any]]]


def run(
    cases: Iterable[Any], method: harness.Method, stamp: dict[str, Any], op: Op
) -> Iterator[tuple[records.Record, list[str]]]:
    """Yields the record of each case, and what was wrong."""
    for case in cases:
        yield run_case(case, method, stamp, op)


def run_case(
    case: Any, method: harness.Method, stamp: dict[str, Any], op: Op
) -> tuple[records.Record, list[str]]:
    """Checks and times one case: XLA's product, the plan that the model chooses, and the others."""
    firsts, second = op.operands(case)
    programs: dict[str, timing.Program] = {}
    errors: dict[str, float] = {}
    failures, skipped = [], {}
    plans = op.plans_of(case)
    for name, product in op.products(case, plans, method.forced).items():
        if name in method.without:
            continue
        fn = jax.jit(functools.partial(chain, product, num_calls(case)))
        try:
            compiled = fn.lower(firsts, second).compile()
            errors[name] = largest_error(op, case, compiled, firsts, second)
        except jax.errors.JaxRuntimeError as error:
            if name != "xla" or "RESOURCE_EXHAUSTED" not in str(error):
                raise
            # Not every size is one that XLA's grouped product has memory for.
            skipped[name] = str(error).splitlines()[0]
            continue
        if name != "xla" and plans:
            timing.check_calls(compiled.as_text(), f"pk_jax_{op.name}", num_calls(case))
        if not errors[name] <= LIMIT:
            skipped[name] = f"refused: relative error {errors[name]:.2e}"
            failures.append(f"{case.name} {name}: relative error {errors[name]:.2e}")
            continue
        args = (firsts, second)
        programs[name] = timing.Program(compiled, args, num_calls(case), expected_us(case))
    times = timing.time_programs(programs, method.sample_ms, method.samples, method.budget_s)
    return record(op, case, times, errors, plans, skipped, method, stamp), failures


def operands(
    case: MatmulCase,
) -> tuple[list[tuple[jax.Array, jax.Array]], dict[str, jax.Array]]:
    """Pairs of operands; of few rows, whose time is that of reading the second one, several.

    Besides, the bias of a case with an activation, and the scales of float8.
    """
    a = draw((case.k, case.m) if case.transpose_a else (case.m, case.k), 0, case.dtype)
    b = draw((case.n, case.k) if case.transpose_b else (case.k, case.n), 1, case.dtype)
    if case.m > FEW_ROWS:
        del b[1:]
    more = {"bias": draw_one((case.n,), 99)} if case.activation else {}
    if case.dtype == FLOAT8:
        more |= {"scale_x": jnp.linspace(0.5, 1, case.m), "scale_w": jnp.linspace(0.5, 1, case.n)}
    return [(a[i % len(a)], b[i % len(b)]) for i in range(max(len(a), len(b)))], more


def draw(shape: tuple[int, ...], seed: int, dtype: Any = DTYPE) -> list[jax.Array]:
    """Several arrays of a shape, more than the L2 holds if they are large."""
    array_bytes = jnp.dtype(dtype).itemsize * math.prod(shape)
    count = max(2, min(8, math.ceil((120 << 20) / array_bytes)))
    return [draw_one(shape, seed * 8 + i, dtype) for i in range(count)]


@functools.partial(jax.jit, static_argnums=(0, 2))
def draw_one(shape: tuple[int, ...], seed: int, dtype: Any = DTYPE) -> jax.Array:
    """Normal numbers."""
    return jax.random.normal(jax.random.key(seed), shape, DTYPE).astype(dtype)


def num_sms() -> int | None:
    """Those of the GPU; None where there are no kernels."""
    device = jax.devices()[0]
    return hardware.lookup(device.device_kind).num_sms if device.platform == "gpu" else None


def plans_of(case: MatmulCase) -> list[matmul_model.Plan]:
    """The chosen plan, then the others; none where there are no kernels."""
    sms = num_sms()
    if sms is None:
        return []
    sizes = (case.m, case.n, case.k, sms)
    itemsize = jnp.dtype(case.dtype).itemsize
    best = matmul_model.choose(*sizes, itemsize=itemsize)
    return [best, *(plan for plan in matmul_model.candidates(*sizes, itemsize) if plan != best)]


def products(
    case: MatmulCase, plans: list[matmul_model.Plan], forced: bool
) -> dict[str, Callable[[Any, Any], Any]]:
    """The ways to make the product, by name; "default" is what the model chooses."""
    params = {"transpose_a": case.transpose_a, "transpose_b": case.transpose_b, "dtype": DTYPE}

    # Of float8 the sum in fp32, as the kernel's: the default adds up in fewer bits.
    precision = "highest" if case.dtype == FLOAT8 else None

    def xla(pair: Any, more: Any) -> Any:
        return finished(case, reference.matmul(*pair, precision=precision, **params), more)

    def call(pair: Any, more: Any, plan: matmul_model.Plan) -> Any:
        epilogue = {"activation": case.activation} | more
        return primitive.call(*pair, plan=plan, **epilogue, **params | {"dtype": np.dtype(DTYPE)})

    return ways(xla, call, plans if forced else plans[:1], label)


def finished(case: MatmulCase, product: Any, more: Any) -> Any:
    """The product with the epilogue of the case, in its own dtype."""
    more = {name: each.astype(product.dtype) for name, each in more.items()}
    return reference.finish(product, **more, activation=case.activation, dtype=product.dtype)


def ways(xla: Any, call: Any, plans: Iterable[Any], label: Callable[[Any], str]) -> dict[str, Any]:
    """XLA's product, and the kernel by each plan, the first one as "default"."""
    found = {"xla": xla}
    for i, plan in enumerate(plans):
        found[label(plan) if i else "default"] = functools.partial(call, plan=plan)
    return found


def label(plan: matmul_model.Plan) -> str:
    """Its tile, and the parts of its last tiles if they are split."""
    return plan.tile + (f"/{plan.split_tiles}by{plan.split}" if plan.split_tiles else "")


def num_calls(case: Any) -> int:
    """As many as take 20 ms, 8 to 60."""
    return max(8, min(MOST_CALLS, math.ceil(CHAIN_US / expected_us(case))))


def expected_us(case: Any) -> float:
    """A rough time of a call."""
    return 4.0 + 2 * case.m * case.n * case.k / EXPECTED_FLOPS * 1e6


def chain(product: Any, count: int, firsts: list[Any], second: Any) -> Any:
    """`count` products in one program, of the first operands in turn; the last one's result."""
    return timing.chain(lambda first: product(first, second), count, firsts)


def largest_error(op: Op, case: Any, compiled: Any, firsts: list[Any], second: Any) -> float:
    """The relative norm of the error of a chain's last result, each first operand last in turn."""
    found = []
    for i in range(len(firsts)):
        turned = firsts[i:] + firsts[:i]
        first = turned[(num_calls(case) - 1) % len(turned)]
        result = compiled(turned, second)
        found.append(float(op.error(case, result, first, second)))
    return max(found, key=lambda error: math.inf if math.isnan(error) else error)


@functools.partial(jax.jit, static_argnums=0)
def error(case: MatmulCase, result: Any, pair: Any, more: Any) -> Any:
    """The relative norm of what a result differs by from the product in fp32."""
    a, b = (x.astype(jnp.float32) for x in pair)
    a, b = a.T if case.transpose_a else a, b.T if case.transpose_b else b
    want = finished(case, jnp.matmul(a, b, precision="highest"), more)
    return jnp.linalg.norm(result.astype(jnp.float32) - want) / jnp.linalg.norm(want)


def about(case: MatmulCase) -> tuple[list[int], dict[str, Any]]:
    """What a record says of a case."""
    return [case.m, case.n, case.k], {"transposed": [case.transpose_a, case.transpose_b]}


MATMUL = Op("matmul", operands, plans_of, products, label, error, about)


def record(
    op: Op,
    case: Any,
    times: dict[str, timing.Timing],
    errors: dict[str, float],
    plans: list[Any],
    skipped: dict[str, str],
    method: harness.Method,
    stamp: dict[str, Any],
) -> records.Record:
    """The record of a case; its bound is XLA's time, so that a ratio below 1 is faster."""
    ours, xla = times.get("default"), times.get("xla")
    flops = 2 * case.m * case.n * case.k
    shape, more = op.about(case)
    return records.Record(
        id=case.name,
        op=op.name,
        ranks=1,
        processes=1,
        dtype=jnp.dtype(getattr(case, "dtype", DTYPE)).name,
        shape=shape,
        config={"plan": op.label(plans[0])} if plans else None,
        median_us=ours.median if ours else None,
        p10_us=ours.p10 if ours else None,
        p90_us=ours.p90 if ours else None,
        bound_us=xla.median if xla else None,
        compute_us=xla.median if xla else None,
        ratio=ours.median / xla.median if ours and xla else None,
        tflops=flops / ours.median / 1e6 if ours else None,
        baselines={"xla": xla.median} if xla else {},
        speedup=xla.median / ours.median if ours and xla else None,
        candidates={k: t.median for k, t in times.items() if k not in ("default", "xla")},
        max_rel_err=errors.get("default"),
        sms=plans[0].num_blocks if plans else None,
        extra_bytes=0 if plans else None,
        skipped=skipped,
        method={
            "calls": num_calls(case),
            "sample_ms": method.sample_ms,
            "samples": {k: t.samples for k, t in times.items()},
            "p10_p90": {k: [t.p10, t.p90] for k, t in times.items()},
        }
        | more,
        **stamp,
    )

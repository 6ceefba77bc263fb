"""What a call costs besides its bytes: a captured call against an empty one, and a first use."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax import lax

import pk_jax as pk
from pk_jax._bench import harness, records, timing, variants
from pk_jax._bench.ops import AXIS
from pk_jax._tuning.collective_cases import CollectiveCase

NOOP = "pk_jax_noop"
NUM_CALLS = 60
# Small enough that bytes do not count.
CASE = CollectiveCase("host-cost", "all_gather", (4, 128))


def empty_call(x: jax.Array) -> jax.Array:
    """A custom call that launches an empty kernel and leaves its result as it is."""
    return jax.ffi.ffi_call(NOOP, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def host_cost(
    mesh: jax.sharding.Mesh, method: harness.Method, stamp: dict[str, Any]
) -> Iterator[tuple[records.Record | None, list[str]]]:
    """A chain of captured all_gather calls against one of captured calls of an empty kernel.

    The difference holds the flag's trip to the peer and the copy too, so it bounds the host's part
    from above; `cpu`, the processor time of the whole process a call, is the host's part alone.
    """
    bench = harness.Bench(mesh)
    operands = bench.operands(CASE, variants.num_data_sets(CASE))

    def gather(x: jax.Array) -> jax.Array:
        return pk.all_gather(x, AXIS, tiled=True, implementation="cuda")

    try:
        built = harness.build(bench, "all_gather", variants.Variant(gather, CASE), operands)
        # Result and operand have one shape: each call reads the one before and needs no barrier.
        chain = bench.sharded(
            lambda x: timing.dependent_chain(empty_call, NUM_CALLS, x, lambda y: y), 1
        )
        compiled = chain.lower(operands[0]).compile()
        timing.check_calls(compiled.as_text(), NOOP, NUM_CALLS)
    except (harness.CheckError, timing.ChainError) as error:
        yield None, [str(error)]
        return
    empty = timing.Program(compiled, operands[:1], NUM_CALLS)
    times = timing.time_programs(
        {"all_gather": built.program, "empty": empty}, method.sample_ms, method.samples
    )
    call, floor = times["all_gather"], times["empty"]
    record = records.Record(
        id="host-cost",
        op="host_cost",
        ranks=bench.ranks,
        processes=jax.process_count(),
        dtype=CASE.dtype,
        shape=list(CASE.shape),
        median_us=call.median,
        p10_us=call.p10,
        p90_us=call.p90,
        bound_us=floor.median + records.FLAG_US,
        ratio=call.median / (floor.median + records.FLAG_US),
        baselines={"empty": floor.median},
        candidates={
            "difference": call.median - floor.median,
            "cpu": call.cpu,
            "cpu_empty": floor.cpu,
        },
        max_rel_err=0.0,
        method={"calls": NUM_CALLS, "samples": method.samples},
        **stamp,
    )
    yield record, []


def first_use_once(mesh: jax.sharding.Mesh, order: str) -> dict[str, float]:
    """Milliseconds of first and second calls in a process that has made no communicator yet.

    `order` is "lax" (XLA's alone), "lax+pk" (XLA's communicator is there when pk asks) or "pk".
    Programs are compiled before anything is timed.
    """
    bench = harness.Bench(mesh)
    operand = bench.operands(CASE, 1)[0]
    calls = {
        "lax": lambda x: lax.all_gather(x, AXIS, tiled=True),
        "pk": functools.partial(pk.all_gather, axis_name=AXIS, tiled=True, implementation="cuda"),
    }
    names = order.split("+")
    compiled = {name: bench.sharded(calls[name], 1).lower(operand).compile() for name in names}
    times: dict[str, float] = {}
    for name in names:
        for turn in ("first", "second"):
            jax.block_until_ready(operand)
            start = time.perf_counter()
            out = jax.block_until_ready(compiled[name](operand))
            times[f"{name}_{turn}_ms"] = (time.perf_counter() - start) * 1e3
            wrong = (
                bench.wrong_elements(CASE, out, 0) if name == names[-1] and turn == "second" else 0
            )
            if wrong:
                raise harness.CheckError(f"first use: {wrong} wrong elements from {name}")
    return times


def first_use_record(
    runs: dict[str, list[dict[str, float]]], ranks: int, processes: int, stamp: dict[str, Any]
) -> records.Record:
    """Medians over fresh jobs; `median_us` is pk's first call once XLA has its communicator."""

    def median(order: str, field: str) -> float:
        values = sorted(run[field] for run in runs[order])
        return values[len(values) // 2]

    after, spread = median("lax+pk", "pk_first_ms"), [r["pk_first_ms"] for r in runs["lax+pk"]]
    vendor, alone = median("lax", "lax_first_ms"), median("pk", "pk_first_ms")
    return records.Record(
        id="first-use",
        op="first_use",
        ranks=ranks,
        processes=processes,
        dtype=CASE.dtype,
        shape=list(CASE.shape),
        median_us=after * 1e3,
        p10_us=min(spread) * 1e3,
        p90_us=max(spread) * 1e3,
        baselines={"nccl_first": vendor * 1e3},
        candidates={"pk_alone": alone * 1e3, "pk_beyond_nccl": (alone - vendor) * 1e3},
        max_rel_err=0.0,
        method={"jobs": len(runs["lax"]), "runs_ms": runs},
        **stamp,
    )

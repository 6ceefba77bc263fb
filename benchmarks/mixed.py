"""A pk collective beside an independent matmul, and beside NCCL, in one jit: what overlaps.

XLA runs a custom call on its compute stream, before or after the matmul. Annotations may let it put
the call on another stream. Whether that gives overlap depends on three more things, so all of them
are measured: the latency hiding scheduler (on here), command buffers (in XLA's default mode a
captured graph is one serial chain, whatever the streams were), and the SMs that the collective
takes (a kernel that fills the chip leaves no place for the matmul, and the other way round).

Variants run in a child process, which prints a line for each. An annotation that XLA does not know
may end it: then that variant is noted as failed, and a new child goes on with the next.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import launch

OPS = ("all_gather", "psum")
STEPS = 8
FEW_SMS = 16
# Of the annotated streams, XLA knows numbers and, since 2026, "collective".
NO_GRAPH = {"xla_gpu_enable_command_buffer": ""}
CONCURRENT = {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
HIDING = {"xla_gpu_enable_latency_hiding_scheduler": True}


class Variant(NamedTuple):
    """What a step does, and how XLA is told.

    Attributes:
        parts: of "gemm", "pk", "lax" (the op by jax.lax) and "nccl" (another psum by jax.lax), in
            program order.
        annotation: how the pk call is marked: a compute_on stream, or "metadata:..." for a call
            with that stream as a frontend attribute.
        num_comm_sms: SMs of the pk call; None leaves it to the cost model.
        options: compiler options beside the latency hiding scheduler.
    """

    parts: tuple[str, ...]
    annotation: str | None = None
    num_comm_sms: int | None = None
    options: dict[str, Any] = {}  # noqa: RUF012  (never changed)


_BOTH = ("pk", "gemm")
VARIANTS: dict[str, Variant] = {
    "gemm_alone": Variant(("gemm",)),
    "pk_alone": Variant(("pk",)),
    "lax_alone": Variant(("lax",)),
    "lax": Variant(("lax", "gemm")),
    "plain": Variant(_BOTH),
    "pk_then_nccl": Variant(("pk", "nccl", "gemm")),
    "nccl_then_pk": Variant(("nccl", "pk", "gemm")),
    "lax_then_nccl": Variant(("lax", "nccl", "gemm")),
    "plain_few_sms": Variant(_BOTH, None, FEW_SMS),
    "collective": Variant(_BOTH, "gpu_stream:collective"),
    "collective_no_graph": Variant(_BOTH, "gpu_stream:collective", None, NO_GRAPH),
    "collective_no_graph_few_sms": Variant(_BOTH, "gpu_stream:collective", FEW_SMS, NO_GRAPH),
    "stream_no_graph_few_sms": Variant(_BOTH, "gpu_stream:1", FEW_SMS, NO_GRAPH),
    "metadata_no_graph_few_sms": Variant(_BOTH, "metadata:collective", FEW_SMS, NO_GRAPH),
    # Last, as the most likely to fail: calls of different steps may run at the same time, too.
    "concurrent_graph_few_sms": Variant(_BOTH, None, FEW_SMS, CONCURRENT),
}


class Sizes(NamedTuple):
    """Shapes of the matmul, and bytes a rank of the collective and of the other psum."""

    m: int
    k: int
    n: int
    op_bytes: int
    nccl_bytes: int


ON_GPU = Sizes(8192, 8192, 4096, 64 << 20, 16 << 20)
ON_CPU = Sizes(64, 32, 16, 1 << 10, 1 << 10)


# ---- The child ---------------------------------------------------------------------------------


def annotated(call: Callable[[Any], Any], annotation: str | None) -> Callable[[Any], Any]:
    """`call`, marked for XLA."""
    import jax
    from jax.experimental.compute_on import compute_on
    from jax.experimental.xla_metadata import xla_metadata_call

    if annotation is None:
        return call
    kind, _, stream = annotation.partition(":")
    if kind == "metadata":
        return xla_metadata_call(call, inlineable="false", _xla_stream_annotation=stream)
    return compute_on(call, compute_type=annotation, out_memory_spaces=jax.memory.Space.Device)


class Program(NamedTuple):
    """A compiled chain of steps, whose results are those of the last step's parts."""

    run: Any
    args: Sequence[Any]
    parts: tuple[str, ...]
    instructions: dict[str, int]


def build(bench: Any, op: str, variant: Variant, sizes: Sizes) -> Program:
    """Compiles STEPS steps; the parts of a step are independent, the steps are not."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import pk_jax as pk
    from pk_jax._bench import timing
    from pk_jax._bench.ops import AXIS
    from pk_jax._bench.ops import OPS as COLLECTIVES

    case = case_of(op, sizes)
    config = pk.Config(num_comm_sms=variant.num_comm_sms) if variant.num_comm_sms else None
    on_gpu = {"implementation": "cuda"} if bench.on_gpu else {}
    mine = COLLECTIVES[op].call(pk, case, bench.ranks, config=config, **on_gpu)
    calls: dict[str, Callable[..., Any]] = {
        "gemm": lambda a, w: jnp.matmul(a, w),
        "pk": annotated(mine, variant.annotation),
        "lax": COLLECTIVES[op].call(lax, case, bench.ranks),
        "nccl": lambda x: lax.psum(x, AXIS),
    }
    (x,) = bench.operands(case, 1)
    (z,) = bench.operands(case_of("psum", sizes._replace(op_bytes=sizes.nccl_bytes)), 1)
    whole = NamedSharding(bench.mesh, P(AXIS))
    make = jax.jit(lambda shape: jax.random.normal(jax.random.key(len(shape)), shape, jnp.bfloat16),
                   static_argnums=0, out_shardings=whole)  # fmt: skip
    a, w = make((bench.ranks * sizes.m, sizes.k)), make((bench.ranks * sizes.k, sizes.n))
    operands = {"gemm": (a, w), "pk": (x,), "lax": (x,), "nccl": (z,)}
    args = [operands[part] for part in variant.parts]

    def chain(*args: Any) -> Any:
        results: list[Any] = []
        for _ in range(STEPS):  # two readers keep each result alive: see timing.py
            args, *_ = lax.optimization_barrier((args, *results[-2:]))
            step = [calls[p](*mine) for p, mine in zip(variant.parts, args, strict=True)]
            results.append(tuple(step))
        return lax.optimization_barrier(tuple(results[-2:]))[-1]

    specs = tuple(tuple(P(AXIS) for _ in group) for group in args)
    fn = jax.jit(bench.mapped(chain, specs, (P(AXIS),) * len(args)))
    options = HIDING | variant.options
    compiled = fn.lower(*args).compile(compiler_options=options)
    counts = timing.count_instructions(compiled.as_text())
    target = COLLECTIVES[op].target
    if bench.on_gpu and counts[target] != STEPS * variant.parts.count("pk"):
        raise timing.ChainError(f"{counts[target]} {target} in {STEPS} steps: {dict(counts)}")
    return Program(compiled, args, variant.parts, dict(counts))


def case_of(op: str, sizes: Sizes) -> Any:
    from pk_jax._tuning.collective_cases import CollectiveCase

    return CollectiveCase(f"mixed-{op}", op, (sizes.op_bytes // 2,))


def check(bench: Any, op: str, program: Program, sizes: Sizes, gemm: Any) -> None:
    """Raises if a result differs: collectives bit by bit, the matmul from the one run alone."""
    import numpy as np

    from pk_jax._bench.harness import CheckError

    nccl = case_of("psum", sizes._replace(op_bytes=sizes.nccl_bytes))
    cases = {"pk": case_of(op, sizes), "lax": case_of(op, sizes), "nccl": nccl}
    for part, result in zip(program.parts, program.run(*program.args), strict=True):
        if part == "gemm":
            if gemm is not None:
                close = np.allclose(
                    sample(result), sample(gemm), rtol=2e-2, atol=2e-2 * sizes.k**0.5
                )
                if not close:
                    raise CheckError("the matmul's result differs")
        elif wrong := bench.wrong_elements(cases[part], result, 0):
            raise CheckError(f"{wrong} wrong elements from {part}")


def sample(x: Any) -> Any:
    """Some rows of every rank's part, on the host."""
    import numpy as np

    return np.stack([np.asarray(s.data[:8], np.float32) for s in x.addressable_shards])


def child(
    op: str, names: Sequence[str], sample_ms: float, samples: int, commit: str | None
) -> None:
    """Prints a header, then a line for each variant, before which the name stands alone."""
    import jax

    from pk_jax._bench import harness, records, timing
    from pk_jax._bench.ops import AXIS

    device = jax.devices()[0]
    bench = harness.Bench(jax.make_mesh((jax.device_count(),), (AXIS,)))
    sizes = ON_GPU if bench.on_gpu else ON_CPU
    say = functools.partial(print, flush=True)
    header = {
        "ranks": bench.ranks,
        "on_gpu": bench.on_gpu,
        "box": records.box_name(device.device_kind, device.platform, jax.device_count()),
        "stamp": records.provenance(commit),
        "sizes": sizes._asdict(),
    }
    say(json.dumps({"header": header}))
    alone = build(bench, op, VARIANTS["gemm_alone"], sizes)
    (gemm,) = alone.run(*alone.args)
    for name in names:
        say(json.dumps({"start": name}))
        try:
            program = build(bench, op, VARIANTS[name], sizes)
            for _ in range(3):  # uncaptured, captured, replayed
                check(bench, op, program, sizes, gemm)
            # A step of the GPU's shapes takes about a millisecond.
            timed = timing.Program(program.run, program.args, STEPS, 1e3)
            found = timing.time_programs({name: timed}, sample_ms, samples)[name]
            us = [found.median, found.p10, found.p90]
            runs = {k: v for k, v in program.instructions.items() if k not in timing.FREE}
            say(json.dumps({"name": name, "us": us, "instructions": runs}))
        except Exception as error:  # the next variant may well run
            say(json.dumps({"name": name, "error": f"{type(error).__name__}: {error}"[:300]}))


# ---- The parent --------------------------------------------------------------------------------


def measure(
    command: Sequence[str], names: Sequence[str], timeout_s: float
) -> tuple[dict[str, Any], dict[str, list[float]], dict[str, str]]:
    """Runs children until each variant was measured or failed: (header, times, reasons)."""
    header: dict[str, Any] = {"instructions": {}}
    times: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    left = list(names)
    while left:
        reason, text = None, ""
        try:
            text = launch.run_processes([*command, "--mixed-names", *left], 1, timeout_s, True)
        except launch.JobError as error:
            reason, text = str(error), error.output
        started = None
        for line in text.splitlines():
            if not line.startswith("{"):
                continue
            row = json.loads(line)
            header |= row.get("header", {})
            started = row.get("start", started)
            if "us" in row:
                times[row["name"]] = row["us"]
                header["instructions"][row["name"]] = row["instructions"]
            elif "error" in row:
                failed[row["name"]] = row["error"]
        if reason is None:
            break
        if started is None:  # not a variant's fault
            raise RuntimeError(reason)
        failed.setdefault(started, reason)
        left = left[left.index(started) + 1 :]
    return header, times, failed


def record_of(
    op: str, header: dict[str, Any], times: dict[str, list[float]], failed: dict[str, str]
) -> Any:
    """The record of an op: median_us is the plain pk call beside the matmul."""
    from pk_jax._bench import records

    medians = {name: us[0] for name, us in times.items()}
    gemm, alone = medians.get("gemm_alone"), medians.get("pk_alone")
    record = records.Record(
        id=f"mixed-{op}",
        op="mixed",
        ranks=header["ranks"],
        processes=1,
        dtype="bfloat16",
        compute_us=gemm,
        link_us=alone,
        baselines={k: v for k, v in medians.items() if k.startswith("lax")},
        candidates={k: v for k, v in medians.items() if not k.startswith("lax") and k != "plain"},
        skipped=failed,
        method={
            "steps": STEPS,
            "sizes": header["sizes"],
            "instructions": header["instructions"],
            "p10_p90": {k: v[1:] for k, v in times.items()},
        },
        **header["stamp"],
    )
    if gemm is not None and alone is not None:
        record.bound_us = max(gemm, alone)
    if "plain" in times:
        record.median_us, record.p10_us, record.p90_us = times["plain"]
        record.max_rel_err = 0.0
        record.ratio = record.median_us / record.bound_us if record.bound_us else None
        if "lax" in medians:
            record.speedup = medians["lax"] / record.median_us
    return record


def run(
    options: Sequence[str], words: Sequence[str] | None, timeout_s: float
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields (record, header) of each op; this process itself starts no backend."""
    for op in [op for op in OPS if not words or op in words or not set(words) & set(OPS)]:
        names = [name for name in VARIANTS if not words or set(words) <= set(OPS) or name in words]
        command = launch.this_command("--op", "mixed", "--mixed-op", op, *options)
        header, times, failed = measure(command, names, timeout_s)
        yield record_of(op, header, times, failed), header

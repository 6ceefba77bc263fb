"""`pk-jax bench collective-matmul`: products with a collective against what users have without."""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from pk_jax._bench import command, records
from pk_jax._tuning import fused_cases
from pk_jax._tuning.fused_cases import GatherCase, MlpCase, ReduceCase

CASES: dict[str, tuple[Any, ...]] = {
    "all_gather_matmul": fused_cases.ALL_GATHER_MATMULS,
    "matmul_reduce_scatter": fused_cases.MATMUL_REDUCE_SCATTERS,
    "matmul_all_reduce": fused_cases.MATMUL_ALL_REDUCES,
    "tensor_parallel_mlp": fused_cases.MLPS,
}
# What a CPU can do in seconds. There both sides are jax.lax: it shows that the suite runs.
ON_CPU: dict[str, tuple[Any, ...]] = {
    "all_gather_matmul": (GatherCase("agmm-tiny", 64, 16, 40),),
    "matmul_reduce_scatter": (ReduceCase("mmrs-tiny", 64, 16, 40),),
    "matmul_all_reduce": (ReduceCase("mmar-tiny", 64, 16, 40, all_reduce=True),),
    "tensor_parallel_mlp": (MlpCase("mlp-tiny", 64, 16, 24),),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "--ops", nargs="+", choices=tuple(CASES), default=list(CASES), help="default: all"
    )
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="only these, e.g. agmm-70b-up")
    parser.add_argument(
        "--forced", action="store_true", help="also time each schedule, whatever the model chooses"
    )
    parser.add_argument(
        "--plans", action="store_true", help="also time each tile and number of SMs"
    )
    parser.add_argument(
        "--without", nargs="+", default=[], metavar="WAY", help="leave out, e.g. pallas xla_hiding"
    )
    command.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Runs the cases; 1 if a result was wrong, 2 if they cannot run here."""
    known = [case.name for op in args.ops for case in CASES[op]]
    if args.cases and not set(args.cases) <= set(known):
        unknown = sorted(set(args.cases) - set(known))
        print(f"pk-jax bench: no case {unknown}; they are {', '.join(known)}", file=sys.stderr)
        return 2
    mesh = command.find_mesh("products with a collective")
    return 2 if mesh is None else suite(mesh, args)


def suite(mesh: Any, args: argparse.Namespace) -> int:
    """Measures on a mesh of one axis, prints as it goes, and writes what was asked for."""
    import jax

    from pk_jax._bench import harness

    on_cpu = command.on_cpu(list(mesh.devices.flat))
    stamp = records.provenance(None)
    leader = jax.process_index() == 0
    if leader:
        print(f"{mesh.size}x {stamp['gpu']}, jax {stamp['jax']}, bf16; others' times over pk's")
        if on_cpu:
            print("no GPUs: this measures the reference, which is jax.lax, on tiny sizes")
    method = harness.Method(
        sample_ms=0.0 if on_cpu else 5.0,
        samples=args.samples,
        forced=args.forced or args.plans,
        budget_s=1.0,
        plans=args.plans,
        without=tuple(args.without),
    )
    failures: list[str] = []
    count, start = 0, time.perf_counter()
    for op in args.ops:
        cases = [c for c in CASES[op] if not args.cases or c.name in args.cases]
        chosen = ON_CPU[op] if on_cpu and cases else cases
        for record, failed in results(mesh, op, chosen, method, stamp):
            failures += failed
            count += 1
            if leader:
                print(line(record), flush=True)
                if args.json is not None:  # as it goes: a run that is cut short keeps what it has
                    records.save(args.json, [record])
    if leader:
        print(f"{count} cases in {time.perf_counter() - start:.0f} s")
        for failure in failures:
            print(f"REFUSED: {failure}", file=sys.stderr)
    return 1 if failures else 0


def results(
    mesh: Any, op: str, cases: Sequence[Any], method: Any, stamp: dict[str, Any]
) -> Iterator[tuple[records.Record, list[str]]]:
    """Yields the record of each case of an op, and what was wrong."""
    from pk_jax._bench import fused_bench

    beside: dict[str, fused_bench.Beside] = {}
    if op == "all_gather_matmul":
        beside = pallas_of(mesh, cases, method)
    for case in cases:
        more = beside.get(case.name, fused_bench.Beside())
        yield fused_bench.run_case(mesh, kind_of(op, case), case, method, stamp, more)


def kind_of(op: str, case: Any) -> Any:
    """The `fused.Op` of a case of an op."""
    from pk_jax._bench import gathered, mlp, reduced

    return {
        "all_gather_matmul": gathered.OP,
        "matmul_reduce_scatter": reduced.SCATTER,
        "matmul_all_reduce": reduced.REDUCE,
        "tensor_parallel_mlp": mlp.STEP if getattr(case, "gradients", False) else mlp.FORWARD,
    }[op]


def is_on_gpus(mesh: Any) -> bool:
    """Whether the mesh is one of GPUs."""
    return mesh.devices.flat[0].platform == "gpu"


def pallas_of(mesh: Any, cases: Sequence[GatherCase], method: Any) -> dict[str, Any]:
    """What Pallas's kernel takes for each case, or why there is no such number."""
    import jax

    from pk_jax._bench import fused_bench, pallas

    if pallas.NAME in method.without:
        return {}
    reason = None
    if not is_on_gpus(mesh):
        reason = "it needs GPUs"
    elif jax.process_count() > 1:
        reason = "in several processes it asks for symmetric memory, and so for NVLink multicast"
    if reason is not None:
        return {case.name: fused_bench.Beside(skipped={pallas.NAME: reason}) for case in cases}
    found = pallas.measure(cases, method.samples, method.sample_ms)
    beside = {}
    for name, mine in found.items():
        best = pallas.best(mine)
        why = "; ".join(f"{config}: {error}" for config, error in mine["errors"].items())
        beside[name] = fused_bench.Beside(
            {pallas.NAME: best[1]} if best else {},
            {} if best else {pallas.NAME: why or "it printed nothing"},
            {pallas.NAME: mine | {"config": best[0] if best else None}},
            mine["us"].get(pallas.XLA, [None])[0],
        )
    return beside


def line(record: records.Record) -> str:
    """One row of the printed table."""
    from pk_jax._bench import fused

    if record.median_us is None:
        return f"{record.id:17} not measured: {record.skipped.get('default', '')}"
    ours = record.median_us
    cells = [f"{record.id:17} pk {command.number(ours)} us", f"{record.ratio or 0:.2f}x bound"]
    times = {k: us for k, us in record.baselines.items() if k not in fused.ALONE}
    cells += [f"{name} {us / ours:.2f}x" for name, us in (times | record.candidates).items()]
    cells += [f"no {name}" for name in record.skipped]
    return " | ".join([*cells, (record.config or {}).get("kernels", "")])

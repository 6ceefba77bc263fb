"""Benchmarks of pk_jax: checks, then times, then prints; a wrong result gets no number.

    python benchmarks/run.py --op collectives                  # all six, every case
    python benchmarks/run.py --op collectives --cases target   # what has a target
    python benchmarks/run.py --op psum all_gather --quick --only-default --budget 60
    python benchmarks/run.py --op all_gather --processes 2
    python benchmarks/run.py --op mixed                        # beside a GEMM and NCCL in one jit
    python benchmarks/run.py --op matmul --cases plain         # each plan against XLA, one GPU
    python benchmarks/run.py --op ragged_dot                   # the same, by groups of rows
    python benchmarks/run.py --op attention --cases gradient   # against cuDNN's, one GPU
    python benchmarks/run.py --op collective_matmul            # the four of FUSED, every baseline
    python benchmarks/run.py --op all_gather_matmul --plans    # each tile and number of SMs, too
    python benchmarks/run.py --op tensor_parallel_mlp          # a block of a network, its gradients
    python benchmarks/run.py --op host_cost
    python benchmarks/run.py --op first_use

Cases with a target come first, then other layouts, then the sweep over sizes. Records go to
benchmarks/results/<box>/<op>.jsonl (to DIR/<box>/ with --out DIR), a line a case as soon as it is
measured; report.py turns them into the README's table and curves.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

# NVLink multicast stays off: pk_jax does not use it, so NCCL is compared without it. Set before
# NCCL loads, and inherited by the processes started here.
if os.environ.setdefault("NCCL_NVLS_ENABLE", "0") != "0":
    sys.exit("run.py compares without NVLink multicast: unset NCCL_NVLS_ENABLE or set it to 0")

import launch

COLLECTIVES = (
    "all_gather",
    "psum",
    "psum_scatter",
    "all_to_all",
    "ppermute",
    "ragged_all_to_all",
)
ALL_COLLECTIVES = "collectives"
ONE_DEVICE = ("matmul", "ragged_dot", "attention")  # whatever the machine has
FUSED = (
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "matmul_all_reduce",
    "tensor_parallel_mlp",
)
ALL_FUSED = "collective_matmul"
SPECIAL = ("host_cost", "first_use", "mixed", *ONE_DEVICE, *FUSED, ALL_FUSED)
FIRST_USE_ORDERS = ("lax", "lax+pk", "pk")
# A sample is many calls: 20 of them hold at least 160.
MIN_SAMPLES = 20


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out.add_argument(
        "--op",
        nargs="+",
        choices=(*COLLECTIVES, ALL_COLLECTIVES, *SPECIAL),
        required=True,
        help="collectives, or one of the others alone",
    )
    out.add_argument(
        "--cases",
        nargs="+",
        metavar="WORD",
        help="only cases with one of these tags (target, quick, strided, sweep) or names",
    )
    out.add_argument(
        "--only-default", action="store_true", help="time no forced mechanisms, only pk and lax"
    )
    out.add_argument(
        "--plans", action="store_true", help="of products with a collective, time each plan too"
    )
    out.add_argument(
        "--without", nargs="+", default=[], metavar="WAY", help="of products, leave out e.g. pallas"
    )
    out.add_argument(
        "--budget", type=float, metavar="SECONDS", help="start no case after this time"
    )
    out.add_argument(
        "--quick", action="store_true", help="only the cases tagged quick, shorter samples"
    )
    out.add_argument(
        "--out", type=pathlib.Path, metavar="DIR", help="write DIR/<box>/<op>.jsonl instead"
    )
    out.add_argument(
        "--processes", type=int, default=1, help="processes that share the GPUs evenly"
    )
    out.add_argument(
        "--devices-per-process", type=int, default=1, help="with --processes: GPUs of each"
    )
    out.add_argument("--samples", type=int, default=50, help="timed samples a variant")
    out.add_argument("--sample-ms", type=float, help="about how long a sample runs")
    out.add_argument("--commit", help="the commit to record, where the tree has no git")
    out.add_argument(
        "--timeout", type=float, default=1800, help="seconds for jobs of several processes"
    )
    for name, kind in (("address", str), ("size", int), ("rank", int)):
        out.add_argument(f"--job-{name}", type=kind, default=None, help=argparse.SUPPRESS)
    out.add_argument("--first-use-order", choices=FIRST_USE_ORDERS, help=argparse.SUPPRESS)
    out.add_argument("--mixed-op", help=argparse.SUPPRESS)
    out.add_argument("--mixed-names", nargs="+", help=argparse.SUPPRESS)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(argv)
    if len(args.op) > 1 and set(args.op) & set(SPECIAL):
        parser().error(f"{', '.join(SPECIAL)} run alone, one to a command")
    if args.op == ["first_use"] and args.first_use_order is None:
        return first_use(args)
    if args.op == ["mixed"] and args.mixed_op is None:
        return mixed_ops(args)
    if args.processes > 1 and args.job_rank is None:
        try:
            launch.run_processes(launch.this_command(*argv), args.processes, args.timeout)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
        return 0
    launch.join(args.job_address, args.job_size or 1, args.job_rank or 0, args.devices_per_process)
    try:
        if num_devices() < 2 and args.op[0] not in ONE_DEVICE:
            raise NotImplementedError(f"it needs two devices or more, found {num_devices()}")
        if args.mixed_op:
            return mixed_child(args)
        return first_use_child(args) if args.first_use_order else in_this_process(args)
    except NotImplementedError as error:
        print(f"REFUSED: {' '.join(args.op)} cannot run here: {error}", file=sys.stderr)
        return 1


def num_devices() -> int:
    import jax

    return jax.device_count()


def in_this_process(args: argparse.Namespace) -> int:
    """Runs the ops here; the first process of a job prints and writes."""
    import jax

    from pk_jax._bench import records

    leader = jax.process_index() == 0
    failures: list[str] = []
    start = time.perf_counter()
    for record, failed in results_of(args):
        failures += failed
        if leader and record is not None:
            print(f"[{time.perf_counter() - start:4.0f} s] {summary(record)}", flush=True)
            path = output_path(args, record.op)
            # Case by case: a run cut short keeps what it has. A refused result replaces none.
            if path is not None and record.median_us is not None:
                records.save(path, [record])
        # Only where one process decides alone: others would wait for it in the next case.
        late = args.budget is not None and time.perf_counter() - start > args.budget
        if late and jax.process_count() == 1:
            print(f"the budget of {args.budget:.0f} s is spent", file=sys.stderr)
            break
    if leader:
        for failure in failures:
            print(f"REFUSED: {failure}", file=sys.stderr)
        root = output_root(args)
        print(f"records: {root}" if root else "records: not written (--out DIR to keep them)")
    return 1 if failures else 0


def sample_ms(args: argparse.Namespace) -> float:
    """--sample-ms, or its default."""
    return args.sample_ms if args.sample_ms is not None else 5.0 if args.quick else 20.0


def results_of(args: argparse.Namespace) -> Iterator[tuple[Any, list[str]]]:
    """Yields the records of what --op asks for, one by one."""
    import calls
    import checkout
    import jax

    from pk_jax._bench import harness, records
    from pk_jax._bench.ops import AXIS

    mesh = jax.make_mesh((jax.device_count(),), (AXIS,))
    stamp = records.provenance(args.commit or checkout.commit())
    method = harness.Method(
        sample_ms(args),
        args.samples,
        not args.only_default,
        plans=args.plans,
        without=tuple(args.without),
    )
    if args.op == ["host_cost"]:
        return calls.host_cost(mesh, method, stamp)
    if args.op[0] in ONE_DEVICE:
        return one_device_results(args.op[0], args.cases, method, stamp)
    if args.op[0] in (*FUSED, ALL_FUSED):
        ops = FUSED if args.op == [ALL_FUSED] else args.op
        return fused_results(ops, mesh, args.cases, method, stamp)
    return harness.run(mesh, select(args.op, args.cases, args.quick), method, stamp)


def one_device_results(
    op: str, words: Sequence[str] | None, method: Any, stamp: Any
) -> Iterator[tuple[Any, list[str]]]:
    """Yields the records of matrix products, or of attention."""
    import attention
    import grouped
    import products

    from pk_jax._tuning.attention_cases import ATTENTIONS
    from pk_jax._tuning.matmul_cases import GROUPED, MATMULS

    if op == "attention":
        return attention.run(matching(ATTENTIONS, words), method, stamp)
    ops = {"matmul": (products.MATMUL, MATMULS), "ragged_dot": (grouped.RAGGED_DOT, GROUPED)}
    kind, cases = ops[op]
    return products.run(matching(cases, words), method, stamp, kind)


def fused_results(
    ops: Sequence[str], mesh: Any, words: Sequence[str] | None, method: Any, stamp: Any
) -> Iterator[tuple[Any, list[str]]]:
    """Yields the records of products with a collective."""
    from pk_jax._bench import collective_matmul

    known = [case for op in ops for case in collective_matmul.CASES[op]]
    chosen = matching(known, words)
    for op in ops:
        cases = [case for case in collective_matmul.CASES[op] if case in chosen]
        yield from collective_matmul.results(mesh, op, cases, method, stamp)


def matching(cases: Sequence[Any], words: Sequence[str] | None) -> list[Any]:
    """The cases that --cases asks for; at least one, or the run ends."""
    chosen = [c for c in cases if not words or c.tags & set(words) or c.name in words]
    if not chosen:
        sys.exit(f"no case matches {words}; they are {', '.join(c.name for c in cases)}")
    return chosen


def select(ops: Sequence[str], words: Sequence[str] | None, quick: bool) -> list[Any]:
    """The cases that --op, --cases and --quick ask for, the most important first."""
    from pk_jax._tuning.collective_cases import COLLECTIVES as CASES

    wanted = COLLECTIVES if ALL_COLLECTIVES in ops else ops
    mine = [c for c in CASES if c.op in wanted]
    chosen = [c for c in mine if not quick or c.tags & {"quick", "target"}]
    chosen = [c for c in chosen if not words or c.tags & set(words) or c.name in words]
    if not chosen:
        sys.exit(f"no case matches {words}; the cases are {', '.join(c.name for c in mine)}")
    order = ("target", "strided", "sweep")
    return sorted(chosen, key=lambda c: next(i for i, tag in enumerate(order) if tag in c.tags))


def output_root(args: argparse.Namespace) -> pathlib.Path | None:
    """The folder for records; None, unless asked, from a CPU or from too few samples."""
    import checkout
    import jax

    from pk_jax._bench import records

    device = jax.devices()[0]
    if args.out is None and (device.platform != "gpu" or args.samples < MIN_SAMPLES):
        return None
    count = 1 if args.op[0] in ONE_DEVICE else jax.device_count()
    box = records.box_name(device.device_kind, device.platform, count)
    return (args.out or checkout.RESULTS) / box


def output_path(args: argparse.Namespace, op: str) -> pathlib.Path | None:
    root = output_root(args)
    return root / f"{op}.jsonl" if root else None


def summary(record: Any) -> str:
    """One line of a record."""
    parts = [f"{record.id:20s} {record.ranks} ranks, {record.processes} proc"]
    if record.median_us is not None:
        parts.append(f"pk {record.median_us:.4g} us ({record.p10_us:.4g}-{record.p90_us:.4g})")
    parts += [f"{k} {v:.4g}" for k, v in (record.candidates | record.baselines).items()]
    if record.gbps is not None:
        parts.append(f"{record.gbps:.4g} GB/s")
    if record.ratio is not None:
        parts.append(f"{record.ratio:.3g}x bound")
    if record.speedup is not None:
        parts.append(f"speed-up {record.speedup:.3g}x")
    plan = record.config or {}
    parts.append("/".join(str(v) for v in plan.values() if v is not None))
    parts += [f"no {k}: {v}" for k, v in record.skipped.items()]
    return " | ".join(p for p in parts if p)


def first_use(args: argparse.Namespace) -> int:
    """Three fresh jobs for each order of first calls; this process itself starts no backend."""
    import calls
    import checkout

    from pk_jax._bench import records

    runs: dict[str, list[dict[str, float]]] = {order: [] for order in FIRST_USE_ORDERS}
    header: dict[str, Any] = {}
    try:
        for _ in range(1 if args.quick else 3):
            for order in FIRST_USE_ORDERS:
                command = launch.this_command(
                    "--op", "first_use", "--first-use-order", order,
                    "--devices-per-process", str(args.devices_per_process),
                    *(["--commit", args.commit] if args.commit else []),
                )  # fmt: skip
                text = launch.run_processes(command, args.processes, args.timeout, capture=True)
                header = json.loads(next(t for t in text.splitlines() if t.startswith("{")))
                runs[order].append(header.pop("times"))
    except RuntimeError as error:
        print(f"REFUSED: {error}", file=sys.stderr)
        return 1
    record = calls.first_use_record(runs, header["ranks"], args.processes, header["stamp"])
    print(summary(record))
    root = args.out or (checkout.RESULTS if header["on_gpu"] else None)
    if root is not None:
        records.save(root / header["box"] / "first_use.jsonl", [record])
    return 0


def first_use_child(args: argparse.Namespace) -> int:
    """One order in a fresh process; the first process prints its result as a line of JSON."""
    import calls
    import checkout
    import jax

    from pk_jax._bench import records
    from pk_jax._bench.ops import AXIS

    device = jax.devices()[0]
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,))
    times = calls.first_use_once(mesh, args.first_use_order)
    if jax.process_index() == 0:
        line = {
            "times": times,
            "ranks": mesh.size,
            "on_gpu": device.platform == "gpu",
            "box": records.box_name(device.device_kind, device.platform, jax.device_count()),
            "stamp": records.provenance(args.commit or checkout.commit()),
        }
        print(json.dumps(line), flush=True)
    return 0


def mixed_ops(args: argparse.Namespace) -> int:
    """The op `mixed`: children measure, one for each op unless one dies."""
    import checkout
    import mixed

    from pk_jax._bench import records

    if args.processes > 1:
        parser().error("mixed runs in one process")
    # A collective that hangs is to end its child, not the run.
    os.environ.setdefault("PK_JAX_TIMEOUT_S", "20")
    options = ["--samples", str(args.samples), "--sample-ms", str(sample_ms(args))]
    options += ["--commit", args.commit] if args.commit else []
    try:
        for record, header in mixed.run(options, args.cases, min(args.timeout, 240.0)):
            print(summary(record), flush=True)
            root = args.out or (checkout.RESULTS if header["on_gpu"] else None)
            if root is not None and record.median_us is not None:
                records.save(root / header["box"] / "mixed.jsonl", [record])
    except RuntimeError as error:
        print(f"REFUSED: {error}", file=sys.stderr)
        return 1
    return 0


def mixed_child(args: argparse.Namespace) -> int:
    import checkout
    import mixed

    commit = args.commit or checkout.commit()
    mixed.child(args.mixed_op, args.mixed_names, sample_ms(args), args.samples, commit)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Benchmarks of pk_jax: checks, then times, then prints; a wrong result gets no number.

    python benchmarks/run.py --op all_gather            # every case, in one process
    python benchmarks/run.py --op all_gather --quick    # the sizes that have a target
    python benchmarks/run.py --op all_gather --processes 2
    python benchmarks/run.py --op host_cost
    python benchmarks/run.py --op first_use

Records go to benchmarks/results/<box>/<op>.jsonl (to DIR/<box>/ with --out DIR), one line a case;
report.py turns them into the README's table and curves.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

# NVLink multicast stays off: pk_jax does not use it, so NCCL is compared without it. Set before
# NCCL loads, and inherited by the processes started here.
if os.environ.setdefault("NCCL_NVLS_ENABLE", "0") != "0":
    sys.exit("run.py compares without NVLink multicast: unset NCCL_NVLS_ENABLE or set it to 0")

import launch

OPS = ("all_gather", "host_cost", "first_use")
FIRST_USE_ORDERS = ("lax", "lax+pk", "pk")
MIN_SAMPLES = 50


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out.add_argument("--op", choices=OPS, required=True)
    out.add_argument(
        "--cases", metavar="WORD", help="only cases with this tag, or whose id contains it"
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
    out.add_argument("--samples", type=int, default=MIN_SAMPLES, help="timed samples a variant")
    out.add_argument("--sample-ms", type=float, help="about how long a sample runs")
    out.add_argument("--commit", help="the commit to record, where the tree has no git")
    out.add_argument(
        "--timeout", type=float, default=1800, help="seconds for jobs of several processes"
    )
    for name, kind in (("address", str), ("size", int), ("rank", int)):
        out.add_argument(f"--job-{name}", type=kind, default=None, help=argparse.SUPPRESS)
    out.add_argument("--first-use-order", choices=FIRST_USE_ORDERS, help=argparse.SUPPRESS)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(argv)
    if args.op == "first_use" and args.first_use_order is None:
        return first_use(args)
    if args.processes > 1 and args.job_rank is None:
        try:
            launch.run_processes(launch.this_command(*argv), args.processes, args.timeout)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
        return 0
    launch.join(args.job_address, args.job_size or 1, args.job_rank or 0, args.devices_per_process)
    try:
        if num_devices() < 2:
            raise NotImplementedError(f"it needs two devices or more, found {num_devices()}")
        return first_use_child(args) if args.first_use_order else in_this_process(args)
    except NotImplementedError as error:
        print(f"REFUSED: {args.op} cannot run here: {error}", file=sys.stderr)
        return 1


def num_devices() -> int:
    import jax

    return jax.device_count()


def in_this_process(args: argparse.Namespace) -> int:
    """Runs the op here; the first process of a job prints and writes."""
    import all_gather
    import calls
    import jax
    import records

    leader = jax.process_index() == 0
    mesh = jax.make_mesh((jax.device_count(),), (all_gather.AXIS,))
    stamp = records.provenance(args.commit)
    path = output_path(args)
    sample_ms = args.sample_ms if args.sample_ms is not None else 5.0 if args.quick else 20.0
    if args.op == "host_cost":
        results: Any = calls.host_cost(mesh, sample_ms, args.samples, stamp)
    else:
        selected = select(all_gather.cases(), args.cases, args.quick)
        results = all_gather.run(mesh, selected, sample_ms, args.samples, stamp)
    failures: list[str] = []
    start = time.perf_counter()
    for record, failed in results:
        failures += failed
        if leader and record is not None:
            print(f"[{time.perf_counter() - start:4.0f} s] {summary(record)}", flush=True)
            # Case by case: a run cut short keeps what it has. A refused result replaces none.
            if path is not None and record.median_us is not None:
                records.save(path, [record])
    if leader:
        for failure in failures:
            print(f"REFUSED: {failure}", file=sys.stderr)
        print(f"records: {path}" if path else "records: not written (--out DIR to keep them)")
    return 1 if failures else 0


def select(cases: list[Any], word: str | None, quick: bool) -> list[Any]:
    """The cases that --cases and --quick ask for."""
    chosen = [c for c in cases if not quick or "quick" in c.tags]
    chosen = [c for c in chosen if word is None or word in c.tags or word in c.id]
    if not chosen:
        sys.exit(f"no case matches {word!r}; the cases are {', '.join(c.id for c in cases)}")
    return chosen


def output_path(args: argparse.Namespace) -> pathlib.Path | None:
    """Where records go; nowhere, unless asked, from a CPU or from too few samples."""
    import jax
    import records

    device = jax.devices()[0]
    if args.out is None and (device.platform != "gpu" or args.samples < MIN_SAMPLES):
        return None
    box = records.box_name(device.device_kind, device.platform, jax.device_count())
    return (args.out or records.RESULTS) / box / f"{args.op}.jsonl"


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
        parts.append(f"{record.speedup:.3g}x NCCL")
    plan = record.config or {}
    parts.append("/".join(str(v) for v in plan.values() if v is not None))
    parts += [f"no {k}: {v}" for k, v in record.skipped.items()]
    return " | ".join(p for p in parts if p)


def first_use(args: argparse.Namespace) -> int:
    """Three fresh jobs for each order of first calls; this process itself starts no backend."""
    import calls
    import records

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
    root = args.out or (records.RESULTS if header["on_gpu"] else None)
    if root is not None:
        records.save(root / header["box"] / "first_use.jsonl", [record])
    return 0


def first_use_child(args: argparse.Namespace) -> int:
    """One order in a fresh process; the first process prints its result as a line of JSON."""
    import all_gather
    import calls
    import jax
    import records

    device = jax.devices()[0]
    mesh = jax.make_mesh((jax.device_count(),), (all_gather.AXIS,))
    times = calls.first_use_once(mesh, args.first_use_order)
    if jax.process_index() == 0:
        line = {
            "times": times,
            "ranks": mesh.size,
            "on_gpu": device.platform == "gpu",
            "box": records.box_name(device.device_kind, device.platform, jax.device_count()),
            "stamp": records.provenance(args.commit),
        }
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`pk-jax bench collectives`: sizes and layouts against jax.lax, as a table, JSON and a PNG."""

import argparse
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from pk_jax._bench import command, records
from pk_jax._tuning.collective_cases import COLLECTIVES, PREFIXES, CollectiveCase
from pk_jax._tuning.hardware import KIB

# What a CPU can do in seconds. There both sides are jax.lax: it shows that the sweep runs.
CPU_BYTES = (KIB, 16 * KIB)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "--ops", nargs="+", choices=tuple(PREFIXES), default=list(PREFIXES), help="default: all"
    )
    parser.add_argument(
        "--sizes",
        choices=("quick", "full"),
        default="quick",
        help="quick: four sizes and one other layout; full: 1 KiB to 1 GiB a rank and all layouts",
    )
    command.add_arguments(parser)
    parser.add_argument("--png", type=pathlib.Path, metavar="PATH", help="draw GB/s over size")


def main(args: argparse.Namespace) -> int:
    """Runs the sweep; 1 if a result was wrong, 2 if it cannot run here."""
    if args.png is not None and (reason := _no_matplotlib()):
        print(f"pk-jax bench: --png {reason}", file=sys.stderr)
        return 2
    mesh = command.find_mesh("collectives")
    return 2 if mesh is None else sweep(mesh, args)


def sweep(mesh: Any, args: argparse.Namespace) -> int:
    """Measures on a mesh of one axis, prints as it goes, and writes what was asked for."""
    import jax

    from pk_jax._bench import harness

    devices = list(mesh.devices.flat)
    on_cpu = command.on_cpu(devices)
    stamp = records.provenance(None)
    print(f"{len(devices)}x {stamp['gpu']}, jax {stamp['jax']}, bf16, sizes are a rank's operand")
    if on_cpu:
        print("no GPUs: this measures the reference, which is jax.lax, on tiny sizes")
    print(f"{'':24}{'pk us':>10}{'GB/s':>8}{'lax us':>10}{'lax/pk':>8}  runs as")
    method = harness.Method(
        sample_ms=0.0 if on_cpu else 5.0, samples=args.samples, forced=False, budget_s=1.0
    )
    leader = jax.process_index() == 0
    rows: list[records.Record] = []
    failures: list[str] = []
    start = time.perf_counter()
    for record, failed in harness.run(mesh, select(args.ops, args.sizes, on_cpu), method, stamp):
        failures += failed
        rows.append(record)
        if leader:
            print(line(record), flush=True)
            if args.json is not None:  # as it goes: a sweep that is cut short keeps what it has
                records.save(args.json, [record])
    if leader:
        print(f"{len(rows)} cases in {time.perf_counter() - start:.0f} s")
        if args.png is not None:
            from pk_jax._bench import plot

            plot.draw(rows, args.png)
        for failure in failures:
            print(f"REFUSED: {failure}", file=sys.stderr)
    return 1 if failures else 0


def select(ops: Sequence[str], sizes: str, on_cpu: bool) -> list[CollectiveCase]:
    """The cases of a sweep, op by op."""
    wanted = [case for op in ops for case in COLLECTIVES if case.op == op]
    if on_cpu:
        found = [case for case in wanted if case.nbytes in CPU_BYTES and "sweep" in case.tags]
        return found if sizes == "full" else [c for c in found if c.nbytes == CPU_BYTES[0]]
    return [case for case in wanted if sizes == "full" or "quick" in case.tags]


def line(record: records.Record) -> str:
    """One row of the printed table."""
    vendor = min((v for k, v in record.baselines.items()), default=None)
    if record.median_us is None:
        reason = record.skipped.get("default", "")
        theirs = command.number(vendor)
        return f"{record.id:24}{'':>10}{'':>8}{theirs:>10}{'':>8}  not measured: {reason}"
    plan = record.config or {}
    runs_as = [plan.get(k) for k in ("mechanism", "protocol", "algorithm") if plan.get(k)]
    return (
        f"{record.id:24}{command.number(record.median_us):>10}{command.number(record.gbps):>8}"
        f"{command.number(vendor):>10}{f'{record.speedup:.2f}' if record.speedup else '':>8}  "
        f"{'/'.join(map(str, runs_as)) or plan.get('implementation', '')}"
    )


def _no_matplotlib() -> str | None:
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        return "needs matplotlib, which is not installed: pip install matplotlib, or leave it out"
    return None

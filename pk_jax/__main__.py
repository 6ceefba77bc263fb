"""The command line: ``pk-jax doctor`` and ``pk-jax bench``, also as ``python -m pk_jax``."""

import argparse
import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence

from pk_jax import __version__
from pk_jax._bench import collective_matmul, collectives
from pk_jax._doctor import render, report_in_child


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a sub-command and returns its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["bench"] and argv[1:2] not in (["collectives"], ["collective-matmul"]):
        return _bench(argv[1:])  # its options, --help among them, are those of benchmarks/run.py
    parser = argparse.ArgumentParser(prog="pk-jax", description="Multi-GPU kernels for JAX.")
    parser.add_argument("--version", action="version", version=f"pk_jax {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor", help="what this machine can do, which path each op takes, and why"
    )
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")
    doctor.add_argument(
        "--timeout",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="how long to wait for the devices (default 60)",
    )
    bench = commands.add_parser(
        "bench",
        help="check, then time: `bench collectives`, `bench collective-matmul`; else "
        "benchmarks/run.py of a source checkout",
    )
    suites = bench.add_subparsers(dest="suite", required=True)
    collectives.add_arguments(
        suites.add_parser("collectives", help="sizes and layouts against jax.lax")
    )
    collective_matmul.add_arguments(
        suites.add_parser("collective-matmul", help="products with a collective against XLA's")
    )
    args = parser.parse_args(argv)
    if args.command == "doctor":
        return _doctor(args)
    return {"collectives": collectives, "collective-matmul": collective_matmul}[args.suite].main(
        args
    )


def _seconds(text: str) -> float:
    """A waiting time: more than nothing, at most a day."""
    value = float(text)
    if not 0 < value <= 86_400:
        raise ValueError(text)
    return value


def _doctor(args: argparse.Namespace) -> int:
    data = report_in_child(args.timeout)
    print(json.dumps(data, indent=2) if args.json else render(data))
    return 1 if data["devices_error"] else 0


def _bench(argv: list[str]) -> int:
    places = (pathlib.Path.cwd(), pathlib.Path(__file__).resolve().parent.parent)
    for place in places:
        script = place / "benchmarks" / "run.py"
        if script.is_file():
            return subprocess.run([sys.executable, str(script), *argv], check=False).returncode
    print(
        "pk-jax bench: other options than `pk-jax bench collectives` and `pk-jax bench "
        "collective-matmul` need a source checkout, which has benchmarks/run.py",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    sys.exit(main())

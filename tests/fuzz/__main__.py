"""Compares random programs with jax.lax: `python -m fuzz --cases 2000 --seed 0`, in `tests`."""

import argparse
import importlib.util
import os
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpus", action="store_true", help="run on the GPUs of this machine")
    parser.add_argument("--threads", type=int, help="programs compiled at a time, by `random`")
    parser.add_argument(
        "--source",
        choices=("hypothesis", "random"),
        help="hypothesis shrinks the first difference; the default where it is installed, on CPU",
    )
    parser.add_argument("--program", help="run this one, as a failure printed it")
    parser.add_argument("--keep-going", action="store_true", help="by `random`: find them all")
    args = parser.parse_args()
    if not args.gpus:
        os.environ["JAX_PLATFORMS"] = "cpu"
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8"

    import jax

    from . import runner, sources
    from .cases import parse

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    devices = jax.devices("cuda" if args.gpus else "cpu")
    has_hypothesis = importlib.util.find_spec("hypothesis") is not None
    source = args.source or ("hypothesis" if has_hypothesis and not args.gpus else "random")
    start = shown = time.monotonic()

    def progress(report: runner.Report) -> None:
        nonlocal shown
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(f"{shown - start:6.0f} s: {report.num_cases} cases", flush=True)
        if report.differences and source == "random" and not args.keep_going:
            finish(report)

    if args.program:
        finish(runner.check(parse(args.program), devices, strict=args.gpus))
    print(f"{args.cases} cases drawn by {source}, seed {args.seed}", flush=True)
    if source == "random":
        report = sources.run_random(
            args.cases,
            args.seed,
            devices,
            threads=args.threads,
            size=16 if args.gpus else sources.CASES_PER_PROGRAM,
            strict=args.gpus,
            progress=progress,
        )
    else:
        try:
            report = sources.run_hypothesis(args.cases, args.seed, devices, progress=progress)
        except AssertionError as error:
            sys.exit(str(error))
    finish(report)


def finish(report) -> None:
    """Prints the outcome and ends the process, not waiting for what is being compiled."""
    for difference in report.differences:
        print(difference)
    kinds = ", ".join(f"{name} {count}" for name, count in sorted(report.counts.items()))
    print(f"{report.num_cases} cases compared: {kinds}")
    if report.calls:
        print("custom calls:", ", ".join(f"{op} {n}" for op, n in sorted(report.calls.items())))
    sys.stdout.flush()
    os._exit(bool(report.differences))


if __name__ == "__main__":
    main()

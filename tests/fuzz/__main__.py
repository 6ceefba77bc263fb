"""Compares random programs with jax.lax: `python -m fuzz --cases 2000 --seed 0`, in `tests`."""

import argparse
import itertools
import os
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpus", action="store_true", help="run on the GPUs of this machine")
    parser.add_argument("--threads", type=int, help="programs compiled at a time")
    parser.add_argument("--source", choices=("hypothesis", "random"), default="random")
    parser.add_argument("--program", help="run this one, as a failure printed it")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at a difference")
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
    start = time.monotonic()
    if args.program:
        report = runner.check(parse(args.program), devices)
    elif args.source == "hypothesis":
        report = sources.run_hypothesis(args.cases, args.seed, devices)
    else:
        shown = itertools.count()

        def progress(report):
            if next(shown) % 10 == 0:
                done = sum(report.counts[op] for op in sources.OPS)
                print(f"{time.monotonic() - start:6.1f} s: {done} cases", flush=True)
            if report.differences and not args.keep_going:
                finish(report)

        report = sources.run_random(
            args.cases, args.seed, devices, threads=args.threads, progress=progress
        )

    def finish(report):
        for difference in report.differences:
            print(difference)
        print(f"{sum(report.counts[op] for op in sources.OPS)} cases compared:", end=" ")
        print(", ".join(f"{name} {count}" for name, count in sorted(report.counts.items())))
        if report.calls:
            print("custom calls:", dict(report.calls))
        sys.stdout.flush()
        os._exit(bool(report.differences))  # not waiting for what is being compiled

    finish(report)


if __name__ == "__main__":
    main()

"""Draws a timeline of one collective matmul: which warps computed and which moved, and when.

    python benchmarks/timeline.py --op all_gather_matmul --case agmm-70b-qkv --out DIR

writes DIR/timeline_<case>.json, for chrome://tracing or https://ui.perfetto.dev, and
DIR/timeline_<case>.png. It needs a library that records, which the normal one does not:

    pip install --no-build-isolation --no-deps -C cmake.define.PK_JAX_TIMELINE=ON .

The result is checked against fp32 before anything is recorded. Then a chain of calls runs once
more, and the last of them is drawn: the calls before it take away what the launch from the host
would add.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

# As for run.py: NVLink multicast stays off.
if os.environ.setdefault("NCCL_NVLS_ENABLE", "0") != "0":
    sys.exit("timeline.py runs without NVLink multicast: unset NCCL_NVLS_ENABLE or set it to 0")

OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
CALLS = 3


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out.add_argument("--op", choices=OPS, required=True)
    out.add_argument("--case", required=True, help="a case of benchmarks/run.py, by name")
    out.add_argument(
        "--way",
        default="default",
        help="a plan by the name that run.py gives it, 128x256/8 or 'lead 2' say",
    )
    out.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR")
    out.add_argument("--sms", type=int, default=8, help="SMs of each GPU to draw that compute")
    out.add_argument("--commit", help="the commit to name, where the tree has no git")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    from pk_jax._bench import timeline, timeline_plot

    case = find(args.op, args.case)
    reason = timeline.why_missing()
    if reason is not None:
        print(f"REFUSED: {reason}", file=sys.stderr)
        return 1
    found = recorded(args.op, case, args.way, args.commit)
    stem = args.out / f"timeline_{case.name}"
    timeline.save(found, stem.with_suffix(".json"))
    timeline_plot.draw(found, stem.with_suffix(".png"), args.sms)
    print(timeline_plot.title(found.about))
    for name, laps in by_name(found):
        print(f"  {name:18s} {len(laps):6d} laps, {(laps['end'] - laps['begin']).sum():10.0f} us")
    print(f"{stem}.json, {stem}.png")
    return 0


def find(op: str, name: str) -> Any:
    """A case of an op by its name; the run ends if there is none."""
    from pk_jax._tuning import fused_cases

    cases = {
        "all_gather_matmul": fused_cases.ALL_GATHER_MATMULS,
        "matmul_reduce_scatter": fused_cases.MATMUL_REDUCE_SCATTERS,
        "matmul_all_reduce": fused_cases.MATMUL_ALL_REDUCES,
    }[op]
    for case in cases:
        if case.name == name:
            return case
    sys.exit(f"{op} has no case {name!r}; they are {', '.join(c.name for c in cases)}")


def recorded(op: str, case: Any, way: str, commit: str | None) -> Any:
    """The timeline of one call of the case on all GPUs, after its result was checked."""
    import checkout
    import gathered
    import jax
    import products
    import reduced

    from pk_jax._bench import records, timeline, timing
    from pk_jax._bench.ops import AXIS

    kind = gathered if op == "all_gather_matmul" else reduced
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,))
    xs, w = kind.operands(mesh, case)
    ways = kind.ways(mesh, case, kind.plans_of(mesh, case))
    if way not in ways:
        sys.exit(f"{case.name} has no way {way!r}; they are {', '.join(ways)}")
    chain = kind.mapped(mesh, lambda xs, w: timing.chain(lambda x: ways[way](x, w), CALLS, xs))
    compiled = chain.lower(xs, w).compile()
    timing.check_calls(compiled.as_text(), f"pk_jax_{op}", CALLS)
    if kind is gathered:
        error = gathered.largest_error(mesh, compiled, xs, xs, w, CALLS)
    else:
        error = reduced.largest_error(mesh, case, compiled, xs, w, CALLS, True)
    if not error <= products.LIMIT:
        raise RuntimeError(f"{case.name} {way}: relative error {error:.2e}")
    about = records.provenance(commit or checkout.commit()) | {
        "op": op,
        "case": case.name,
        "way": way,
        "shape": [case.m, case.p, case.k],
        "dtype": jax.numpy.dtype(products.DTYPE).name,
    }
    devices = [device.local_hardware_id for device in mesh.devices.flat]
    recordings, names = timeline.record(lambda: jax.block_until_ready(compiled(xs, w)), devices)
    return timeline.timeline(recordings, names, about)


def by_name(found: Any) -> list[tuple[str, Any]]:
    """The laps of each thing that was done."""
    return [(name, found.of(name)) for name in found.names if len(found.of(name))]


if __name__ == "__main__":
    sys.exit(main())

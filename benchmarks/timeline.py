"""Draws a timeline of one collective matmul: which warps computed and which moved, and when.

    python benchmarks/timeline.py --op all_gather_matmul --case agmm-70b-qkv --out DIR

writes DIR/timeline_<case>.json, for chrome://tracing or https://ui.perfetto.dev, and
DIR/timeline_<case>.png; with --way the way's name follows the case's. It needs a library that
records, which the normal one does not:

    pip install --no-build-isolation --no-deps -C cmake.define.PK_JAX_TIMELINE=ON .

The result is checked against fp32 before anything is recorded. Then a chain of calls runs once
more, and the last of them is drawn: the calls before it take away what the launch from the host
would add.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any

# As for run.py: NVLink multicast stays off.
if os.environ.setdefault("NCCL_NVLS_ENABLE", "0") != "0":
    sys.exit("timeline.py runs without NVLink multicast: unset NCCL_NVLS_ENABLE or set it to 0")

OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
# The kernels with marks. Of a call's kernels the last of them is drawn.
RECORDING = (*OPS, "matmul")
CALLS = 3
DEFAULT = "default"


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out.add_argument("--op", choices=OPS, required=True)
    out.add_argument("--case", required=True, help="a case of benchmarks/run.py, by name")
    out.add_argument(
        "--way",
        default=DEFAULT,
        help="a schedule or plan by the name that run.py gives it, 'inter_sm 128x256/8' say",
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
    stem = stem_of(case.name, args.way)
    timeline.save(found, args.out / f"{stem}.json")
    timeline_plot.draw(found, args.out / f"{stem}.png", args.sms)
    print(timeline_plot.title(found.about))
    for name, laps in by_name(found):
        print(f"  {name:18s} {len(laps):6d} laps, {(laps['end'] - laps['begin']).sum():10.0f} us")
    print(f"{args.out / stem}.json, {args.out / stem}.png")
    return 0


def find(op: str, name: str) -> Any:
    """A case of an op by its name; the run ends if there is none."""
    from pk_jax._bench import collective_matmul

    cases = collective_matmul.CASES[op]
    for case in cases:
        if case.name == name:
            return case
    sys.exit(f"{op} has no case {name!r}; they are {', '.join(c.name for c in cases)}")


def stem_of(case: str, way: str) -> str:
    """The name of the files, without their suffix."""
    return f"timeline_{case}" if way == DEFAULT else f"timeline_{case}_{re.sub(r'[ /]', '-', way)}"


def recorded(op: str, case: Any, way: str, commit: str | None) -> Any:
    """The timeline of one call of the case on all GPUs, after its result was checked."""
    import checkout
    import jax

    from pk_jax._bench import collective_matmul, fused, fused_bench, harness, records, timeline
    from pk_jax._bench.ops import AXIS

    mesh = jax.make_mesh((jax.device_count(),), (AXIS,))
    kind = collective_matmul.kind_of(op, case)
    ways = kind.ways(case, mesh.size, harness.Method(plans=True))
    ways = {name: each for name, each in ways.items() if each.kind == "pk"}
    if way not in ways:
        sys.exit(f"{case.name} has no way {way!r}; they are {', '.join(ways)}")
    built = fused_bench.Bench(mesh, kind, case, CALLS).build(ways[way])
    kernels = built.config["kernels"]
    if not set(RECORDING) & set(kernels.split(", ")):
        sys.exit(f"{case.name} {way}: nothing is recorded of {kernels}")
    about = records.provenance(commit or checkout.commit()) | {
        "op": op,
        "case": case.name,
        "way": way,
        "kernels": kernels,
        "shape": list(case.shape),
        "dtype": jax.numpy.dtype(fused.DTYPE).name,
    }
    chain, operands = built.program.run, built.program.args
    devices = [device.local_hardware_id for device in mesh.devices.flat]
    recordings, names = timeline.record(lambda: jax.block_until_ready(chain(*operands)), devices)
    return timeline.timeline(recordings, names, about)


def by_name(found: Any) -> list[tuple[str, Any]]:
    """The laps of each thing that was done."""
    return [(name, found.of(name)) for name in found.names if len(found.of(name))]


if __name__ == "__main__":
    sys.exit(main())

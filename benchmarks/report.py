"""Turns the records under benchmarks/results/ into the README's table and the curves.

    python benchmarks/report.py            # README.md and docs/images/all_gather.png
    python benchmarks/report.py --check    # fails if README.md is not what the records say

The table stands between <!-- bench:all_gather --> and <!-- /bench:all_gather -->.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import records

# The sizes of the README's table; the curves show all.
TABLE_IDS = (
    "ag-16K",
    "ag-64K",
    "ag-1M",
    "ag-32M",
    "ag-256M",
    "ag-32M-axis1",
)
SERIES = (
    ("default", "pk (default)", "#1f4e9c", "-", 2.2),
    ("register", "pk register", "#2a9d8f", "--", 1.2),
    ("tma", "pk tma", "#e09f3e", "--", 1.2),
    ("copy_engine", "pk copy engine", "#9b5de5", "--", 1.2),
    ("nccl", "NCCL (jax.lax)", "#c1121f", "-", 2.2),
)


def replace_marked(text: str, name: str, body: str) -> str:
    """`text` with what stands between the markers of `name` replaced.

    Raises:
        ValueError: not exactly one pair of markers, in this order.
    """
    start, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise ValueError(f"the text needs {start} and after it {end}, once each")
    before, rest = text.split(start)
    return f"{before}{start}\n{body.strip()}\n{end}{rest.split(end)[1]}"


def table(rows: Iterable[records.Record]) -> str:
    """The all_gather table of one box in markdown, with what it was measured on below."""
    rows = list(rows)
    lines = [
        "| all_gather, bf16 | ranks | processes | runs as | pk, us | NCCL, us | speed-up "
        "| GB/s received | time / bound |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_table_row(row) for row in rows]
    return "\n".join([*lines, "", *(_footer(rows) if rows else [])])


def _table_row(row: records.Record) -> str:
    shape = "x".join(map(str, row.shape or []))
    axis = row.method.get("axis", 0)
    label = f"{bytes_text(row.method['bytes_per_rank'])} a rank"
    if axis:
        label += f" ({shape}, axis {axis})"
    plan = row.config or {}
    runs_as = plan.get("mechanism") or plan.get("implementation") or ""
    if plan.get("protocol") == "ll":
        runs_as += " (ll)"
    cells = [
        label,
        str(row.ranks),
        str(row.processes),
        runs_as.replace("_", " "),
        number(row.median_us),
        number(row.baselines.get("nccl")),
        f"{row.speedup:.2f}x" if row.speedup else "",
        number(row.gbps),
        f"{row.ratio:.2f}" if row.ratio else "",
    ]
    return f"| {' | '.join(cells)} |"


def _footer(rows: Sequence[records.Record]) -> list[str]:
    newest = max(rows, key=lambda row: row.date or "")
    return [
        f"{newest.ranks}x {newest.gpu}, driver {newest.driver}, CUDA {newest.cuda}, "
        f"jax {newest.jax}, commit {newest.commit}, {(newest.date or '')[:10]}: "
        "`python benchmarks/run.py --op all_gather`. Medians of calls chained inside one jit, "
        "checked bit by bit first, NCCL in the same run. The bound is the received bytes at "
        f"{records.LINK_BYTES_PER_US / 1e3:.0f} GB/s, and below "
        f"{bytes_text(records.LARGE_BYTES)} also the "
        f"{records.EMPTY_CALL_US + records.FLAG_US:.1f} us of an empty captured call and a flag."
    ]


def bytes_text(count: int) -> str:
    """32768 gives '32 KiB'."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << shift:
            return f"{count >> shift} {unit}"
    return f"{count} B"


def number(value: float | None) -> str:
    """Three significant digits, without exponents."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def draw(rows: Sequence[records.Record], path: pathlib.Path) -> None:
    """Received GB/s and time a call over the size, every candidate against NCCL."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = sorted(
        (r for r in rows if r.method.get("axis") == 0), key=lambda r: r.method["bytes_per_rank"]
    )
    figure, (rate, time) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for key, label, color, style, width in SERIES:
        points = [(r.method["bytes_per_rank"], value(r, key), r.ranks) for r in rows]
        points = [(size, us, ranks) for size, us, ranks in points if us is not None]
        if not points:
            continue
        sizes = [size for size, _, _ in points]
        look: dict[str, Any] = {
            "label": label, "color": color, "linestyle": style, "linewidth": width, "marker": ".",
        }  # fmt: skip
        rate.plot(sizes, [(n - 1) * size / us / 1e3 for size, us, n in points], **look)
        time.plot(sizes, [us for _, us, _ in points], **look)
    if rows:
        bound = [(r.method["bytes_per_rank"], r.bound_us) for r in rows if r.bound_us]
        time.plot(*zip(*bound, strict=True), color="0.6", linewidth=1, label="bound")
    sizes = [r.method["bytes_per_rank"] for r in rows]
    for axes, title in ((rate, "GB/s received a rank"), (time, "us a call")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(
            sizes[::2], [bytes_text(size) for size in sizes[::2]], rotation=40, ha="right"
        )
        axes.set_title(title)
        axes.grid(alpha=0.25)
    time.set_yscale("log")
    rate.set_ylim(bottom=0)
    rate.legend(frameon=False, fontsize=9)
    time.legend(frameon=False, fontsize=9)
    if rows:
        head = rows[-1]
        processes = f", {head.processes} processes" if head.processes > 1 else ""
        figure.suptitle(
            f"all_gather, bf16, {head.ranks}x {head.gpu}{processes}, {(head.date or '')[:10]}",
            fontsize=11,
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def value(row: records.Record, key: str) -> float | None:
    """Microseconds of one series at a case."""
    if key == "default":
        return row.median_us
    return row.baselines.get(key) if key == "nccl" else row.candidates.get(key)


def newest_box(results: pathlib.Path, op: str) -> pathlib.Path | None:
    """The file of `op` whose records are the newest of all GPU boxes."""
    files = [f for f in results.glob(f"*/{op}.jsonl") if not f.parent.name.startswith("cpu")]
    return max(files, key=lambda f: max(r.date or "" for r in records.load(f)), default=None)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail on a difference")
    parser.add_argument("--results", type=pathlib.Path, default=records.RESULTS)
    parser.add_argument("--readme", type=pathlib.Path, default=records.ROOT / "README.md")
    parser.add_argument(
        "--image", type=pathlib.Path, default=records.ROOT / "docs" / "images" / "all_gather.png"
    )
    args = parser.parse_args(argv)
    source = newest_box(args.results, "all_gather")
    if source is None:
        print(f"no records of all_gather under {args.results}", file=sys.stderr)
        return 1
    rows = records.load(source)
    by_id = {(row.id, row.processes): row for row in rows}
    chosen = [by_id[key] for key in ((i, p) for i in TABLE_IDS for p in (1, 2)) if key in by_id]
    old = args.readme.read_text()
    new = replace_marked(old, "all_gather", table(chosen))
    if args.check:
        if new != old:
            print(f"{args.readme} differs from {source}: run benchmarks/report.py", file=sys.stderr)
        return int(new != old)
    args.readme.write_text(new)
    draw([row for row in rows if row.processes == 1] or rows, args.image)
    print(f"{source} -> {args.readme}, {args.image}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

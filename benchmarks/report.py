"""Turns the records under benchmarks/results/ into the pages' tables and the picture.

    python benchmarks/report.py            # PAGES and docs/images/collectives.png
    python benchmarks/report.py --check    # fails if the pages are not what the records say

A table stands between <!-- bench:NAME --> and <!-- /bench:NAME -->, where NAME is one of SECTIONS.
A section that a page does not have is left out, as is a row without a record.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence

import checkout
from report_fused import BLOCK, FUSED, blocks, fused, number

from pk_jax._bench import plot, records
from pk_jax._bench.plot import bytes_text, link_bytes, vendor_us
from pk_jax._tuning.collective_cases import COLLECTIVES, PREFIXES, CollectiveCase

PAGES = ("README.md", "docs/benchmarks.md")
PRODUCTS = ("matmul", "ragged_dot")
ATTENTION = ("attention",)
IMAGE = "docs/images/collectives.png"
Rows = dict[tuple[str, int, int], records.Record]


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


def of_case(rows: Rows, name: str) -> list[records.Record]:
    """The records of a case, by ranks and processes."""
    return [row for key, row in sorted(rows.items()) if key[0] == name and row.median_us]


# What has a target, and the same work along another dimension


def collectives(rows: Rows) -> str:
    """A line for each op: what it reaches at the sizes with a target, in one process."""
    lines, used = [], []
    for op in PREFIXES:
        cells = []
        for case in COLLECTIVES:
            # The op without a target is shown at the sizes of the others.
            shown = "target" in case.tags or (op == "ragged_all_to_all" and "quick" in case.tags)
            if case.op != op or not shown:
                continue
            for row in [row for row in of_case(rows, case.name) if row.processes == 1]:
                used.append(row)
                rate = link_bytes(row) / (row.median_us or 1) / 1e3
                small = case.nbytes < records.LARGE_BYTES
                cells.append(
                    f"{bytes_text(case.nbytes)}: "
                    + (f"{number(row.median_us)} us" if small else f"{number(rate)} GB/s")
                    + (f", {row.speedup:.2f}x" if row.speedup else "")
                )
        if cells:
            lines.append(f"| `{op}` | {'; '.join(cells)} |")
    if not lines:
        return ""
    head = ["| op | operand of a rank: what it takes, speed-up over NCCL |", "|---|---|"]
    return "\n".join([*head, *lines, "", footer(used)])


def targets(rows: Rows) -> str:
    """A row for every case with a target that has a record."""
    found = [
        (case, row)
        for case in COLLECTIVES
        if "target" in case.tags
        for row in of_case(rows, case.name)
    ]
    if not found:
        return ""
    lines = [
        "| bf16, operand of a rank | ranks | processes | runs as | pk, us | NCCL, us | speed-up "
        "| GB/s | to reach |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case, row in found:
        cells = [
            f"`{case.op}`, {bytes_text(case.nbytes)}",
            *_common(row),
            number(link_bytes(row) / (row.median_us or 1) / 1e3),
            reach(case, row),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", footer([row for _, row in found])])


def layouts(rows: Rows) -> str:
    """Other dimensions than the leading one: their time over the leading one's."""
    lines = []
    for case in COLLECTIVES:
        if "strided" not in case.tags:
            continue
        for row in of_case(rows, case.name):
            twin = rows.get((case.leading or "", row.ranks, row.processes))
            over = (
                row.median_us / twin.median_us if twin and twin.median_us and row.median_us else 0
            )
            where = f"axis {case.axis}"
            if case.op == "all_to_all":
                where = f"split {case.axis}, concat {case.concat_axis}"
            shape = "x".join(map(str, case.shape))
            cells = [
                f"`{case.op}`, {shape}, {where}",
                *_common(row),
                f"{over:.2f}" if over else "",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    if not lines:
        return ""
    head = [
        "| bf16, operand of a rank | ranks | processes | runs as | pk, us | NCCL, us | speed-up "
        "| time / leading axis |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *lines])


def _common(row: records.Record) -> list[str]:
    return [
        str(row.ranks),
        str(row.processes),
        runs_as(row),
        number(row.median_us),
        number(vendor_us(row)),
        f"{row.speedup:.2f}x" if row.speedup else "",
    ]


def runs_as(row: records.Record) -> str:
    """The mechanism of a record's calls, and the algorithm or protocol that is not the usual."""
    plan = row.config or {}
    text = plan.get("mechanism") or plan.get("implementation") or ""
    notes = ["ll"] if plan.get("protocol") == "ll" else []
    notes += [plan["algorithm"]] if plan.get("algorithm") else []
    return f"{text} ({', '.join(notes)})".replace("_", " ") if notes else text.replace("_", " ")


def reach(case: CollectiveCase, row: records.Record) -> str:
    """A case's target and whether the record meets it."""
    us = row.median_us or float("inf")
    if case.reach_us:
        return f"{number(case.reach_us)} us{'' if us <= case.reach_us else ' (missed)'}"
    wanted = case.reach_gbps or 0.0
    return f"{number(wanted)} GB/s{'' if link_bytes(row) / us / 1e3 >= wanted else ' (missed)'}"


def footer(rows: Sequence[records.Record]) -> str:
    """What the rows were measured on, and how."""
    newest = max(rows, key=lambda row: row.date or "")
    ops: dict[str, list[str]] = {}
    for row in rows:
        if row.op not in ops.setdefault((row.commit or "unknown")[:7], []):
            ops[(row.commit or "unknown")[:7]].append(row.op)
    # One commit needs no list of what it is the commit of.
    commits = "; ".join(
        f"commit {commit}" + (f" ({', '.join(names)})" if len(ops) > 1 else "")
        for commit, names in ops.items()
    )
    return (
        f"{newest.ranks}x {newest.gpu}, driver {newest.driver}, CUDA {newest.cuda}, "
        f"jax {newest.jax}, {commits}, {(newest.date or '')[:10]}: "
        "`python benchmarks/run.py --op collectives`. Medians of calls chained inside one jit, "
        "checked bit by bit first, NCCL (`jax.lax`) in the same run. GB/s are bytes that a rank "
        "receives over the link, for `psum` the bus bandwidth, 2(n-1)/n of the operand."
    )


# Beside a matmul


def mixed(rows: Rows) -> str:
    """Together against alone, for each op of `mixed`."""
    found = [row for _, row in sorted(rows.items()) if row.op == "mixed" and row.median_us]
    if not found:
        return ""
    lines = ["| one step | us | of the longer part alone |", "|---|---|---|"]
    for row in found:
        op = row.id.removeprefix("mixed-")
        alone = f"`{op}` {number(row.link_us)} us, matmul {number(row.compute_us)} us"
        times = {"plain": row.median_us} | row.candidates | row.baselines
        for name, us in times.items():
            if name.endswith("alone"):
                continue
            over = f"{us / row.bound_us:.2f}" if row.bound_us and us else ""
            lines.append(f"| {name.replace('_', ' ')} ({alone}) | {number(us)} | {over} |")
    return "\n".join(lines)


# Matrix products


def products(rows: Rows) -> str:
    """A row for every product, against XLA's, with how much faster they are in the mean."""
    found = [row for row in rows.values() if row.op in PRODUCTS and row.median_us]
    if not found:
        return ""
    lines = [
        "| product | plan | pk, us | TFLOP/s | XLA, us | speed-up |",
        "|---|---|---|---|---|---|",
    ]
    for row in found:
        plan = (row.config or {}).get("plan", "")
        speedup = f"{row.speedup:.2f}x" if row.speedup else ""
        cells = (row.id, plan, number(row.median_us), number(row.tflops), number(vendor_us(row)))
        lines.append(f"| {' | '.join((*cells, speedup))} |")
    speedups = [row.speedup for row in found if row.speedup]
    newest = max(found, key=lambda row: row.date or "")
    commits = ", ".join(sorted({(row.commit or "unknown")[:7] for row in found}))
    mean = f" Geometric mean {statistics.geometric_mean(speedups):.3f}x." if speedups else ""
    return "\n".join(
        [
            *lines,
            "",
            f"{newest.gpu}, driver {newest.driver}, CUDA {newest.cuda}, jax {newest.jax}, commit "
            f"{commits}, {(newest.date or '')[:10]}: `python benchmarks/run.py --op matmul` and "
            f"`--op ragged_dot`. Medians, random bfloat16, XLA in the same run.{mean}",
        ]
    )


def attention(rows: Rows) -> str:
    """A row for every shape of attention, against cuDNN's and XLA's own."""
    found = [row for row in rows.values() if row.op in ATTENTION and row.median_us]
    if not found:
        return ""
    lines = [
        "| attention | pk, us | TFLOP/s | cuDNN, us | XLA, us | speed-up over cuDNN |",
        "|---|---|---|---|---|---|",
    ]
    for row in found:
        speedup = f"{row.speedup:.2f}x" if row.speedup else ""
        others = (number(row.baselines.get(name)) for name in ("cudnn", "xla"))
        cells = (row.id, number(row.median_us), number(row.tflops), *others)
        lines.append(f"| {' | '.join((*cells, speedup))} |")
    newest = max(found, key=lambda row: row.date or "")
    commits = ", ".join(sorted({(row.commit or "unknown")[:7] for row in found}))
    about = (
        f"{newest.gpu}, driver {newest.driver}, CUDA {newest.cuda}, jax {newest.jax}, commit "
        f"{commits}, {(newest.date or '')[:10]}: `python benchmarks/run.py --op attention`. "
        "Medians, random bfloat16, all in one run. TFLOP/s of the products that are needed, half "
        "of them under a causal mask."
    )
    return "\n".join([*lines, "", about])


SECTIONS: dict[str, Callable[[Rows], str]] = {
    "collectives": collectives,
    "targets": targets,
    "layouts": layouts,
    "mixed": mixed,
    "products": products,
    "attention": attention,
    "fused": fused,
    "blocks": blocks,
}


def newest_box(results: pathlib.Path, ops: Iterable[str]) -> pathlib.Path | None:
    """The folder of the GPU box with the newest record of one of the ops."""

    def newest(box: pathlib.Path) -> str:
        rows = [r for op in ops for r in records.load(box / f"{op}.jsonl")]
        return max((r.date or "" for r in rows), default="")

    boxes = [b for b in results.glob("*") if b.is_dir() and not b.name.startswith("cpu")]
    found = max(boxes, key=newest, default=None)
    return found if found is not None and newest(found) else None


def rows_of(box: pathlib.Path | None, ops: Iterable[str]) -> Rows:
    """All records of some ops of a box, by case, ranks and processes."""
    found = (row for op in ops for row in (records.load(box / f"{op}.jsonl") if box else ()))
    return {row.key: row for row in found}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail on a difference")
    parser.add_argument("--results", type=pathlib.Path, default=checkout.RESULTS)
    parser.add_argument("--root", type=pathlib.Path, default=checkout.ROOT, help="of the pages")
    args = parser.parse_args(argv)
    box = newest_box(args.results, PREFIXES)
    if box is None:
        print(f"no records of collectives under {args.results}", file=sys.stderr)
        return 1
    rows = rows_of(box, (*PREFIXES, "mixed"))
    shown = dict(rows)
    for ops in (PRODUCTS, ATTENTION, (*FUSED, BLOCK)):
        shown |= rows_of(newest_box(args.results, ops), ops)
    differ = False
    for page in [args.root / name for name in PAGES]:
        old = new = page.read_text()
        for name, section in SECTIONS.items():
            if f"bench:{name} -->" in old:
                new = replace_marked(new, name, section(shown))
        if not args.check:
            page.write_text(new)
        elif new != old:
            differ = True
            print(f"{page} differs from {box}: run benchmarks/report.py", file=sys.stderr)
    if args.check:
        return int(differ)
    single = [row for row in rows.values() if row.processes == 1]
    plot.draw(single or list(rows.values()), args.root / IMAGE)
    print(f"{box} -> {', '.join(PAGES)}, {IMAGE} of {args.root}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

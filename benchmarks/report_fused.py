"""The tables of products with a collective, and of blocks of a network: a part of report.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pk_jax._bench import records
from pk_jax._bench.fused import best_baseline

FUSED = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
BLOCK = "tensor_parallel_mlp"
# What does a whole product with a collective, in the order of the table.
BASELINES = {
    "xla": "XLA",
    "xla_hiding": "XLA, hiding",
    "xla_windowed": "XLA, windowed",
    "ring": "ring",
    "pallas": "Pallas",
}
Rows = Mapping[Any, records.Record]


def number(value: float | None) -> str:
    """Three significant digits, without exponents."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def fused(rows: Rows) -> str:
    """A row for every product with a collective, against its bound and every baseline."""
    found = [row for op in FUSED for row in rows.values() if row.op == op and row.median_us]
    if not found:
        return ""
    baselines = baselines_of(found)
    head = ["case", "op", "runs as", "pk, us", "product alone", "link alone", "over the larger"]
    head += [*(BASELINES[name] for name in baselines), over_what(baselines)]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in found:
        cells = [
            row.id,
            f"`{row.op}`",
            runs_fused(row),
            *map(number, (row.median_us, row.compute_us, row.link_us)),
            f"{row.ratio:.2f}" if row.ratio else "",
            *(number(row.baselines.get(name)) for name in baselines),
            over_fastest(row),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", made_by(found, "collective_matmul")])


def blocks(rows: Rows) -> str:
    """A row for every block of a network, with the memory that pk's takes beyond XLA's."""
    found = [row for row in rows.values() if row.op == BLOCK and row.median_us]
    if not found:
        return "Not measured yet."
    baselines = baselines_of(found)
    head = ["case", "runs as", "pk, us", "arithmetic alone", "link alone", "over the larger"]
    head += [*(BASELINES[name] for name in baselines), over_what(baselines)]
    head += ["memory beyond XLA's, MB"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in found:
        cells = [
            row.id,
            runs_fused(row),
            *map(number, (row.median_us, row.compute_us, row.link_us)),
            f"{row.ratio:.2f}" if row.ratio else "",
            *(number(row.baselines.get(name)) for name in baselines),
            over_fastest(row),
            f"{row.extra_bytes / 1e6:.0f}" if row.extra_bytes is not None else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", made_by(found, BLOCK)])


def runs_fused(row: records.Record) -> str:
    """The kernels of a call, and the plan of one that is alone."""
    plan = dict(row.config or {})
    kernels = plan.pop("kernels", None)
    plan.pop("num_blocks", None)
    names = {row.op: "one kernel", f"{row.op}_few_rows": "kernel for few rows"}
    kernels = names.get(kernels, kernels)
    return ", ".join([*([kernels] if kernels else []), *(f"{k} {v}" for k, v in plan.items())])


def baselines_of(rows: Iterable[records.Record]) -> list[str]:
    """What any of the records has of what does a whole product, in the order of the table."""
    found = {name for row in rows for name in row.baselines}
    return [name for name in BASELINES if name in found]


def over_what(baselines: Sequence[str]) -> str:
    """The head of the column that `over_fastest` fills."""
    return f"speed-up over {BASELINES[baselines[0]] if len(baselines) == 1 else 'the fastest'}"


def over_fastest(row: records.Record) -> str:
    """The speed-up over the fastest baseline that does the whole work."""
    best = best_baseline(row)
    if best is None or not row.median_us:
        return ""
    return f"{row.baselines[best] / row.median_us:.2f}x"


def made_by(rows: Sequence[records.Record], op: str) -> str:
    """What products with a collective were measured on, and how."""
    newest = max(rows, key=lambda row: row.date or "")
    commits = ", ".join(sorted({(row.commit or "unknown")[:7] for row in rows}))
    baselines = "; ".join(BASELINES[name] for name in baselines_of(rows)) or "none"
    return (
        f"{newest.ranks}x {newest.gpu}, driver {newest.driver}, CUDA {newest.cuda}, jax "
        f"{newest.jax}, commit {commits}, {(newest.date or '')[:10]}: `python benchmarks/run.py "
        f"--op {op}`. Medians, random bfloat16; baselines, each in the run of its row: {baselines}."
    )

"""Small multiples of the collectives' sweeps: a panel for each op, GB/s over size, pk and NCCL."""

import pathlib
from collections.abc import Sequence

from pk_jax._bench.records import LINK_BYTES_PER_US, Record
from pk_jax._tuning.collective_cases import PREFIXES

COLOURS = {"pk": "#1f4e9c", "lax": "#c1121f"}


def sweeps(rows: Sequence[Record]) -> dict[str, list[Record]]:
    """The measured rows along the leading dimension, by op, sizes rising."""
    found = {}
    for op in PREFIXES:
        mine = [
            r
            for r in rows
            if r.op == op
            and r.median_us is not None
            and not r.method.get("axis")
            and not r.method.get("concat_axis")
        ]
        if mine:
            found[op] = sorted(mine, key=lambda r: r.method["bytes_per_rank"])
    return found


def link_bytes(row: Record) -> float:
    """Bytes a rank receives in a call."""
    found = row.method.get("link_bytes")
    return found if found is not None else (row.ranks - 1) * row.method["bytes_per_rank"]


def vendor_us(row: Record) -> float | None:
    """The best time of jax.lax for the same work."""
    times = [us for name, us in row.baselines.items() if not name.endswith("+elementwise")]
    return min(times, default=None)


def draw(rows: Sequence[Record], path: pathlib.Path) -> None:
    """Draws the sweeps of one machine into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = sweeps(rows)
    columns = min(3, max(1, len(panels)))
    lines = max(1, -(-len(panels) // columns))
    figure, grid = plt.subplots(
        lines,
        columns,
        figsize=(4.1 * columns, 3.0 * lines),
        layout="constrained",
        squeeze=False,
        sharey=True,
    )
    for axes, (op, mine) in zip(grid.flat, panels.items(), strict=False):
        for label, times in (
            ("lax", [vendor_us(r) for r in mine]),
            ("pk", [r.median_us for r in mine]),
        ):
            points = [
                (r.method["bytes_per_rank"], link_bytes(r) / us / 1e3)
                for r, us in zip(mine, times, strict=True)
                if us
            ]
            if points:
                name = "pk_jax" if label == "pk" else "jax.lax"
                axes.plot(*zip(*points, strict=True), ".-", color=COLOURS[label], label=name)
        axes.axhline(LINK_BYTES_PER_US / 1e3, color="0.6", lw=1, ls=":")
        sizes = [r.method["bytes_per_rank"] for r in mine]
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes[::3], [bytes_text(s) for s in sizes[::3]], fontsize=8)
        axes.set_yscale("log")
        axes.set_title(op, fontsize=10)
        axes.set_xlabel("operand of a rank", fontsize=8)
        axes.grid(alpha=0.25)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_visible(False)
    for row in grid:
        row[0].set_ylabel("GB/s received a rank")
    if panels:
        grid.flat[0].legend(frameon=False, fontsize=9)
        head = next(iter(panels.values()))[-1]
        figure.suptitle(
            f"{head.ranks}x {head.gpu}, {head.dtype}, {(head.date or '')[:10]}", fontsize=10
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def bytes_text(count: int) -> str:
    """32768 gives '32 KiB'."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << shift:
            return f"{count >> shift} {unit}"
    return f"{count} B"

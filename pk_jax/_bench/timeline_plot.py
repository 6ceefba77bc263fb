"""A picture of a timeline: some SMs of each GPU, and below them the link and the tensor cores."""

import pathlib
from typing import Any

import numpy as np

from pk_jax._bench import timeline
from pk_jax._bench.plot import COLOURS as TEAMS
from pk_jax._bench.records import LINK_BYTES_PER_US

# Work is dark or bright, waiting pale red, the rest grey. What is not here is not drawn.
COLOURS = {
    "multiply": TEAMS["pk"],
    "add": "#e08e0b",
    "epilogue": "#8fb0e0",
    "push": "#2a8f5b",
    "send": "#2a8f5b",
    "store": "#9ccfb4",
    "copy own": "#9ccfb4",
    "load": "#d5dae3",
    "enter": "#a0a0a0",
    "wait for operands": "#f3b9b5",
    "wait for rows": "#f3b9b5",
    "wait for flags": "#fbdfdd",
    "wait for parts": "#e4716a",
}
# Heights of a warp in its SM's lane: what is not here has one.
HEIGHTS = {"consumer": 3.0}
# Drawn with a line between one lap and the next.
FOLLOWS_ITSELF = ("multiply", "push", "send", "store")
# Nobody could tell laps apart that are shorter than a pixel or so: bins of the curves.
BINS = 150


def draw(
    found: timeline.Timeline,
    path: pathlib.Path,
    num_compute: int = 8,
    num_movers: int = 2,
) -> None:
    """Draws a timeline into a PNG.

    Args:
        found: what happened.
        path: of the picture.
        num_compute: SMs that multiply, of each GPU, spread over those that there are.
        num_movers: SMs that move data alone, likewise.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    ranks = found.about["ranks"]
    lanes = [lanes_of(found, rank, num_compute, num_movers) for rank in range(ranks)]
    heights = [max(1.0, 0.34 * len(mine)) for mine in lanes]
    figure, axes = plt.subplots(
        ranks + 2,
        figsize=(13, sum(heights) + 4.0),
        height_ratios=[*heights, 1.3, 1.3],
        layout="constrained",
        sharex=True,
        squeeze=False,
    )
    axes = axes[:, 0]
    shown: set[str] = set()
    for rank, mine in enumerate(lanes):
        shown |= _draw_lanes(axes[rank], found, mine)
        axes[rank].set_ylabel(f"GPU {rank}")
    edges = np.linspace(0.0, max(found.about["us"], 1e-3), BINS + 1)
    _draw_curves(axes[-2], axes[-1], found, edges)
    order = [name for name in COLOURS if name in shown]
    handles = [Patch(color=COLOURS[name], label=name) for name in order]
    if handles:
        figure.legend(
            handles=handles, loc="outside lower center", ncols=8, frameon=False, fontsize=8
        )
    figure.suptitle(title(found.about), fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def title(about: dict[str, Any]) -> str:
    """Two lines: what ran and how long, and how far to trust it."""
    what = [about.get("op"), about.get("case"), _sizes(about.get("shape")), about.get("dtype")]
    first = " ".join(str(word) for word in what if word)
    if about.get("way"):
        first += f" ({about['way']})"
    gpu = f"{about['ranks']}x {about['gpu']}" if about.get("gpu") else f"{about['ranks']} GPUs"
    notes = [
        f"one call of a chain, recorded; clocks of the GPUs within {about['clock_error_ns']} ns",
        f"steps of {about['resolution_ns']} ns",
        (about.get("date") or "")[:10],
    ]
    if "," in (about.get("kernels") or ""):
        notes.append(f"the last that records of {about['kernels']}")
    if about["events_dropped"] or about["blocks_dropped"]:
        notes.append(f"DROPPED: {about['events_dropped']} events, {about['blocks_dropped']} blocks")
    return f"{first}: {about['us']:.0f} us, {gpu}\n{', '.join(note for note in notes if note)}"


def _sizes(shape: Any) -> str | None:
    return "x".join(map(str, shape)) if shape else None


def lanes_of(
    found: timeline.Timeline, rank: int, num_compute: int, num_movers: int
) -> list[tuple[str, np.ndarray]]:
    """The SMs to draw of a rank, from the bottom up: a label, and the laps."""
    mine = found.laps[found.laps["rank"] == rank]
    multiply = found.names.index("multiply")
    computing = np.unique(mine["block"][mine["did"] == multiply])
    moving = np.setdiff1d(np.unique(mine["block"]), computing)
    lanes = []
    for blocks, count, label in ((moving, num_movers, "mover "), (computing, num_compute, "")):
        for block in spread(blocks, count):
            laps = mine[mine["block"] == block]
            lanes.append((f"{label}SM {laps['sm'][0]}", laps))
    return lanes


def spread(blocks: np.ndarray, count: int) -> np.ndarray:
    """`count` of them, or all if there are fewer, from the first to the last."""
    count = min(count, len(blocks))
    return blocks[np.linspace(0, len(blocks) - 1, count).round().astype(int)]


def _draw_lanes(
    axes: Any, found: timeline.Timeline, lanes: list[tuple[str, np.ndarray]]
) -> set[str]:
    """Draws the lanes, each one a bar for each warp; returns what can be seen in them."""
    shown: set[str] = set()
    for at, (_, laps) in enumerate(lanes):
        warps = np.unique(laps["warp"])
        mine = [laps[laps["warp"] == warp] for warp in warps]
        sizes = [HEIGHTS.get(timeline.role(found.names_in(its)), 1.0) for its in mine]
        scale = 0.86 / sum(sizes)
        top = at + 0.93
        for its, size in zip(mine, sizes, strict=True):
            top -= size * scale
            for name in found.names_in(its):
                if name not in COLOURS:
                    continue
                shown.add(name)
                done = its[its["did"] == found.names.index(name)]
                spans = np.stack([done["begin"], done["end"] - done["begin"]], 1)
                axes.broken_barh(
                    spans,
                    (top, size * scale * 0.94),
                    facecolors=COLOURS[name],
                    edgecolors="white",
                    linewidth=0.3 if name in FOLLOWS_ITSELF else 0.0,
                )
    axes.set_yticks(np.arange(len(lanes)) + 0.5, [label for label, _ in lanes], fontsize=7)
    axes.set_ylim(0, max(1, len(lanes)))
    axes.tick_params(left=False)
    axes.grid(axis="x", alpha=0.25)
    return shown


def _draw_curves(link: Any, cores: Any, found: timeline.Timeline, edges: np.ndarray) -> None:
    """Draws what each GPU sends, and the share of its SMs that multiply."""
    middles = (edges[1:] + edges[:-1]) / 2
    width = edges[1] - edges[0]
    multiplied = found.of("multiply")
    for rank in range(found.about["ranks"]):
        mine = found.laps[found.laps["rank"] == rank]
        rate = timeline.sent(mine, edges) / width / 1e3
        link.plot(middles, rate, lw=1.2, label=f"GPU {rank} sends")
        blocks = max(1, len(np.unique(mine["block"])))
        share = timeline.busy(multiplied[multiplied["rank"] == rank], edges) / width / blocks
        cores.plot(middles, 100 * share, lw=1.2)
    link.axhline(LINK_BYTES_PER_US / 1e3, color="0.6", lw=1, ls=":")
    link.set_ylabel("GB/s", fontsize=8)
    cores.set_ylabel("% of blocks\nthat multiply", fontsize=8)
    cores.set_xlabel("us")
    cores.set_ylim(0, 105)
    for axes in (link, cores):
        axes.set_xlim(edges[0], edges[-1])
        axes.grid(alpha=0.25)
    link.legend(frameon=False, fontsize=8, loc="center right")

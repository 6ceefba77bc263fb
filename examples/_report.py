"""What train_lm.py shows: a progress bar while it runs, and a chart afterwards."""

import sys
import time


class Progress:
    """A bar that redraws itself in a terminal; elsewhere a line every tenth of the way."""

    def __init__(self, label, total, stream=None):
        self.label, self.total = label, total
        self.stream = stream or sys.stdout
        self.redraws = self.stream.isatty()
        self.start = time.perf_counter()
        self.shown = 0

    def show(self, done, loss):
        if self.redraws:
            left = (time.perf_counter() - self.start) * (self.total / done - 1)
            bar = ("=" * (30 * done // self.total)).ljust(30)
            line = (
                f"{self.label:10} [{bar}] {done}/{self.total}  {loss:.3f} bits  {left:.0f} s left"
            )
            self.stream.write(f"\r{line}\033[K")
            self.stream.flush()
        elif done * 10 // self.total > self.shown * 10 // self.total:
            line = f"{self.label:10} step {done}/{self.total}  {loss:.3f} bits per byte"
            print(line, file=self.stream, flush=True)
        self.shown = done

    def finish(self, summary):
        start = "\r\033[K" if self.redraws else ""
        print(f"{start}{self.label:10} {summary}", file=self.stream, flush=True)


def save_chart(path, runs, byte_frequency_bits):
    """Draws losses over steps. `runs` maps the names of two runs to their train_lm.Run."""
    try:
        import matplotlib
    except ImportError:
        print("chart      not drawn: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.8), dpi=150, layout="constrained")
    # Runs that agree lie on top of each other: the first is wide and pale, the second thin.
    for (name, run), (colour, width) in zip(
        runs.items(), (("#9ecae1", 5.0), ("#08519c", 1.1)), strict=True
    ):
        steps = range(1, len(run.losses) + 1)
        axes.plot(steps, run.losses, color=colour, lw=width, label=f"training, {name}")
    for (name, run), (colour, marker, size) in zip(
        runs.items(), (("#fdae6b", "o", 10), ("#a63603", "x", 6)), strict=True
    ):
        points = list(run.held_out), list(run.held_out.values())
        label = f"held-out files, {name}"
        axes.plot(*points, marker, color=colour, ms=size, mew=1.6, label=label)
        steps, bits = points
    beside = {"textcoords": "offset points", "ha": "right"}
    axes.axhline(byte_frequency_bits, color="0.35", lw=1.2, ls="--")
    text = f"byte frequencies alone: {byte_frequency_bits:.2f}"
    axes.annotate(text, (steps[-1], byte_frequency_bits), (0, 5), color="0.35", **beside)
    axes.annotate(f"{bits[-1]:.2f}", (steps[-1], bits[-1]), (6, -18), color="#a63603", **beside)
    axes.set_title("A byte-level language model of Python's standard library", loc="left")
    axes.set(xlabel="training step", ylabel="loss in bits per byte")
    axes.set(xlim=(0, steps[-1] * 1.02), ylim=(0, None))
    axes.grid(axis="y", color="0.92")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
    print(f"chart      {path}")

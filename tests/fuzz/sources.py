"""The two ways to drive the runner."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import generate, runner
from .cases import Program
from .draws import HypothesisDraw, RandomDraw
from .generate import Machine
from .runner import Report

CASES_PER_PROGRAM = 8


def machine_of(devices: Any) -> Machine:
    """What to draw for these devices: on GPUs also operands that cross the protocols' limits."""
    if devices[0].platform == "cpu":
        return Machine(num_devices=len(devices))
    return Machine(
        num_devices=len(devices),
        long=(1025, 257, 128, 16384, 40_000, 200_000, 600_000),
        limit=1 << 20,
        mechanisms=(None, None, "register", "tma", "copy_engine"),
    )


def random_programs(cases: int, seed: int, machine: Machine, size: int) -> Iterator[Program]:
    for number in range(-(-cases // size)):
        count = min(size, cases - number * size)
        yield generate.program(RandomDraw(f"{seed} {number}"), machine, count)


def run_random(
    cases: int,
    seed: int,
    devices: Any,
    *,
    threads: int | None = None,
    size: int = CASES_PER_PROGRAM,
    strict: bool = False,
    progress: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Compares programs drawn by `random`."""
    return runner.check_many(
        random_programs(cases, seed, machine_of(devices), size),
        devices,
        threads=threads or max(1, min(16, (os.cpu_count() or 1) // 2)),
        strict=strict,
        progress=progress,
    )


def run_hypothesis(
    cases: int,
    seed: int | None,
    devices: Any,
    *,
    size: int = CASES_PER_PROGRAM,
    shrink: bool = True,
    progress: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Compares programs drawn by hypothesis, which shrinks the first that fails.

    Args:
        cases: how many, rounded up to whole programs.
        seed: None draws the same programs in every run.
        devices: the mesh is made of these.
        size: cases of a program.
        shrink: whether to look for a simpler program that fails, which takes minutes.
        progress: called after each program.

    Raises:
        AssertionError: a difference, with what reproduces it.
    """
    import hypothesis
    import hypothesis.configuration
    from hypothesis import strategies as st

    # Not a folder in the checkout for what it remembers of the sources.
    hypothesis.configuration.set_hypothesis_home_dir(Path(tempfile.gettempdir()) / "hypothesis")

    machine, total = machine_of(devices), Report()
    phases = [hypothesis.Phase.generate, *([hypothesis.Phase.shrink] if shrink else [])]

    @st.composite
    def programs(draw):
        return generate.program(HypothesisDraw(draw), machine, size)

    @hypothesis.settings(
        max_examples=-(-cases // size),
        derandomize=seed is None,
        deadline=None,
        database=None,
        phases=phases,
        suppress_health_check=list(hypothesis.HealthCheck),
        report_multiple_bugs=False,
    )
    @hypothesis.given(programs())
    def compare(program):
        report = runner.check(program, devices)
        total.add(report)
        progress(total)
        assert not report.differences, "\n".join(map(str, report.differences))

    test = compare if seed is None else hypothesis.seed(seed)(compare)
    test()
    return total

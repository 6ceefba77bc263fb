"""Runs programs on both sides and collects the differences."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax import lax

import pk_jax as pk

from . import compare, known
from .build import Side, lowered
from .cases import OPS, Program
from .operands import operands
from .transforms import UNROLLED

HANGS_AFTER_S = 60.0

# Programs of several ranks must not be started in different orders on different devices.
_devices_in_use = threading.Lock()


@dataclasses.dataclass
class Difference:
    """A case that pk_jax and lax do not do alike, and what reproduces it."""

    program: Program
    text: str

    def __str__(self) -> str:
        return f"{self.text}\n  reproduce: python -m fuzz --program {str(self.program)!r}"


@dataclasses.dataclass
class Report:
    """What came of some programs.

    Attributes:
        differences: what is wrong.
        counts: cases, by op and by what was compared: "errors", "types" or "results"; "known" are
            differences with a reason.
        calls: custom calls of pk_jax that were compiled, by op.
    """

    differences: list[Difference] = dataclasses.field(default_factory=list)
    counts: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    calls: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    @property
    def num_cases(self) -> int:
        return sum(self.counts[op] for op in OPS)

    def add(self, other: "Report") -> None:
        self.differences += other.differences
        self.counts += other.counts
        self.calls += other.calls


def check(program: Program, devices: Any, *, strict: bool = False) -> Report:
    """Compares all cases of a program.

    A case that differs is run again alone; if it does not differ then, all cases of its program are
    what reproduces it.

    Args:
        program: the cases.
        devices: the mesh is made of these.
        strict: hold sums of 16-bit floats to what the kernels promise.
    """
    with _watched(program):
        report, wrong = _compare(program, devices, strict)
    for i, text in wrong.items():
        alone = program.only(i)
        if len(program.cases) > 1 and not _compare(alone, devices, strict)[1]:
            report.differences.append(Difference(program, f"case {i}, not alone: {text}"))
        else:
            report.differences.append(Difference(alone, text))
    return report


def check_many(
    programs: Iterator[Program],
    devices: Any,
    *,
    threads: int,
    strict: bool = False,
    progress: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Compares programs, several being compiled at a time."""
    total = Report()
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        pending = set()
        for program in programs:
            pending.add(pool.submit(check, program, devices, strict=strict))
            if len(pending) >= 2 * threads:
                done, pending = concurrent.futures.wait(
                    pending, return_when=concurrent.futures.FIRST_COMPLETED
                )
                for future in done:
                    total.add(future.result())
                progress(total)
        for future in pending:
            total.add(future.result())
            progress(total)
    return total


def _compare(program: Program, devices: Any, strict: bool) -> tuple[Report, dict[int, str]]:
    report, wrong = Report(), {}
    with jax.enable_x64(program.x64), _quiet():
        arrays = [operands(program, case) for case in program.cases]
        theirs = _side(program, lax, devices, arrays)
        ours = _side(program, pk, devices, arrays)
        mapped = {i: _without_map(program, devices, arrays, theirs, i) for i in ours.results}
    for op, count in ours.calls.items():
        report.calls[op] += count
    for i, case in enumerate(program.cases):
        text, what = _judge(program, arrays, theirs, ours, i, strict, mapped.get(i))
        report.counts[case.op] += 1
        report.counts[what] += 1
        if text is not None:
            wrong[i] = f"{case.op}, {case.transform}: {text}"
    return report, wrong


def _judge(
    program: Program, arrays: Any, theirs: Side, ours: Side, i: int, strict: bool, mapped: Any
) -> tuple[str | None, str]:
    """What is wrong with case i, and what was compared.

    Values are compared also where errors or types differ for a known reason: with the model's, or
    with `mapped`, what lax gives without the map that it does not know or gets wrong.
    """
    case = program.cases[i]
    text = compare.errors_differ(theirs.errors.get(i), ours.errors.get(i))
    what = "errors"
    if text is None and i not in theirs.errors and i not in ours.errors:
        text = compare.types_differ(theirs.types.get(i), ours.types.get(i))
        what = "types"
    if text is not None:
        if not known.reason(program, case, theirs, ours, i):
            return text, what
        what = "known"
    if i not in ours.results or known.other_values(case):
        return None, what
    expected = theirs.results.get(i) if mapped is None else mapped
    wrong = compare.results_differ(program, case, arrays[i], expected, ours.results[i], strict)
    return wrong, "results" if text is None or wrong else what


def _without_map(
    program: Program, devices: Any, arrays: Any, theirs: Side, i: int
) -> list[np.ndarray] | None:
    """What lax gives of a call for each element, for a case that it does not map, or wrongly."""
    case = program.cases[i]
    wrong = known.misplaces(case)
    if case.transform not in UNROLLED or (i not in theirs.errors and not wrong):
        return None
    if not case.run or known.cannot(case, lax):
        return None
    case = dataclasses.replace(case, transform=UNROLLED[case.transform])
    alone = dataclasses.replace(program, cases=[case])
    return _side(alone, lax, devices, [arrays[i]]).results.get(0)


def _side(program: Program, module: Any, devices: Any, arrays: Any) -> Side:
    side = Side()
    numbers = set(range(len(program.cases)))
    unable = {
        i for i in numbers if not program.cases[i].run or known.cannot(program.cases[i], module)
    }
    low = lowered(program, module, devices, arrays, side, run_not=unable)
    if low is None:
        return side
    if module is pk:
        text = low.as_text()
        side.calls = {op: text.count(f"@pk_jax_{op}(") for op in pk_ops(text)}
    try:
        results = _run(low, arrays)
    except jax.errors.JaxRuntimeError as error:
        left = sorted(numbers - unable - set(side.errors))
        if len(left) == 1:
            side.errors[left[0]] = error
            side.types.pop(left[0])
            return side
        for i in left:
            alone = _side(program.only(i), module, devices, [arrays[i]])
            if alone.errors:
                side.errors[i] = alone.errors[0]
                side.types.pop(i)
            else:
                side.results[i] = alone.results[0]
        return side
    side.results = {i: [np.asarray(y) for y in ys] for i, ys in results.items()}
    return side


def pk_ops(text: str) -> set[str]:
    """Ops whose custom calls a lowered program holds."""
    parts = text.split("@pk_jax_")[1:]
    return {part.split("(", 1)[0] for part in parts}


def _run(low: Any, arrays: Any) -> Any:
    compiled = low.compile()
    with _devices_in_use:
        return jax.block_until_ready(compiled(arrays))


@contextlib.contextmanager
def _watched(program: Program):
    """Prints a program that hangs, since nothing will be reported of it."""
    timer = threading.Timer(
        HANGS_AFTER_S, lambda: print(f"still running: --program {str(program)!r}", flush=True)
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def _quiet():
    """Leaves out warnings about what is drawn: casts of complex gradients, narrowed types."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

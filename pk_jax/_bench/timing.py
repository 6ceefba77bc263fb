"""Chains of calls inside one jit, the proof that nothing else was compiled, and the timer.

A small collective costs less than a launch from Python, so calls are timed in a chain inside one
jit. all_gather's result is larger than its operand and cannot be the next operand without a slice,
which would be a second kernel. So every call takes its operand through an optimization barrier
together with the two results before it:

    y0 = f(x0)
    x1, _ = barrier(x1, y0);        y1 = f(x1)
    x2, _, _ = barrier(x2, y0, y1); y2 = f(x2) ...

The barrier costs no kernel, keeps the order, and makes each operand a value of its own, so that no
call is merged, combined or hoisted. XLA drops an element of a barrier that nobody reads if the
barrier is its only reader; a result that goes into two barriers has two readers and stays. At most
three results are alive, so their buffers are reused as in a real program.

XLA's GPU compiler removes the barriers after it has scheduled the calls, which stay. Its CPU
compiler removes them before its last dead-code pass, so there a chain returns all results
(`keep_all`). `check_calls` reads the compiled program and refuses to go on if the number of calls
is not the asked one, or if anything else in it would launch a kernel.
"""

import collections
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

# Instructions that launch nothing on a GPU.
FREE = frozenset(
    (
        "parameter",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "opt-barrier",
        "call",
        "constant",
        "async",
    )
)
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?[\w.\-]+ = (?:\(.*?\)|\S+) ([\w\-]+)\((.*)$", re.MULTILINE
)
_TARGET = re.compile(r'custom_call_target="([^"]+)"')


def chain(
    call: Callable[[Any], Any], num_calls: int, operands: Sequence[Any], keep_all: bool = False
) -> Any:
    """`num_calls` calls in order on the operands in turn; the last result, or a tuple of all."""
    results: list[Any] = []
    for i in range(num_calls):
        operand, *_ = lax.optimization_barrier((operands[i % len(operands)], *results[-2:]))
        results.append(call(operand))
    if keep_all:
        return tuple(results)
    return lax.optimization_barrier(tuple(results[-2:]))[-1]


def dependent_chain(
    call: Callable[[Any], Any], num_calls: int, operand: Any, step: Callable[[Any], Any]
) -> Any:
    """`num_calls` calls; operand i + 1 is `step(result i)`, an elementwise kernel between calls."""
    result = call(operand)
    for _ in range(num_calls - 1):
        result = call(step(result))
    return result


def count_instructions(text: str) -> collections.Counter[str]:
    """Instructions by opcode; a custom call counts as its target, an async pair once."""
    counts: collections.Counter[str] = collections.Counter()
    for opcode, rest in _INSTRUCTION.findall(text):
        if opcode == "custom-call":
            target = _TARGET.search(rest)
            opcode = target.group(1) if target else opcode
        if opcode.endswith("-done"):
            continue
        counts[opcode.removesuffix("-start")] += 1
    return counts


def carried_chain(
    call: Callable[[Any, Any], Any], num_calls: int, operands: Sequence[Any], start: Any
) -> Any:
    """`num_calls` calls, each writing into the result before it: the order needs no barrier.

    `start` is to be donated, or the first call copies it.
    """
    result = start
    for i in range(num_calls):
        result = call(operands[i % len(operands)], result)
    return result


class Carried:
    """A compiled carried chain: every run writes into what the run before left."""

    def __init__(self, compiled: Callable[..., Any], start: Any):
        self.compiled, self.result = compiled, start

    def __call__(self, *operands: Any) -> Any:
        self.result = self.compiled(*operands, self.result)
        return self.result


class ChainError(RuntimeError):
    """The compiled program is not the chain that was meant to be timed."""


def check_calls(
    text: str, target: str, num_calls: int, allowed: frozenset[str] | None = frozenset()
) -> None:
    """Raises ChainError unless `text` holds `num_calls` of `target` and nothing else that runs.

    `allowed` opcodes are accepted too; None accepts all (a baseline between transposes, say).
    """
    counts = count_instructions(text)
    if counts[target] != num_calls:
        raise ChainError(
            f"the compiled chain holds {counts[target]} {target}, not {num_calls}: {dict(counts)}"
        )
    if allowed is not None:
        others = {k: v for k, v in other_kernels(text, target).items() if k not in allowed}
        if others:
            raise ChainError(f"the compiled chain of {target} holds other kernels: {others}")


def other_kernels(text: str, target: str) -> dict[str, int]:
    """Instructions of `text` that run, beside `target`, by opcode."""
    counts = count_instructions(text)
    return {opcode: k for opcode, k in counts.items() if opcode not in FREE | {target}}


class Timing(NamedTuple):
    """Microseconds a call."""

    median: float
    p10: float
    p90: float
    cpu: float  # processor time of this process, all threads
    samples: int = 0


class Program(NamedTuple):
    """A compiled chain with its arguments, and how long one of its calls is expected to take."""

    run: Callable[..., Any]
    args: Sequence[Any]
    num_calls: int
    expected_us: float = 4.0


MIN_CALLS = 50
MIN_SAMPLES = 3


def runs_per_sample(num_calls: int, expected_us: float, sample_ms: float) -> int:
    """Runs of a chain to queue before waiting, from the expected time of a call.

    Not from a measured time: all processes of a job have to queue the same number of runs.
    """
    return max(1, math.ceil(sample_ms * 1e3 / (num_calls * expected_us)))


def affordable_samples(
    run_s: float, runs: int, num_calls: int, samples: int, budget_s: float
) -> int:
    """Samples of a program whose run takes `run_s`, of at most `samples`, within `budget_s`.

    Never fewer than three, nor than 50 calls need.
    """
    least = max(MIN_SAMPLES, math.ceil(MIN_CALLS / (runs * num_calls)))
    return min(samples, max(least, int(budget_s / (run_s * runs))))


def time_programs(
    programs: Mapping[str, Program],
    sample_ms: float,
    samples: int = 50,
    budget_s: float = math.inf,
) -> dict[str, Timing]:
    """Times the programs in turn, sample by sample, so that drift of the clocks meets all alike.

    A sample queues runs for about `sample_ms` without waiting in between, as a training step would,
    then waits. A program too slow for its share of time, `budget_s`, gets fewer samples.
    """
    wall: dict[str, list[float]] = {name: [] for name in programs}
    cpu: dict[str, list[float]] = {name: [] for name in programs}
    runs: dict[str, int] = {}
    wanted: dict[str, int] = {}
    for name, program in programs.items():
        run_s = 0.0
        for _ in range(3):  # the third run is the first that replays a captured graph
            start = time.perf_counter()
            jax.block_until_ready(program.run(*program.args))
            run_s = time.perf_counter() - start
        runs[name] = runs_per_sample(program.num_calls, program.expected_us, sample_ms)
        wanted[name] = samples
        if budget_s != math.inf:
            wanted[name] = affordable_samples(
                _longest(run_s), runs[name], program.num_calls, samples, budget_s
            )
    for i in range(samples):
        for name, program in programs.items():
            if i >= wanted[name]:
                continue
            out = None
            cpu_start, start = time.process_time(), time.perf_counter()
            for _ in range(runs[name]):
                out = program.run(*program.args)
            jax.block_until_ready(out)
            calls = runs[name] * program.num_calls
            wall[name].append((time.perf_counter() - start) / calls * 1e6)
            cpu[name].append((time.process_time() - cpu_start) / calls * 1e6)
    return {name: _timing(wall[name], cpu[name]) for name in programs}


def _timing(wall: list[float], cpu: list[float]) -> Timing:
    median, p10, p90 = (float(q) for q in np.percentile(wall, (50, 10, 90)))
    return Timing(median, p10, p90, float(np.median(cpu)), len(wall))


def _longest(seconds: float) -> float:
    """The longest of all processes' times, so that all of them come to one number of samples."""
    if jax.process_count() == 1:
        return seconds
    from jax.experimental import multihost_utils

    return float(np.max(multihost_utils.process_allgather(np.float32(seconds))))

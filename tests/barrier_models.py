"""Barriers of a block and a schedule drawn at random, for models of kernels' protocols.

A process is a generator that yields what it waits for, a function of nothing that says whether it
may go on; what it does between two of these nobody else sees half done.
"""

import random
from collections.abc import Callable, Generator

Process = Generator[Callable[[], bool], None, None]


class Barrier:
    """An mbarrier: a count of arrivals and the parity of a phase."""

    def __init__(self, count: int) -> None:
        self.count = self.left = count
        self.phase = 0

    def arrive(self) -> None:
        """One arrival."""
        self.left -= 1
        if self.left == 0:
            self.left = self.count
            self.phase += 1

    def passes(self, parity: int) -> bool:
        """Whether a wait for the phase of this parity is over."""
        return self.phase % 2 != parity % 2


class Fault(Exception):  # noqa: N818
    """What a process found that must not be."""


def go_on(
    rng: random.Random, processes: list[Process], idle: Callable[[], bool] = lambda: False
) -> None:
    """Runs until all have ended, one at a time, some of them seldom.

    `idle` is asked where none may go on, and says whether that is no fault.
    """
    waits = [next(each) for each in processes]
    shares = [rng.choice((1, 1, 8, 64)) for _ in processes]
    while processes:
        drawn = rng.choices(range(len(processes)), shares, k=4)
        at = next((i for i in drawn if waits[i]()), None)
        if at is None:
            ready = [i for i, wait in enumerate(waits) if wait()]
            if not ready:
                if idle():
                    return
                raise Fault("nothing goes on")
            at = rng.choice(ready)
        wait = next(processes[at], None)
        if wait is not None:
            waits[at] = wait
            continue
        for each in (processes, waits, shares):
            del each[at]

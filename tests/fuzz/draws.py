"""Where random choices come from: hypothesis, which shrinks, or `random`, which needs nothing.

Both are written so that simpler choices come first: hypothesis shrinks towards them.
"""

import random
from collections.abc import Sequence
from typing import Any


class Draw:
    """Random choices, all made from `integer`."""

    def integer(self, low: int, high: int) -> int:
        """A number from low to high, both included."""
        raise NotImplementedError

    def choice(self, options: Sequence[Any]) -> Any:
        return options[self.integer(0, len(options) - 1)]

    def chance(self, one_in: int) -> bool:
        """True once in so many times."""
        return self.integer(0, one_in - 1) == one_in - 1

    def shuffled(self, items: Sequence[Any]) -> list[Any]:
        items = list(items)
        for i in range(len(items) - 1):
            j = self.integer(i, len(items) - 1)
            items[i], items[j] = items[j], items[i]
        return items


class RandomDraw(Draw):
    """Choices of a seeded generator."""

    def __init__(self, seed: str):
        self._random = random.Random(seed)

    def integer(self, low, high):
        return self._random.randint(low, high)


class HypothesisDraw(Draw):
    """Choices of hypothesis; `draw` is what @st.composite hands out."""

    def __init__(self, draw):
        from hypothesis import strategies as st

        self._draw, self._integers = draw, st.integers

    def integer(self, low, high):
        return self._draw(self._integers(low, high))

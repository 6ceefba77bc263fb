"""How a block of attention passes its turns and its stages round, in a model of its barriers.

The loader, and of each consumer two warps, of which the first gives stages back for both. Tiles
have any number of blocks of keys, none at all too. Each buffer holds the name of what is in it, so
that whoever reads another thing is found; waits are by mbarriers' parities (`barrier_models.py`).
Orders are drawn at random, some processes being slow.

The kernel is `cuda/kernels/attention.cuh`. Each rule of it that a test here takes away is needed.
"""

import dataclasses
import random
from typing import Any

import pytest
from barrier_models import Barrier, Fault, go_on

pytestmark = pytest.mark.without_jax

WARPS = 2  # of a consumer


@dataclasses.dataclass(frozen=True)
class Rules:
    """The protocol, and what a test takes away from it."""

    consumers: int = 2
    stages: int = 2
    first_turn_passed: bool = True
    last_turn_taken: bool = True
    meets_over_empty_tiles: bool = True
    queries_kept_to_the_last: bool = True
    waits_for_its_values: bool = True


class _Named:
    """A named barrier of two consumers' warps."""

    def __init__(self, count):
        self.barrier = Barrier(count)

    def arrive(self):
        self.barrier.arrive()

    def sync(self):
        phase = self.barrier.phase
        self.barrier.arrive()
        yield lambda: self.barrier.phase != phase

    @property
    def is_balanced(self):
        return self.barrier.left == self.barrier.count


class _Ring:
    def __init__(self, stages, consumers):
        self.full = [Barrier(1) for _ in range(stages)]
        self.empty = [Barrier(consumers) for _ in range(stages)]
        self.held: list[Any] = [None] * stages

    def write(self, count, what):
        stage, turn = count % len(self.held), count // len(self.held)
        yield lambda: self.empty[stage].passes(turn + 1)
        self.held[stage] = what
        self.full[stage].arrive()

    def wait(self, count):
        stage, turn = count % len(self.held), count // len(self.held)
        yield lambda: self.full[stage].passes(turn)

    def read(self, count, what):
        if self.held[count % len(self.held)] != what:
            raise Fault(f"{what} is not there any more")

    def release(self, count):
        self.empty[count % len(self.held)].arrive()


class _Block:
    def __init__(self, rules, tiles):
        self.rules, self.tiles = rules, tiles
        self.queries = _Ring(1, rules.consumers)
        self.keys = _Ring(rules.stages, rules.consumers)
        self.values = _Ring(rules.stages, rules.consumers)
        self.turns = [_Named(2 * WARPS) for _ in range(rules.consumers)]
        self.meetings = [_Named(WARPS) for _ in range(rules.consumers)]
        self.done = []  # (consumer, warp, tile, blocks of keys)

    def processes(self):
        warps = [(c, w) for c in range(self.rules.consumers) for w in range(WARPS)]
        return [self._load(), *(self._consume(c, w) for c, w in warps)]

    def _load(self):
        count = 0
        for number, blocks in enumerate(self.tiles):
            yield from self.queries.write(number, (number, blocks > 0))
            for i in range(blocks):
                yield from self.keys.write(count + i, (number, i, i == blocks - 1))
                if i > 0:
                    yield from self.values.write(count + i - 1, (number, i - 1))
            if blocks:
                yield from self.values.write(count + blocks - 1, (number, blocks - 1))
            count += blocks
        yield from self.queries.write(len(self.tiles), (None, False))

    def _consume(self, consumer, warp):
        rules, turn = self.rules, self.turns[consumer]
        following = self.turns[(consumer + 1) % rules.consumers]
        if consumer == rules.consumers - 1 and rules.first_turn_passed:
            following.arrive()
        number = count = 0
        while True:
            yield from self.queries.wait(number)
            tile, sees = self.queries.held[0]
            if tile is None:
                break
            blocks = 0
            if not sees:
                if rules.meets_over_empty_tiles:
                    yield from self.meetings[consumer].sync()
                if warp == 0:
                    self.queries.release(number)
            last = not sees
            while not last:
                at = count + blocks
                yield from self.keys.wait(at)
                stage = at % rules.stages
                _, _, last = self.keys.held[stage]
                yield from turn.sync()
                self.queries.read(number, (tile, True))
                self.keys.read(at, (tile, blocks, last))
                if blocks:
                    yield from self._values(at - 1, (tile, blocks - 1))
                following.arrive()
                # As wgmma, which is waited for here, holds the warps together.
                yield from self.meetings[consumer].sync()
                if warp == 0:
                    self.keys.release(at)
                    if last or not rules.queries_kept_to_the_last:
                        self.queries.release(number)
                    if blocks:
                        self.values.release(at - 1)
                blocks += 1
            if sees:
                yield from self._values(count + blocks - 1, (tile, blocks - 1))
                yield from self.meetings[consumer].sync()
                if warp == 0:
                    self.values.release(count + blocks - 1)
            count += blocks
            self.done.append((consumer, warp, tile, blocks))
            number += 1
        if consumer == 0 and rules.last_turn_taken:
            yield from turn.sync()

    def _values(self, at, what):
        if self.rules.waits_for_its_values:
            yield from self.values.wait(at)
        self.values.read(at, what)


def _run(rules, seed):
    rng = random.Random(seed)
    tiles = [rng.choice((0, 0, 1, 2, 3, 5)) for _ in range(rng.randint(0, 6))]
    block = _Block(rules, tiles)
    go_on(rng, block.processes())
    if not all(turn.is_balanced for turn in block.turns):
        raise Fault("a barrier is left half full")
    return tiles, block.done


@pytest.mark.parametrize("consumers", [2, 3])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_all_orders_end_with_every_block_of_keys_seen(consumers, stages):
    for seed in range(150):
        tiles, done = _run(Rules(consumers, stages), seed)
        for consumer in range(consumers):
            for warp in range(WARPS):
                seen = [blocks for c, w, _, blocks in done if (c, w) == (consumer, warp)]
                assert seen == tiles


@pytest.mark.parametrize(
    "rule",
    [
        "first_turn_passed",
        "last_turn_taken",
        "meets_over_empty_tiles",
        "queries_kept_to_the_last",
        "waits_for_its_values",
    ],
)
def test_each_rule_is_needed(rule):
    with pytest.raises(Fault):
        for seed in range(300):
            _run(dataclasses.replace(Rules(), **{rule: False}), seed)

"""How attention's backward pass shares out its work, in a model of its barriers and its turns.

Some blocks, of which only a few are resident at a time, in any order; of a block the planner, the
loader, the two copiers, the two consumers, the products that these have given to the tensor cores,
and the copies under way. Each stage, parcel and panel holds the name of what is in it, so that
whoever reads another thing is found. Orders are drawn at random, some processes being slow
(`barrier_models.py`). The kernel is `cuda/kernels/attention_backward*.cuh`.

Every order ends, each tile's dK and dV have all their parts, and so has each block of dQ, in
ascending order of the tiles. Each rule that a test here takes away is needed for that. What the
model leaves out: that each warp of a consumer gives stages back for itself.
"""

import collections
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from barrier_models import Barrier, Fault, Process, go_on

pytestmark = pytest.mark.without_jax

PLANNED, STAGES_Q, STAGES_O, PARCELS, CONSUMERS = 4, 3, 2, 2, 2
END = "end"


@dataclasses.dataclass(frozen=True)
class Rules:
    """The sizes, and what a test takes away from the protocol."""

    heads: int = 2  # of keys
    group: int = 1
    tiles: int = 4  # of a head's keys
    queries: int = 6  # blocks of a head
    mask: str = "none"
    blocks: int = 3
    resident: int = 3
    tickets: bool = True  # or block b takes tiles b, b + blocks and so on
    turns: bool = True
    added_before_the_turn_ends: bool = True
    parcels_read_before_given_back: bool = True
    ds_waits_for_the_other: bool = True
    meets_before_dq: bool = True
    q_kept_for_dk: bool = True
    k_kept_for_dq: bool = True

    def sees(self, tile: int, query: int) -> bool:
        """Whether a block of queries sees something of a tile, which has as many rows as two."""
        if self.mask == "causal":
            return query >= 2 * tile
        if self.mask == "window":
            return 2 * tile <= query <= 2 * tile + 3
        return self.mask == "none" or (query % 3 != tile % 3 and tile != 1)


@dataclasses.dataclass(frozen=True)
class Step:
    """A block of queries with a tile of keys."""

    kv_head: int
    tile: int
    head: int = -1  # none: nobody sees the tile
    query: int = -1
    turn: int = 0
    first: bool = True
    last: bool = True

    @property
    def keys(self):
        """What is in the stages of K and V."""
        return self.kv_head, self.tile


def steps_of(rules: Rules, number: int) -> list[Step]:
    """A tile's steps."""
    kv_head, tile = number % rules.heads, number // rules.heads
    seen = [q for q in reversed(range(rules.queries)) if rules.sees(tile, q)]
    steps = []
    for head in range(kv_head * rules.group, (kv_head + 1) * rules.group):
        for q in seen:
            before = [1 + other for other in range(tile) if rules.sees(other, q)]
            last = head == (kv_head + 1) * rules.group - 1 and q == seen[-1]
            turn = max(before, default=0)
            steps.append(Step(kv_head, tile, head, q, turn, not steps, last))
    return steps or [Step(kv_head, tile)]


def same(held: Any, expected: Any) -> None:
    """What has been found, and what should be."""
    if held != expected:
        raise Fault(f"{held} where {expected} should be")


class _Ring:
    def __init__(self, stages: int, fillers: int = 1, givers: int = CONSUMERS) -> None:
        self.stages = stages
        self.full = [Barrier(fillers) for _ in range(stages)]
        self.empty = [Barrier(givers) for _ in range(stages)]
        self.held: list[Any] = [None] * stages

    def is_full(self, count: int) -> Callable[[], bool]:
        return lambda: self.full[count % self.stages].passes(count // self.stages)

    def is_empty(self, count: int) -> Callable[[], bool]:
        return lambda: self.empty[count % self.stages].passes(count // self.stages + 1)

    def fill(self, count: int, what: Any) -> None:
        self.held[count % self.stages] = what
        self.full[count % self.stages].arrive()

    def release(self, count: int) -> None:
        self.empty[count % self.stages].arrive()


class _World:
    """What all blocks share, and what goes on by itself: a function each, true when it is over."""

    def __init__(self, rules: Rules, rng: random.Random) -> None:
        self.rules, self.rng = rules, rng
        self.ticket = self.running = self.ended = 0
        self.turns: collections.Counter[tuple[int, int]] = collections.Counter()
        self.dq: dict[tuple[int, int], list[int]] = collections.defaultdict(list)
        self.results: dict[Any, Any] = {}
        self.copies: list[Callable[[], bool]] = []

    def copy_engine(self) -> Process:
        while True:
            yield lambda: bool(self.copies)
            each = self.rng.choice(self.copies)
            if each():
                self.copies.remove(each)


class _Products:
    """Of a consumer: they are made in the order in which they were issued."""

    def __init__(self) -> None:
        self.issued: list[Callable[[], None]] = []

    def at_most(self, left: int) -> Callable[[], bool]:
        return lambda: len(self.issued) <= left

    def tensor_cores(self) -> Process:
        while True:
            yield lambda: bool(self.issued)
            self.issued[0]()
            self.issued.pop(0)


class _Block:
    def __init__(self, world: _World, number: int) -> None:
        self.world, self.rules, self.number = world, world.rules, number
        self.plan = _Ring(PLANNED, givers=1)
        self.q, self.d_out, self.k, self.v = (_Ring(n) for n in (STAGES_Q, STAGES_O, 1, 1))
        self.steps: list[Any] = [None] * STAGES_Q
        self.parcels = _Ring(PARCELS, fillers=CONSUMERS, givers=1)
        self.outbox = [[None] * CONSUMERS for _ in range(PARCELS)]
        self.ds: list[Any] = [None] * CONSUMERS
        self.ds_there = Barrier(CONSUMERS)
        self.ds_free = [Barrier(2) for _ in range(CONSUMERS)]
        self.products = [_Products() for _ in range(CONSUMERS)]
        self.begun, self.left = False, 0

    def processes(self) -> Iterator[Process]:
        warps = [self._plan(), self._load(), self._copy(0), self._copy(1)]
        warps += [self._consume(consumer) for consumer in range(CONSUMERS)]
        self.left = len(warps)
        yield from (self._resident(warp) for warp in warps)
        yield from (each.tensor_cores() for each in self.products)

    def _resident(self, warp: Process) -> Process:
        yield lambda: self.begun or self.world.running < self.rules.resident
        if not self.begun:
            self.begun = True
            self.world.running += 1
        yield from warp
        self.left -= 1
        if self.left == 0:
            self.world.running -= 1
            self.world.ended += 1

    # ---- Movers

    def _tiles(self) -> Iterator[int]:
        number = self.number
        while True:
            if self.rules.tickets:
                number = self.world.ticket
                self.world.ticket += 1
            if number >= self.rules.heads * self.rules.tiles:
                return
            yield number
            number += self.rules.blocks

    def _plan(self) -> Process:
        count = 0
        for number in self._tiles():
            for step in steps_of(self.rules, number):
                yield self.plan.is_empty(count)
                self.plan.fill(count, step)
                count += 1
        yield self.plan.is_empty(count)
        self.plan.fill(count, END)

    def _load(self) -> Process:
        count = num_out = num_tiles = 0
        step = None
        while step != END:
            yield self.plan.is_full(count)
            step = self.plan.held[count % PLANNED]
            yield self.q.is_empty(count)
            self.steps[count % STAGES_Q] = step
            if step == END or step.head < 0:
                self.q.full[count % STAGES_Q].arrive()
            else:
                self._bring(self.q, count, step)
                yield self.d_out.is_empty(num_out)
                self._bring(self.d_out, num_out, step)
                num_out += 1
                if step.first:
                    for ring in (self.v, self.k):
                        yield ring.is_empty(num_tiles)
                        self._bring(ring, num_tiles, step.keys)
                    num_tiles += 1
            self.plan.release(count)
            count += 1

    def _bring(self, ring: _Ring, count: int, what: Any) -> None:
        ring.held[count % ring.stages] = "nothing whole"

        def arrive() -> bool:
            ring.fill(count, what)
            return True

        self.world.copies.append(arrive)

    def _copy(self, which: int) -> Process:
        world, rules, count = self.world, self.rules, which
        while True:
            yield self.parcels.is_full(count)
            label = self.parcels.held[which]
            if label == END:
                return
            kind, step = label
            block = step.head, step.query
            if kind == "dq" and rules.turns:
                yield lambda: world.turns[block] == step.turn  # noqa: B023
            copy = _Copy(self, which, label)
            world.copies.append(copy.go_on)
            if rules.parcels_read_before_given_back:
                yield lambda: copy.is_read  # noqa: B023
            self.parcels.release(count)
            if kind == "dq":
                if rules.added_before_the_turn_ends:
                    yield lambda: copy.is_over  # noqa: B023
                world.turns[block] = 1 + step.tile
            count += PARCELS

    # ---- Consumers

    def _consume(self, c: int) -> Process:
        products, count, num_out, num_tiles, parcel = self.products[c], 0, 0, 0, 0
        self.ds_free[c ^ 1].arrive()
        while True:
            yield self.q.is_full(count)
            step = self.steps[count % STAGES_Q]
            if step == END:
                break
            sums: dict[str, list[Step]] = {"dk": [], "dv": []}
            if step.head >= 0:
                yield self.k.is_full(num_tiles)
                self._scores(c, count, step)
                yield products.at_most(0)
                yield self.v.is_full(num_tiles)
                while True:
                    yield from self._step(c, step, count, num_out, parcel, sums)
                    num_out, parcel = num_out + 1, parcel + 1
                    if step.last:
                        break
                    count += 1
                    step = self.steps[count % STAGES_Q]
                num_tiles += 1
            self.q.release(count)
            count += 1
            for kind, parts in sums.items():
                expected = steps_of(self.rules, step.tile * self.rules.heads + step.kv_head)
                same(parts, [each for each in expected if each.head >= 0])
                yield self.parcels.is_empty(parcel)
                self._send(c, parcel, (kind, step))
                parcel += 1
        yield from self._sync(self.ds_free[c])
        for _ in range(PARCELS):
            yield self.parcels.is_empty(parcel)
            self._send(c, parcel, END)
            parcel += 1

    def _step(self, c, step, count, num_out, parcel, sums) -> Process:
        rules, issue, left = self.rules, self.products[c].issued.append, self.products[c].at_most
        out = num_out % STAGES_O
        yield self.d_out.is_full(num_out)

        def dp():
            same((self.d_out.held[out], self.v.held[0]), (step, step.keys))

        issue(dp)
        yield left(1)
        if not step.first and rules.q_kept_for_dk:
            self.q.release(count - 1)

        def add_dv():
            same(self.d_out.held[out], step)
            sums["dv"].append(step)

        issue(add_dv)
        yield left(1)
        if step.last:
            self.v.release(0)
        if rules.ds_waits_for_the_other:
            yield from self._sync(self.ds_free[c])
        self.ds[c] = step
        if not step.last:
            yield self.q.is_full(count + 1)
            self._scores(c, count + 1, self.steps[(count + 1) % STAGES_Q])
        yield left(0 if step.last else 1)
        self.d_out.release(num_out)
        if rules.meets_before_dq:
            yield from self._sync(self.ds_there)

        def dq():
            same((self.ds, self.k.held[0]), ([step] * CONSUMERS, step.keys))

        def add_dk():
            same((self.ds[c], self.q.held[count % STAGES_Q]), (step, step))
            sums["dk"].append(step)

        issue(dq)
        issue(add_dk)
        if step.last and not rules.k_kept_for_dq:
            self.k.release(0)
        if not step.last and not rules.q_kept_for_dk:
            self.q.release(count)
        yield left(1)
        if rules.ds_waits_for_the_other:
            self.ds_free[c ^ 1].arrive()
        if step.last and rules.k_kept_for_dq:
            self.k.release(0)
        yield self.parcels.is_empty(parcel)
        self._send(c, parcel, ("dq", step))
        if step.last:
            yield left(0)

    def _scores(self, c: int, count: int, step: Step) -> None:
        def scores():
            same((self.q.held[count % STAGES_Q], self.k.held[0]), (step, step.keys))

        self.products[c].issued.append(scores)

    @staticmethod
    def _sync(barrier: Barrier) -> Process:
        phase = barrier.phase
        barrier.arrive()
        yield lambda: barrier.phase != phase

    def _send(self, c: int, parcel: int, label: Any) -> None:
        self.outbox[parcel % PARCELS][c] = label
        self.parcels.held[parcel % PARCELS] = label
        self.parcels.full[parcel % PARCELS].arrive()


class _Copy:
    """Of a parcel, to global memory."""

    def __init__(self, block: _Block, which: int, label: Any) -> None:
        self.block, self.which, self.label = block, which, label
        self.is_read = self.is_over = False

    def go_on(self) -> bool:
        if not self.is_read:
            same(self.block.outbox[self.which], [self.label] * CONSUMERS)
            self.is_read = True
            return False
        (kind, step), world = self.label, self.block.world
        if kind == "dq":
            world.dq[step.head, step.query].append(step.tile)
        else:
            same((kind, step.keys) in world.results, False)
            world.results[kind, step.keys] = True
        self.is_over = True
        return True


def _run(rules: Rules, seed: int) -> None:
    rng = random.Random(seed)
    world = _World(rules, rng)
    processes = [p for number in range(rules.blocks) for p in _Block(world, number).processes()]
    processes.append(world.copy_engine())
    go_on(rng, processes, lambda: world.ended == rules.blocks and not world.copies)
    assert len(world.results) == 2 * rules.heads * rules.tiles
    for head in range(rules.heads * rules.group):
        for query in range(rules.queries):
            seen = [tile for tile in range(rules.tiles) if rules.sees(tile, query)]
            same(world.dq[head, query], seen)


SIZES = (
    *(
        {"mask": mask, "blocks": n}
        for mask in ("none", "causal", "window", "holes")
        for n in (1, 4)
    ),
    {"group": 2, "queries": 3},
    {"heads": 1, "tiles": 6, "queries": 2, "blocks": 5, "resident": 2},
    {"mask": "causal", "blocks": 9, "resident": 1},
    {"tiles": 1, "queries": 1},
)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_all_orders_drawn_end_with_all_parts_in_order(sizes):
    for seed in range(10):
        _run(Rules(**{"resident": 3, **sizes}), seed)


@pytest.mark.parametrize(
    ("fault", "without"),
    (
        ("nothing goes on", {"tickets": False, "blocks": 6, "resident": 2}),
        ("where", {"turns": False}),
        ("where", {"added_before_the_turn_ends": False, "heads": 1}),
        ("where", {"parcels_read_before_given_back": False}),
        ("where", {"ds_waits_for_the_other": False}),
        ("where", {"meets_before_dq": False}),
        ("where", {"q_kept_for_dk": False}),
        ("where", {"k_kept_for_dq": False, "queries": 2}),
    ),
    ids=str,
)
def test_each_rule_is_needed(fault, without):
    with pytest.raises(Fault, match=fault):
        for seed in range(100):
            _run(Rules(**without), seed)

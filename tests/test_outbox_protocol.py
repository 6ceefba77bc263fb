"""How tiles leave a block of matmul_reduce_scatter for the peers, in a model of its barriers.

A few ranks, two calls, a few blocks of each, of which only some are resident at a time; of a block
the mover, a warp of each consumer, the two storers, the watcher, and the copies that they have
under way. Tiles are dealt by the kernels' own walk. Each buffer, register tile and place in the
scratch holds the name of what is in it, so that whoever reads another thing is found; waits are by
mbarriers' parities (`barrier_models.py`). Orders are drawn at random, some processes being slow.

The kernel is `cuda/kernels/matmul_reduce.cuh`, the outbox `cuda/schedule/partial_tile.cuh`. Each
rule of them that a test here takes away is needed. What the model leaves out: how long a write
takes to be seen, and the exit of an all_reduce.
"""

import collections
import dataclasses
import random
from typing import Any

import pytest
from barrier_models import Barrier, Fault, go_on

pytestmark = pytest.mark.without_jax

CALLS, CONSUMERS, STORERS = 2, 2, 2
STAGES, SLOTS = 4, 4  # of the ring, of the bulletin
PANELS, BUFFERS = 4, 2


@dataclasses.dataclass(frozen=True)
class Rules:
    """The protocol, and what a test takes away from it."""

    ranks: int = 2
    steps: int = 6
    tiles: int = 3  # of an owner
    blocks: int = 1
    resident: int = 1
    lead: int = 1
    full_for_each_storer: bool = True  # or one barrier of a buffer for both
    announced_in_order: bool = True
    reads_waited_for: bool = True  # before a buffer is given back
    leaves_before_the_wait: bool = True  # for the peer; or the wait begins the tile
    leaves_before_the_fetch: bool = True


@pytest.fixture(scope="module")
def ffi():
    return pytest.importorskip("pk_jax._ffi")


class _Bulletin:
    def __init__(self):
        self.full = [Barrier(1) for _ in range(SLOTS)]
        self.empty = [Barrier(CONSUMERS + STORERS) for _ in range(SLOTS)]
        self.entries: list[Any] = [None] * SLOTS

    def write(self, number, entry):
        at, parity = number % SLOTS, number // SLOTS
        yield lambda: self.empty[at].passes(parity + 1)
        self.entries[at] = entry
        self.full[at].arrive()

    def read(self, number):
        at, parity = number % SLOTS, number // SLOTS
        yield lambda: self.full[at].passes(parity)
        entry = self.entries[at]
        self.empty[at].arrive()
        return entry


class _Outbox:
    """Of a consumer's warp."""

    def __init__(self, rules):
        count = STORERS if rules.full_for_each_storer else 1
        self.full = [[Barrier(1) for _ in range(BUFFERS)] for _ in range(count)]
        self.empty = [Barrier(1) for _ in range(BUFFERS)]
        self.held: list[Any] = [None] * BUFFERS  # (number of the tile in the block, panel)
        self.reads = [0] * BUFFERS  # copies that read it

    def full_of(self, storer, panel):
        return self.full[storer % len(self.full)][panel % BUFFERS]


class _Copy:
    def __init__(self, box, held, arrive, speed):
        self.box, self.held, self.arrive, self.speed = box, held, arrive, speed
        self.state = "issued"

    def go_on(self):
        buffer = self.held[1] % BUFFERS
        if self.state == "issued":
            if self.box.held[buffer] != self.held:
                raise Fault("a copy read another panel")
            self.box.reads[buffer] -= 1
            self.state = "read"
        else:
            self.arrive()
            self.state = "arrived"


class _World:
    """What all blocks share: the ranks' calls, counters and scratch."""

    def __init__(self, rules, walks, rng):
        self.rules, self.walks, self.rng = rules, walks, rng
        self.call = [1] * rules.ranks
        self.begun = [0] * rules.ranks
        self.ended = [0] * rules.ranks
        self.staged = collections.Counter()  # (owner, source, block)
        self.before = collections.Counter()
        self.scratch = [{} for _ in walks]  # (source, tile, warp, panel) -> call
        self.results = [collections.Counter() for _ in walks]
        self.copies = []

    def copy_engine(self):
        """Reads and arrivals, in any order; of a warp's they need not keep theirs."""
        while True:
            yield lambda: bool(self.copies)
            each = self.rng.choice(self.copies)
            if self.rng.random() < each.speed:
                each.go_on()
            if each.state == "arrived":
                self.copies.remove(each)


class _Block:
    def __init__(self, world, rank, number):
        self.world, self.rules, self.rank = world, world.rules, rank
        self.number = number
        self.peers = [peer for peer in range(world.rules.ranks) if peer != rank]
        self.walk = world.walks[rank][number]

    def processes(self):
        """All of it, call by call."""
        roles = [self._mover, self._watcher]
        roles += [lambda w=w: self._consumer(w) for w in range(CONSUMERS)]
        roles += [lambda s=s: self._storer(s) for s in range(STORERS)]
        self.meeting = Barrier(len(roles))
        return [self._calls(role, i == 0) for i, role in enumerate(roles)]

    def _calls(self, role, first):
        world, rank = self.world, self.rank
        for call in range(1, CALLS + 1):
            if first:
                # By arrival: in the order of the numbers, so many at a time.
                yield (
                    lambda: (
                        world.call[rank] == call  # noqa: B023
                        and world.begun[rank] == self.number
                        and world.begun[rank] - world.ended[rank] < self.rules.resident
                    )
                )
                world.begun[rank] += 1
                self._set_up(call)
            yield from self._meet()
            yield from role()
            yield from self._meet()
            if first:
                world.ended[rank] += 1
                if world.ended[rank] == self.rules.blocks:
                    world.begun[rank] = world.ended[rank] = 0
                    world.call[rank] += 1

    def _meet(self):
        phase = self.meeting.phase
        self.meeting.arrive()
        yield lambda: self.meeting.phase != phase

    def _set_up(self, call):
        self.call = call
        self.bulletin = _Bulletin()
        self.ring_full = [Barrier(1) for _ in range(STAGES)]
        self.ring_empty = [Barrier(CONSUMERS) for _ in range(STAGES)]
        self.outbox = [_Outbox(self.rules) for _ in range(CONSUMERS)]
        self.arrived = self.stored = 0

    def _mover(self):
        at = 0
        for count, (owner, _, _, tile) in enumerate(self.walk):
            yield from self.bulletin.write(count, (owner, tile))
            for _ in range(self.rules.steps):
                stage, parity = at % STAGES, at // STAGES
                yield lambda: self.ring_empty[stage].passes(parity + 1)  # noqa: B023
                self.ring_full[stage].arrive()
                at += 1
        yield from self.bulletin.write(len(self.walk), None)

    def _watcher(self):
        since = self.world.before[self.rank, self.number]
        for own in range(1, 1 + sum(owner == self.rank for owner, *_ in self.walk)):
            for peer in self.peers:
                counter = self.rank, peer, self.number
                yield lambda: self.world.staged[counter] >= since + own  # noqa: B023
            self.arrived = own

    def _consumer(self, w):
        rules = self.rules
        early = rules.steps >= PANELS + 2
        pace = max(1, (rules.steps - 3) * 2 // (2 * PANELS - 1))
        fetches_early = early or not rules.leaves_before_the_fetch
        box, at, count = self.outbox[w], 0, 0
        registers, left = None, 0  # the tile in them, panels that are not sent

        def send():
            nonlocal left
            panel = PANELS - left
            left -= 1
            buffer = panel % BUFFERS
            yield lambda: box.empty[buffer].passes(panel // BUFFERS % 2 + 1)
            if box.reads[buffer]:
                raise Fault("a panel is written while it is read")
            if registers != count - 1:
                raise Fault("a tile was lost")
            box.held[buffer] = (registers, panel)
            box.full_of((count - 1) % STORERS, panel).arrive()

        def fetch(tile):
            nonlocal registers
            own = tile // rules.blocks + 1
            yield lambda: self.arrived >= own
            there = self.world.scratch[self.rank]
            parts = [(peer, tile, w, panel) for peer in self.peers for panel in range(PANELS)]
            if any(there.get(part) != self.call for part in parts):
                raise Fault("a peer's part is not there")
            registers = "a peer's"

        while (part := (yield from self.bulletin.read(count))) is not None:
            owner, tile = part
            own = owner == self.rank
            if own and not rules.leaves_before_the_wait:
                yield lambda: self.arrived >= tile // rules.blocks + 1  # noqa: B023
            for step in range(rules.steps):
                stage, parity = at % STAGES, at // STAGES
                yield lambda: self.ring_full[stage].passes(parity)  # noqa: B023
                if left and step >= 1 + w * pace // 2 + (PANELS - left) * pace:
                    yield from send()
                if own and step == rules.steps - 1 and fetches_early:
                    yield from fetch(tile)
                if step > 0:
                    self.ring_empty[(at - 1) % STAGES].arrive()
                at += 1
            self.ring_empty[(at - 1) % STAGES].arrive()
            while left:
                yield from send()
            if own and registers != "a peer's":
                yield from fetch(tile)
            registers, left = count, PANELS
            count += 1
        while left:
            yield from send()

    def _storer(self, which):
        world, count = self.world, 0
        # The invitations.
        for peer in {owner for owner, *_ in self.walk} - {self.rank}:
            yield lambda: world.call[peer] == self.call and world.begun[peer] > 0  # noqa: B023
        while (part := (yield from self.bulletin.read(count))) is not None:
            count += 1
            if (count - 1) % STORERS == which:
                yield from self._store(which, count - 1, *part)
        if which == 0:
            yield lambda: self.stored == count
            own = sum(owner == self.rank for owner, *_ in self.walk)
            world.before[self.rank, self.number] += own

    def _store(self, which, count, owner, tile):
        copies = []
        for panel in range(PANELS):
            group = []
            for w, box in enumerate(self.outbox):
                full = box.full_of(which, panel)
                yield lambda: full.passes(panel // BUFFERS)  # noqa: B023
                if box.held[panel % BUFFERS] != (count, panel):
                    raise Fault("a storer took another's panel")
                box.reads[panel % BUFFERS] += 1
                arrive = self._arrival(owner, tile, w, panel)
                speed = self.world.rng.choice((1, 1, 1, 1, 0.03))
                group.append(_Copy(box, (count, panel), arrive, speed))
            self.world.copies += group
            copies += group
            if self.rules.reads_waited_for:
                yield lambda: all(copy.state != "issued" for copy in group)  # noqa: B023
            for box in self.outbox:
                box.empty[panel % BUFFERS].arrive()
        if owner != self.rank:
            yield lambda: all(copy.state == "arrived" for copy in copies)
        if self.rules.announced_in_order:
            yield lambda: self.stored == count
        if owner != self.rank:
            self.world.staged[owner, self.rank, self.number] += 1
        self.stored = count + 1 if self.rules.announced_in_order else self.stored + 1

    def _arrival(self, owner, tile, w, panel):
        world, call = self.world, self.call

        def arrive():
            if owner == self.rank:
                world.results[owner][call, tile, w, panel] += 1
                return
            if world.call[owner] != call:
                raise Fault("a write into another call")
            world.scratch[owner][self.rank, tile, w, panel] = call

        return arrive


def _run(ffi, rules, seed):
    rng = random.Random(seed)
    ranks, sizes = range(rules.ranks), (rules.tiles, 1, rules.ranks)
    walks = [ffi.scatter_walk(*sizes, rank, rules.blocks, rules.lead) for rank in ranks]
    world = _World(rules, walks, rng)
    blocks = [_Block(world, r, b) for r in ranks for b in range(rules.blocks)]
    processes = [each for block in blocks for each in block.processes()]
    processes.append(world.copy_engine())
    go_on(rng, processes, lambda: set(world.call) == {CALLS + 1})
    for results in world.results:
        assert set(results.values()) == {1}
        assert len(results) == CALLS * rules.tiles * CONSUMERS * PANELS


SIZES = (
    *({"steps": steps, "lead": lead} for steps in (1, 2, 5, 6, 7, 10) for lead in (1, 2, 3)),
    {"tiles": 5, "steps": 2, "blocks": 2, "resident": 2},
    {"tiles": 5, "blocks": 2},
    {"tiles": 4, "steps": 1, "blocks": 3, "resident": 2},
    {"tiles": 1, "steps": 3, "blocks": 2},
    {"tiles": 9, "steps": 1},
    *({"ranks": 3, "tiles": 3, "steps": steps, "lead": lead} for steps, lead in ((1, 2), (6, 1))),
    {"ranks": 3, "tiles": 2, "steps": 2, "blocks": 2, "resident": 2},
)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_all_orders_drawn_end_with_what_was_sent(ffi, sizes):
    for seed in range(4):
        _run(ffi, Rules(**sizes), seed)


@pytest.mark.parametrize(
    ("fault", "without"),
    (
        ("took another's|another panel|nothing goes on", {"full_for_each_storer": False}),
        ("not there", {"announced_in_order": False, "lead": 2}),
        ("while it is read|another panel", {"reads_waited_for": False}),
        ("nothing goes on", {"leaves_before_the_wait": False}),
        ("lost", {"leaves_before_the_fetch": False, "steps": 2, "lead": 3}),
    ),
    ids=str,
)
def test_each_rule_is_needed(ffi, fault, without):
    with pytest.raises(Fault, match=fault):
        for seed in range(100):
            _run(ffi, Rules(**without), seed)

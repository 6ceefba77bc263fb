"""The protocol of matmul_reduce_scatter in a small model, through every order of steps.

A few ranks, two calls each, a few blocks a rank of which only some are resident at a time, on the
kernels' own walk. A step is what one block does at once: invites, sees an invitation, writes a tile
into a peer's scratch, announces it, adds up an own tile, ends. All orders are gone through, with
three things checked: nobody writes into the scratch of a rank that is not in that call, nobody adds
up what is not there, and there is always a next step until all is done. What the model leaves out:
how long a write takes to be seen, which release and acquire answer for.

The kernel is `cuda/kernels/matmul_reduce.cuh`. Each rule of it that a test here takes away is
needed: the model then finds the order that goes wrong.
"""

import dataclasses
from typing import Any

import pytest

pytestmark = pytest.mark.without_jax

CALLS = 2


@pytest.fixture(scope="module")
def ffi():
    return pytest.importorskip("pk_jax._ffi")


@dataclasses.dataclass(frozen=True)
class Rules:
    """The protocol, and what a test takes away from it."""

    ranks: int = 2
    tiles: int = 2  # of an owner
    blocks: int = 2
    resident: int = 2
    by_arrival: bool = True  # or by index, where the last block of odd ranks begins first
    waits_for_invitation: bool = True
    waits_for_all_invitations: bool = False
    waits_for_tiles: bool = True
    counts_on: bool = True  # from call to call, or from zero


def _programs(ffi, rules):
    """The steps of each block of each rank by number."""
    found = []
    for rank in range(rules.ranks):
        walk = ffi.scatter_walk(rules.tiles, 1, rules.ranks, rank, rules.blocks)
        blocks = []
        for tiles in walk:
            to = {owner for owner, *_ in tiles if owner != rank}
            if rules.waits_for_all_invitations:
                to = set(range(rules.ranks)) - {rank}
            steps = [("invite",)]
            steps += [("admit", owner) for owner in sorted(to) if rules.waits_for_invitation]
            own = 0
            for owner, _, _, tile in tiles:
                if owner != rank:
                    steps += [("write", owner, tile), ("announce", owner)]
                    continue
                own += 1
                steps += [("sum", tile, own)]
            blocks.append((*steps, ("end", own)))
        found.append(tuple(blocks))
    return found


def _put(values, *path):
    """The nested tuple with what the path leads to replaced by its last item."""
    index, *rest = path
    value = rest[0] if len(rest) == 1 else _put(values[index], *rest)
    return (*values[:index], value, *values[index + 1 :])


def _nested(value: Any, *sizes: int) -> Any:
    return value if not sizes else (_nested(value, *sizes[1:]),) * sizes[0]


def _explore(ffi, rules):
    """Goes through every order; an AssertionError is a fault of the protocol."""
    n, blocks = rules.ranks, rules.blocks
    programs = _programs(ffi, rules)
    # Of each rank: its call, and how far each of its blocks is in it, None before it begins.
    # Of each owner: epochs of the invitations it got, counters by peer and block, what they were
    # before the call, and the call whose tile lies in its scratch, by peer.
    start = (
        _nested((1, (None,) * blocks), n),
        _nested(0, n, n),
        _nested(0, n, n, blocks),
        _nested(0, n, blocks),
        _nested(0, n, n, rules.tiles),
    )
    seen, ahead = {start}, [start]
    while ahead:
        state = ahead.pop()
        following = list(_next(rules, programs, state))
        assert following or all(call > CALLS for call, _ in state[0]), ("stuck", state)
        for after in following:
            if after not in seen:
                seen.add(after)
                ahead.append(after)
    return len(seen)


def _next(rules, programs, state):
    ranks, invited, counters, before, scratch = state
    for rank, (call, blocks) in enumerate(ranks):
        if call > CALLS:
            continue
        if all(at == len(steps) for at, steps in zip(blocks, programs[rank], strict=True)):
            yield (_put(ranks, rank, (call + 1, (None,) * rules.blocks)), *state[1:])
            continue
        running = sum(
            at is not None and at < len(steps)
            for at, steps in zip(blocks, programs[rank], strict=True)
        )
        waiting = [block for block, at in enumerate(blocks) if at is None]
        if waiting and running < rules.resident:
            first = waiting[-1 if not rules.by_arrival and rank % 2 else 0]
            yield (_put(ranks, rank, 1, first, 0), *state[1:])
        for block, at in enumerate(blocks):
            if at is None or at == len(programs[rank][block]):
                continue
            moved = _put(ranks, rank, 1, block, at + 1)
            match programs[rank][block][at]:
                case ("invite",):
                    to = invited
                    for peer in range(rules.ranks):
                        to = _put(to, peer, rank, call)
                    yield moved, to, counters, before, scratch
                case ("admit", owner):
                    if invited[rank][owner] == call:
                        yield moved, *state[1:]
                case ("write", owner, tile):
                    assert ranks[owner][0] == call, "a write into memory of another call"
                    assert any(at is not None for at in ranks[owner][1]), "before it began"
                    yield moved, invited, counters, before, _put(scratch, owner, rank, tile, call)
                case ("announce", owner):
                    count = counters[owner][rank][block] + 1
                    yield moved, invited, _put(counters, owner, rank, block, count), *state[3:]
                case ("sum", tile, own):
                    since = before[rank][block] if rules.counts_on else 0
                    peers = [peer for peer in range(rules.ranks) if peer != rank]
                    there = all(counters[rank][peer][block] >= since + own for peer in peers)
                    if there or not rules.waits_for_tiles:
                        assert all(scratch[rank][p][tile] == call for p in peers), "not there yet"
                        yield moved, *state[1:]
                case ("end", own):
                    yield (
                        moved,
                        invited,
                        counters,
                        _put(before, rank, block, before[rank][block] + own),
                        scratch,
                    )


SIZES = (
    {},
    {"tiles": 3},
    {"tiles": 1},
    {"tiles": 3, "blocks": 1, "resident": 1},
    {"tiles": 2, "resident": 1},
    {"ranks": 3, "tiles": 1, "blocks": 2, "resident": 1},
)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_order_ends_with_what_was_sent(ffi, sizes):
    assert _explore(ffi, Rules(**sizes)) > 100


@pytest.mark.parametrize(
    ("fault", "without"),
    (
        ("another call|before it began", {"waits_for_invitation": False}),
        ("not there yet", {"waits_for_tiles": False}),
        ("not there yet", {"counts_on": False}),
        # With a tile for each rank, blocks have nothing for some peer, which may be a call ahead.
        ("stuck", {"waits_for_all_invitations": True, "tiles": 1}),
        ("stuck", {"by_arrival": False, "resident": 1}),
    ),
    ids=str,
)
def test_each_rule_is_needed(ffi, fault, without):
    with pytest.raises(AssertionError, match=fault):
        _explore(ffi, Rules(**without))

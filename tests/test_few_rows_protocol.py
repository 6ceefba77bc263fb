"""The exchange of few rows in a small model, through every order of steps.

Two ranks, some calls on one channel, each by low latency or the simple protocol; blocks with tiles,
and one that has none, as of a tile that is split along k into more parts than it has rows for. A
step is what one warp does at once: invites, sees an invitation, sends a tile, sees and adds the
peer's. All orders of all steps are gone through, with three things checked: nobody overwrites what
its owner has yet to add, or writes into the scratch of a rank that is not in that call; nobody adds
a tile that is not there; there is always a next step until all is done. What the model leaves out:
how long a write takes to be seen, which words with their epoch, release and acquire answer for.

The kernel is `cuda/kernels/few_rows.cuh`, the exchange `cuda/schedule/strip_sum.cuh`. Each rule
that a test here takes away is needed: the model then finds the order that goes wrong.
"""

import dataclasses

import pytest

pytestmark = pytest.mark.without_jax


@dataclasses.dataclass(frozen=True)
class Rules:
    """The protocol, and what a test takes away from it."""

    calls: str = "ss"  # "l": by low latency, "s": simple
    tiles: tuple[int, ...] = (1, 0)  # of each block
    resident: int = 2  # blocks of a rank, which start in order
    halves: int = 2  # of a mailbox
    waits_for_invitation: bool = True
    idle_waits: bool = False  # also a block without tiles waits for the invitation
    sends_first: bool = True  # or sees the peer's tile before it sends its own
    by_epoch: bool = True  # or flags that are raised once for all calls

    @property
    def num_tiles(self):
        return sum(self.tiles)


# A rank: its call, and of each block what each of its two warps has left to do, () once it is over
# and None before it begins. Memory by owner: the last invitation; of each tile its flag, and for
# the scratch and each half of the mailbox the call of what lies there and whether it was added.


def _set(values, index, value):
    return (*values[:index], value, *values[index + 1 :])


def _begun(rules, call, block):
    """The steps of a block's greeter and of its consumers."""
    first = sum(rules.tiles[:block])
    tiles = range(first, first + rules.tiles[block])
    greeter = ["greet"]
    if rules.calls[call - 1] == "s":
        waits = rules.waits_for_invitation and (tiles or rules.idle_waits)
        greeter = ["invite", *(["admit"] if waits else []), "greet"]
    # A tile is looked for after the next one's products.
    sends, adds = [("send", i) for i in tiles], [("add", i) for i in tiles]
    steps = [("wait", 0)]
    for i in range(len(tiles)):
        steps += [*adds[i - 1 : i], sends[i]] if i else [sends[0]]
    steps += adds[-1:]
    if not rules.sends_first:
        steps = [("wait", 0), *(step for pair in zip(adds, sends, strict=True) for step in pair)]
    return tuple((step, 0) for step in greeter), tuple(steps)


def _next(rules, state):
    """Yields every state that one step leads to; an AssertionError is a fault of the protocol."""
    ranks, memories = state
    for r, (call, blocks) in enumerate(ranks):
        if call > len(rules.calls):
            continue
        running = sum(block not in (None, ()) for block in blocks)
        for b, block in enumerate(blocks):
            if block is None:
                if running < rules.resident:
                    rank = (call, _set(blocks, b, _begun(rules, call, b)))
                    yield _set(ranks, r, rank), memories
                break  # in order
            for w, steps in enumerate(block):
                if not steps:
                    continue
                (what, tile), *rest = steps
                if what == "wait" and block[0]:
                    continue
                found = _step(rules, state, r, what, tile)
                if found is None:
                    continue
                left = _set(block, w, tuple(rest))
                blocks2 = _set(blocks, b, left if any(left) else ())
                rank = (call, blocks2)
                if all(each == () for each in blocks2):
                    rank = (call + 1, (None,) * len(blocks))
                yield _set(ranks, r, rank), found


def _step(rules, state, r, what, tile):
    """The memory after a step of rank r; None if it has to wait."""
    ranks, memories = state
    (call, _), peer = ranks[r], 1 - r
    simple = rules.calls[call - 1] == "s"
    place = 0 if simple else 1 + call % rules.halves
    if what == "invite":
        _, *rest = memories[peer]
        return _set(memories, peer, (call, *rest))
    if what == "admit":
        return memories if memories[r][0] == call else None  # equal: words prove themselves
    if what == "send":
        invited, flags, places = memories[peer]
        there, begun = ranks[peer]
        if simple:
            assert there == call, f"call {call} of rank {r} writes into {there} of its peer"
            assert any(block is not None for block in begun), f"rank {peer} has not begun its call"
        before, added = places[place][tile]
        assert added, f"rank {r} overwrites what came in call {before}"
        places = _set(places, place, _set(places[place], tile, (call, False)))
        flags = _set(flags, tile, call) if simple else flags
        return _set(memories, peer, (invited, flags, places))
    if what == "add":
        invited, flags, places = memories[r]
        came, _ = places[place][tile]
        if simple and (flags[tile] != call if rules.by_epoch else flags[tile] < 1):
            return None
        if not simple and came != call:
            return None
        assert came == call, f"rank {r} adds a tile that is not there"
        places = _set(places, place, _set(places[place], tile, (call, True)))
        return _set(memories, r, (invited, flags, places))
    return memories


def explore(rules):
    """Goes through all states; returns their number."""
    rank = (1, (None,) * len(rules.tiles))
    empty = ((0, True),) * rules.num_tiles
    memory = (0, (0,) * rules.num_tiles, (empty,) * (1 + rules.halves))
    seen, left = set(), [((rank, rank), (memory, memory))]
    while left:
        state = left.pop()
        if state in seen:
            continue
        seen.add(state)
        following = list(_next(rules, state))
        done = all(call > len(rules.calls) for call, _ in state[0])
        assert following or done, f"stuck: {state}"
        left += following
    return len(seen)


@pytest.mark.parametrize(
    "rules",
    (
        Rules(),
        Rules(resident=1),
        Rules("lll"),
        Rules("lsl"),
        Rules("sls"),
        Rules("ls", tiles=(2, 0)),
        Rules("ss", tiles=(1, 1), resident=1),
        Rules("lll", tiles=(1, 1), resident=1),
        Rules("ss", tiles=(2,)),
    ),
    ids=str,
)
def test_no_order_goes_wrong(rules):
    assert explore(rules) > 50


@pytest.mark.parametrize(
    "rules, fault",
    (
        # A rank may be a call ahead: its peer has sent all, and not added all.
        (Rules("lll", halves=1), "overwrites"),
        (Rules(waits_for_invitation=False), "writes into|has not begun|overwrites"),
        # The next invitation stands where it looks for this one.
        (Rules(idle_waits=True), "stuck"),
        (Rules(sends_first=False), "stuck"),
        (Rules(by_epoch=False), "not there|overwrites|writes into"),
    ),
    ids=str,
)
def test_each_rule_is_needed(rules, fault):
    with pytest.raises(AssertionError, match=fault):
        explore(rules)

"""The protocol of all_gather_matmul in a small model, through every order of steps.

Two ranks, two calls each, a few blocks a rank of which only some are resident at a time. A step is
what one warp does at once: takes its number, draws a piece, invites, sees an invitation, writes a
piece, raises its flag, sees a flag, multiplies a chunk of k. All orders of all steps are gone
through, with three things checked: nobody writes into memory of a rank that is not in that call
(entry and exit), nobody uses a piece that is not there, and there is always a next step until all
is done (progress). What the model leaves out: how long a write takes to be seen, which release and
acquire answer for.

The kernel is `cuda/kernels/all_gather_matmul.cuh`, pushing is `cuda/schedule/gather_push.cuh`. Each
rule that a test here takes away is needed: the model then finds the order that goes wrong.
"""

import dataclasses

import pytest

pytestmark = pytest.mark.without_jax

CALLS = 2


@dataclasses.dataclass(frozen=True)
class Rules:
    """The protocol, and what a test takes away from it."""

    blocks: int = 2
    communicators: int = 1  # 0: a warp of every block pushes
    resident: int = 2
    pieces: int = 1  # of a part: the chunks of k of one tile, in order
    by_arrival: bool = True  # or by index, with the last block first
    drawn: bool = True  # without communicators: or piece i by block i
    waits_for_invitation: bool = True
    waits_for_flags: bool = True
    waits_for_each_chunk: bool = True  # or for the first alone
    uses_each_chunk: bool = True  # or the first alone, and waits for no other
    epochs: bool = True  # or flags that are raised once for all calls


# A rank: (call, blocks begun, pieces drawn, state of each block). A block: () before it begins,
# "over", or its number and what each of its warps has left to do. Memory: invitations and flags,
# the last epoch of each; whose call's piece lies where; by owner.


def _start(rules):
    rank = (1, 0, 0, ((),) * rules.blocks)
    return (rank, rank), (0, 0), ((0,) * rules.pieces,) * 2, ((0,) * rules.pieces,) * 2


def _warps(rules, number):
    """The steps of each warp of a block by its number, in order."""
    multiply = []  # chunk by chunk: waits for one, uses it, and only then waits for the next
    for i in range(rules.pieces if rules.uses_each_chunk else 1):
        if rules.waits_for_flags and (i == 0 or rules.waits_for_each_chunk):
            multiply.append(("see", i))
        multiply.append(("use", i))
    if rules.communicators == 0:
        pieces = range(number, rules.pieces, rules.blocks)
        push = (("draw", 0),) if rules.drawn else _push(rules, pieces)
        return (("invite", 0), *push), tuple(multiply)
    if number >= rules.communicators:
        return (tuple(multiply),)
    mine = range(number, rules.pieces, rules.communicators)
    entry = (("admit", 0),) if rules.waits_for_invitation else ()  # once, whatever it has to push
    pushes = [(what, i) for i in mine for what in ("write", "raise")]
    return ((("invite", 0), *entry, *pushes),)


def _push(rules, pieces):
    entry = ["admit"] if rules.waits_for_invitation else []
    return [(what, i) for i in pieces for what in (*entry, "write", "raise")]


def _set(values, index, value):
    return (*values[:index], value, *values[index + 1 :])


def _next(rules, state):
    """Yields every state that one step leads to; an AssertionError is a fault of the protocol."""
    ranks = state[0]
    for r, (call, begun, drawn, blocks) in enumerate(ranks):
        if call > CALLS:
            continue
        running = sum(bool(b) and b != "over" for b in blocks)
        for i, block in enumerate(blocks):
            if block == "over":
                continue
            if not block:
                in_order = all(blocks[j] for j in range(i + 1, rules.blocks))
                if running < rules.resident and (rules.by_arrival or in_order):
                    number = begun if rules.by_arrival else i
                    begins = (number, _warps(rules, number))
                    rank = (call, begun + 1, drawn, _set(blocks, i, begins))
                    yield _set(ranks, r, rank), *state[1:]
                continue
            number, warps = block
            for w, steps in enumerate(warps):
                if not steps:
                    continue
                (what, piece), *rest = steps
                if what == "draw":
                    memory, drawn2 = state[1:], drawn + 1
                    if drawn < rules.pieces:
                        rest = [*_push(rules, [drawn]), ("draw", 0)]
                else:
                    memory, drawn2 = _step(rules, state, r, what, piece), drawn
                    if memory is None:
                        continue
                left = _set(warps, w, tuple(rest))
                blocks2 = _set(blocks, i, (number, left) if any(left) else "over")
                if all(b == "over" for b in blocks2):
                    rank = (call + 1, 0, 0, ((),) * rules.blocks)
                else:
                    rank = (call, begun, drawn2, blocks2)
                yield _set(ranks, r, rank), *memory


def _step(rules, state, r, what, piece):
    """The memory after a step of a warp of rank r; None if it has to wait."""
    ranks, invited, flags, data = state
    call, peer = ranks[r][0], 1 - r
    if what == "invite":
        invited = _set(invited, peer, call)  # overwrites what is there
    elif what == "admit" and invited[r] != call:  # must be equal, as words prove it
        return None
    elif what == "write":
        there = ranks[peer][0]
        assert there == call, f"call {call} of rank {r} writes into {there} of its peer"
        # A piece lands while its rank is under way, and not before it began.
        assert any(ranks[peer][3]), f"rank {peer} has not begun its call"
        data = _set(data, peer, _set(data[peer], piece, call))
    elif what == "raise":
        flags = _set(flags, peer, _set(flags[peer], piece, call))
    elif what == "see" and (flags[r][piece] != call if rules.epochs else flags[r][piece] < 1):
        return None  # equal, too: the next call's flag does not come before this one is seen
    elif what == "use":
        assert data[r][piece] == call, f"rank {r} uses a piece that is not there"
    return invited, flags, data


def explore(rules):
    """Goes through all states; returns their number."""
    seen, left = set(), [_start(rules)]
    while left:
        state = left.pop()
        if state in seen:
            continue
        seen.add(state)
        following = list(_next(rules, state))
        assert following or all(rank[0] > CALLS for rank in state[0]), f"stuck: {state}"
        left += following
    return len(seen)


@pytest.mark.parametrize(
    "rules",
    (
        Rules(),
        Rules(resident=1),
        Rules(pieces=2),
        Rules(blocks=3, resident=2),
        Rules(blocks=3, communicators=2, pieces=2, resident=1),
        Rules(communicators=0, resident=1),
        Rules(communicators=0, pieces=2, resident=1),
        Rules(communicators=0, blocks=3, resident=1),
    ),
    ids=str,
)
def test_no_order_goes_wrong(rules):
    assert explore(rules) > 100


@pytest.mark.parametrize(
    "rules, fault",
    (
        # A communicator without a piece may look for an invitation that the next has overwritten.
        (Rules(blocks=3, communicators=2, pieces=1, resident=3), "stuck"),
        # Those that compute would hold all SMs, and wait.
        (Rules(resident=1, by_arrival=False), "stuck"),
        (Rules(waits_for_invitation=False), "writes into|has not begun"),
        (Rules(waits_for_flags=False), "not there"),
        # The first chunk says nothing of the second.
        (Rules(pieces=2, waits_for_each_chunk=False), "not there"),
        # What is not waited for comes when the call is over.
        (Rules(pieces=2, uses_each_chunk=False), "writes into"),
        # A piece of a block that is not resident would be waited for by those that are.
        (Rules(communicators=0, pieces=2, resident=1, drawn=False), "stuck"),
        # A flag of the first call would do for the second.
        (Rules(epochs=False), "not there|writes into"),
    ),
    ids=str,
)
def test_each_rule_is_needed(rules, fault):
    with pytest.raises(AssertionError, match=fault):
        explore(rules)

"""Who gives a stage of the main loop's ring back, in a model of its barriers.

One mover fills the stages in turn; the four warps of a consumer read each of them, and between two
steps a warp may be held up by something of its own, as those of `cuda/kernels/few_rows.cuh` are by
what a peer's same warp sends. Barriers are mbarriers, a count of arrivals and the parity of a
phase, so that whoever comes two phases late waits for ever (`cuda/tile/pipeline.cuh`). PTX does not
say that wgmma holds the warps of a warpgroup together; the model has it either way. Orders are
drawn at random; a stage that is filled before all have read it counts as a fault too.
"""

import random

import pytest
from barrier_models import Barrier, Fault, go_on

pytestmark = pytest.mark.without_jax

STEPS, STAGES, WARPS = 40, 4, 4


def _run(seed, *, held_together, each_warp):
    rng = random.Random(seed)
    full = [Barrier(1) for _ in range(STAGES)]
    empty = [Barrier(WARPS if each_warp else 1) for _ in range(STAGES)]
    holds = [-1] * STAGES  # the step whose operands a stage has
    issued = [0] * WARPS

    def mover():
        for step in range(STEPS):
            at, parity = step % STAGES, step // STAGES + 1
            yield lambda: empty[at].passes(parity)  # noqa: B023  (read before the next step)
            holds[at] = step
            full[at].arrive()

    def warp(w):
        for step in range(STEPS):
            at, parity = step % STAGES, step // STAGES
            yield lambda: full[at].passes(parity)  # noqa: B023
            if holds[at] != step:
                raise Fault(f"warp {w} read step {holds[at]} for {step}")
            issued[w] = step + 1
            if held_together:
                yield lambda: min(issued) > step  # noqa: B023
            for _ in range(slow[w]):
                yield lambda: True
            if step > 0 and (each_warp or w == 0):
                empty[(step - 1) % STAGES].arrive()

    slow = [rng.choice((0, 0, 3, 30)) for _ in range(WARPS)]
    go_on(rng, [mover(), *(warp(w) for w in range(WARPS))])


def _faults(**rules):
    found = []
    for seed in range(60):
        try:
            _run(seed, **rules)
        except Fault as fault:
            found.append(fault)
    return found


@pytest.mark.parametrize("held_together", (True, False))
def test_each_warp_for_itself(held_together):
    """kWarpsApart: right, whatever wgmma does."""
    assert not _faults(held_together=held_together, each_warp=True)


def test_one_thread_for_all():
    """Right where wgmma holds the warps together, and not where they come apart."""
    assert not _faults(held_together=True, each_warp=False)
    assert _faults(held_together=False, each_warp=False)

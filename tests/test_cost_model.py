"""The cost model: properties that any sane numbers give, and what the H200's numbers choose."""

import dataclasses
import itertools
import random

import pytest

from pk_jax._tuning import cases, cost_model, hardware
from pk_jax._tuning.hardware import GIB, H200, KIB, MIB

SIZES = sorted(
    {0, 1, 3, *(1 << shift for shift in range(31)), *(3 << shift for shift in range(28))}
)
RANKS = (2, 3, 5, 8, 72)


def work(num_bytes, ranks=2, inner=None, op="all_gather"):
    """A call; without `inner` its bytes are contiguous."""
    return cost_model.Work(op, num_bytes, ranks, num_bytes if inner is None else inner)


def candidate(num_bytes, ranks, mechanism, protocol, blocks, inner=GIB):
    """One candidate's time; None where it does not apply."""
    for choice in cost_model.candidates(H200, work(num_bytes, ranks, inner)):
        if (choice.mechanism, choice.protocol, choice.num_blocks) == (mechanism, protocol, blocks):
            return choice.seconds
    return None


def kinds():
    choices = cost_model.candidates(H200, work(1, 2, 16))
    return sorted({(c.mechanism, c.protocol, c.num_blocks) for c in choices})


def test_candidates():
    names = {kind[:2] for kind in kinds()}
    assert names == {
        ("register", "ll"), ("register", "simple"), ("tma", "simple"), ("copy_engine", "simple"),
    }  # fmt: skip


@pytest.mark.parametrize("ranks", RANKS)
def test_more_bytes_never_take_less_time(ranks):
    for kind in kinds():
        times = [t for size in SIZES if (t := candidate(size, ranks, *kind)) is not None]
        assert all(a <= b for a, b in itertools.pairwise(times)), kind
        assert len(times) > 15


@pytest.mark.parametrize("num_bytes", SIZES)
def test_more_ranks_take_more_time(num_bytes):
    for kind in kinds():
        found = [candidate(num_bytes, ranks, *kind) for ranks in RANKS]
        times = [seconds for seconds in found if seconds is not None]
        assert all(a <= b for a, b in itertools.pairwise(times)), kind


def test_never_faster_than_the_link():
    chosen = random.Random(0)
    for _ in range(300):
        num_bytes, ranks = chosen.randrange(2 * GIB), chosen.randint(2, 72)
        for choice in cost_model.candidates(H200, work(num_bytes, ranks)):
            assert choice.seconds >= (ranks - 1) * num_bytes / H200.link_bandwidth
            assert choice.seconds >= H200.launch_overhead + H200.flag_latency > 0


@pytest.mark.parametrize("ranks", RANKS)
def test_the_choice_is_the_cheapest(ranks):
    for size in SIZES:
        candidates = cost_model.candidates(H200, work(size, ranks))
        choice = cost_model.choose(H200, work(size, ranks))
        assert choice.seconds == min(c.seconds for c in candidates)
        for mechanism in {c.mechanism for c in candidates}:
            best = cost_model.choose(H200, work(size, ranks), mechanism=mechanism)
            assert best.mechanism == mechanism
            assert best.seconds == min(c.seconds for c in candidates if c.mechanism == mechanism)


def test_choices_on_h200():
    def choose(size):
        choice = cost_model.choose(H200, work(size))
        return choice.mechanism, choice.protocol

    assert choose(KIB) == choose(64 * KIB) == choose(512 * KIB) == ("register", "ll")
    assert choose(512 * KIB + 16)[1] == "simple"
    large = cost_model.choose(H200, work(GIB))
    assert large.mechanism == "tma" and large.num_blocks == 0  # the kernel's own: one an SM
    middle = cost_model.choose(H200, work(MIB))
    assert middle.mechanism in ("tma", "register") and 1 < middle.num_blocks <= 32
    assert cost_model.choose(H200, work(256)).num_blocks == 0  # the kernel's own


# Microseconds a call, in a chain inside one jit on two H200 that send to each other (2026-11);
# 0 blocks are the kernel's own number.
MEASURED = (
    ("register", 16, 2 * MIB, 11.3),
    ("register", 0, 8 * MIB, 29.8),
    ("register", 0, 256 * MIB, 758),
    ("tma", 0, 32 * MIB, 102.7),
    ("tma", 16, 256 * MIB, 878),
    ("tma", 0, GIB, 2989),
    ("copy_engine", 0, 8 * MIB, 84),
    ("copy_engine", 0, 256 * MIB, 826),
    ("copy_engine", 0, GIB, 3187),
)


@pytest.mark.parametrize("mechanism, blocks, size, microseconds", MEASURED, ids=str)
def test_predictions_are_near_what_was_measured(mechanism, blocks, size, microseconds):
    predicted = candidate(size, 2, mechanism, "simple", blocks)
    assert predicted == pytest.approx(microseconds * 1e-6, rel=0.15)


def test_alignment():
    for inner in (1, 2, 8, 24, 17):
        candidates = cost_model.candidates(H200, work(MIB, 2, inner))
        assert "tma" not in {choice.mechanism for choice in candidates}
        with pytest.raises(
            ValueError, match=rf"'tma' for blocks of {inner} contiguous bytes .* 16"
        ):
            cost_model.choose(H200, work(MIB, 2, inner), mechanism="tma")
    assert cost_model.choose(H200, work(MIB, 2, 48), mechanism="tma").mechanism == "tma"


def test_short_rows_slow_bulk_copies():
    def seconds(inner, mechanism="tma"):
        return candidate(GIB, 2, mechanism, "simple", 0, inner)

    assert seconds(2 * KIB) == seconds(GIB)
    fixed = H200.launch_overhead + 3 * H200.flag_latency + H200.num_sms * H200.block_overhead
    assert seconds(512) - fixed == pytest.approx(4 * (seconds(GIB) - fixed))
    assert seconds(512, "register") == seconds(GIB, "register")
    for size in (MIB, GIB):
        assert cost_model.choose(H200, work(size, 2, 128)).mechanism == "register"


def test_a_given_number_of_blocks():
    for blocks in (1, 7, 132):
        for size in (KIB, GIB):
            for choice in cost_model.candidates(H200, work(size), blocks):
                assert choice.num_blocks == blocks
            choice = cost_model.choose(H200, work(size), num_blocks=blocks)
            assert choice.mechanism != "copy_engine"  # stores use as many blocks better


def test_no_number_of_a_known_gpu_reaches_another():
    for size in SIZES:
        for choice in cost_model.candidates(H200, work(size, 8)):
            assert choice.num_blocks != H200.num_sms
            assert choice.num_blocks in (0, 1, 2, 4, 8, 16, 64)


def test_blocks_that_empty_the_landing_buffer():
    def seconds(blocks):
        choice = cost_model.choose(H200, work(GIB), "copy_engine", blocks)
        assert choice.num_blocks == (blocks or 0)
        return choice.seconds

    assert seconds(1) > seconds(4) > seconds(32)
    assert seconds(1) >= 2 * GIB / 25e9  # one block has all parts to place
    assert seconds(32) == pytest.approx(seconds(None), rel=1e-3)  # the kernel's own number


def test_memory_traffic_of_the_landing_buffer():
    slow = dataclasses.replace(H200, hbm_bandwidth=1e9)  # nothing but memory counts

    def seconds(mechanism):
        return cost_model.choose(slow, work(GIB, 4), mechanism).seconds

    # Read and write 4 parts; 3 of them are also written by a copy and read by the drain.
    assert seconds("tma") == pytest.approx(8 * GIB / 1e9, rel=1e-3)
    assert seconds("copy_engine") == pytest.approx(14 * GIB / 1e9, rel=1e-3)


def test_thresholds_are_data():
    tiny = dataclasses.replace(H200, ll_min_bytes=16, ll_shared_bytes=0)
    assert cost_model.choose(H200, work(KIB)).protocol == "ll"
    assert cost_model.choose(tiny, work(KIB)).protocol == "simple"
    quick = dataclasses.replace(H200, copy_overhead=0.0)
    assert cost_model.choose(quick, work(GIB)).mechanism == "copy_engine"


# All ops, by their common vocabulary.

OPS = sorted(cost_model.MECHANISMS)
every_op = pytest.mark.parametrize("op", OPS)


def key(choice):
    return choice.algorithm, choice.mechanism, choice.protocol, choice.num_blocks


def by_kind(op, num_bytes, ranks):
    """Seconds of each candidate for a call of contiguous, aligned bytes."""
    found = cost_model.candidates(H200, work(num_bytes, ranks, GIB, op))
    assert len({key(choice) for choice in found}) == len(found)
    return {key(choice): choice.seconds for choice in found}


def least_link_bytes(op, num_bytes, ranks):
    """What the fullest link direction of a GPU has to carry, whatever the algorithm."""
    peers = ranks - 1
    return {
        "all_gather": peers * num_bytes,
        "all_to_all": peers * (num_bytes // ranks),
        "ppermute": num_bytes,
        "psum": 2 * peers * num_bytes // ranks,
        "psum_scatter": peers * (num_bytes // ranks),
    }[op]


@every_op
@pytest.mark.parametrize("ranks", range(2, 9))
def test_time_grows_with_the_message(op, ranks):
    times = [by_kind(op, size, ranks) for size in SIZES]
    for less, more in itertools.pairwise(times):
        assert all(less[kind] <= more[kind] for kind in less.keys() & more.keys())
        # Only ll comes to an end, and nothing else begins.
        assert {kind[2] for kind in less.keys() - more.keys()} <= {"ll"}
        assert not more.keys() - less.keys()


@every_op
@pytest.mark.parametrize("times", [1, 2, 5, 100, 10_000])
def test_time_grows_with_the_ranks(op, times):
    num_bytes = times * 840 * 128  # which 2 to 8 ranks can divide
    times = [by_kind(op, num_bytes, ranks) for ranks in range(2, 9)]
    for fewer, more in itertools.pairwise(times):
        assert all(fewer[kind] <= more[kind] for kind in fewer.keys() & more.keys())


@every_op
@pytest.mark.parametrize("ranks", range(2, 9))
def test_no_op_is_faster_than_the_link(op, ranks):
    for num_bytes in SIZES:
        least = least_link_bytes(op, num_bytes, ranks) / H200.link_bandwidth
        for seconds in by_kind(op, num_bytes, ranks).values():
            assert seconds >= least
            assert seconds >= H200.launch_overhead + H200.flag_latency


@every_op
@pytest.mark.parametrize("ranks", range(2, 9))
def test_what_low_latency_can_carry(op, ranks):
    limit = max(128 * KIB, MIB // ranks // 128 * 128)
    divided = op in ("all_to_all", "psum_scatter")
    for part, fits in ((limit, True), (limit + 1, False)):
        found = cost_model.candidates(H200, work(part * ranks if divided else part, ranks, 1, op))
        ll = [choice for choice in found if choice.protocol == "ll"]
        assert len(ll) == fits
        assert all(c.mechanism == "register" and c.algorithm != "two_shot" for c in ll)
    assert {choice.mechanism for choice in found} <= set(cost_model.MECHANISMS[op])


@every_op
def test_scratch_is_for_sums_alone(op):
    for choice in cost_model.candidates(H200, work(96 * KIB, 3, 16, op)):
        sums = op in ("psum", "psum_scatter") and choice.protocol == "simple"
        assert (choice.scratch_bytes > 0) == sums
    sizes = {
        (choice.algorithm, choice.protocol): choice.scratch_bytes
        for choice in cost_model.candidates(H200, work(96 * KIB, 3, 16, op))
    }
    if op == "psum":
        assert sizes == {
            ("one_shot", "ll"): 0,
            ("one_shot", "simple"): 2 * 96 * KIB,
            ("two_shot", "simple"): 2 * 32 * KIB,
        }
    if op == "psum_scatter":
        assert sizes == {("", "ll"): 0, ("", "simple"): 2 * 32 * KIB}


@pytest.mark.parametrize("ranks", range(2, 9))
def test_shares_of_two_shots(ranks):
    for num_bytes in (1, 127, 128, 129, 128 * ranks, 128 * ranks + 1, MIB + 4):
        share = cost_model.share_bytes(num_bytes, ranks)
        assert share % 128 == 0 and share * ranks >= num_bytes
        assert (share - 128) * ranks < num_bytes


@pytest.mark.parametrize("ranks", range(2, 9))
def test_shots_of_a_sum(ranks):
    """One shot where bytes are few, two where many; never back, and one always for two ranks."""
    found = [cost_model.choose(H200, work(size, ranks, op="psum")) for size in SIZES]
    algorithms = [c.algorithm for c in found if c.scratch_bytes <= cost_model.MAX_SCRATCH_BYTES]
    assert algorithms == sorted(algorithms)
    assert set(algorithms) == ({"one_shot"} if ranks == 2 else {"one_shot", "two_shot"})


def test_scratch_has_a_limit():
    def choose(size, ranks):
        return cost_model.choose(H200, work(size, ranks, op="psum"))

    assert choose(GIB, 2).algorithm == "one_shot"
    # As fast but for two trips, and half of the memory.
    past = choose(GIB + 4, 2)
    assert past.algorithm == "two_shot" and past.scratch_bytes == GIB // 2 + 128
    # Where nothing fits, what needs least.
    assert choose(8 * GIB, 2).scratch_bytes == 4 * GIB
    assert choose(8 * GIB, 8).scratch_bytes == 7 * GIB


# What simple and ll moves of two ranks come to by the device's numbers.
FITTED = (
    ("psum", 512 * KIB, "ll", 2.4 + 1.2 + 512 * KIB / 175e3),
    ("all_to_all", MIB, "ll", 2.4 + 1.2 + 512 * KIB / 175e3),
    ("psum", 256 * MIB, "simple", 2.4 + 3 * 1.2 + 256 * MIB / 350e3),
    ("psum_scatter", 256 * MIB, "simple", 2.4 + 3 * 1.2 + 128 * MIB / 350e3),
    ("ppermute", 256 * MIB, "simple", 2.4 + 3 * 1.2 + 256 * MIB / 358e3),
    ("all_to_all", 256 * MIB, "simple", 2.4 + 3 * 1.2 + 128 * MIB / 358e3),
)


@pytest.mark.parametrize("op, size, protocol, microseconds", FITTED, ids=str)
def test_predictions_of_the_other_ops(op, size, protocol, microseconds):
    choice = cost_model.choose(H200, work(size, op=op))
    assert choice.protocol == protocol
    assert choice.seconds == pytest.approx(microseconds * 1e-6, rel=0.02)


def test_an_op_without_a_model():
    with pytest.raises(KeyError, match="no cost model for 'matmul'"):
        cost_model.candidates(H200, work(1, op="matmul"))


def test_hardware_record():
    assert hardware.lookup("NVIDIA H200") is H200
    assert hardware.lookup("cpu") is H200 and hardware.lookup() is H200
    for curve in (*H200.store_bandwidth.values(), *H200.loaded_store_bandwidth.values(),
                  H200.copy_engine_bandwidth, H200.loaded_copy_engine_bandwidth):  # fmt: skip
        assert list(curve) == sorted(curve)  # x and rate rise together
        assert max(rate for _, rate in curve) <= H200.link_bandwidth


def test_cases():
    names = [case.name for case in cases.ALL_GATHER]
    assert len(set(names)) == len(names)

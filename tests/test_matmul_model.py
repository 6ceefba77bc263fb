"""Plans of matrix products: what the kernels require of them holds for every shape and SM count."""

import random

import pytest

from pk_jax._tuning import matmul_model
from pk_jax._tuning.matmul_model import TILES, candidates, choose, resident_clusters, tiles


def shapes():
    rng = random.Random(0)
    for _ in range(300):
        sizes = (1, 7, 64, 128, 1000, 8192, rng.randint(1, 20_000))
        yield tuple(rng.choice(sizes) for _ in range(3)), rng.choice((1, 2, 78, 114, 132, 144))


@pytest.mark.parametrize("itemsize", [2, 1])
def test_plans_are_what_the_kernels_take(itemsize):
    splits = set()
    by_name = {tile.name: tile for tile in tiles(itemsize)}
    for (m, n, k), num_sms in shapes():
        plans = list(candidates(m, n, k, num_sms, itemsize))
        assert plans
        for plan in plans:
            tile = by_name[plan.tile]
            num_tiles = -(-m // tile.rows) * -(-n // tile.cols)
            assert 0 < plan.num_blocks <= num_sms
            assert plan.seconds > 0
            if plan.split_tiles == 0:
                assert plan.split == 1
                assert plan.num_blocks == min(num_sms, num_tiles)
                continue
            splits.add(plan.split)
            assert (num_tiles - plan.split_tiles) % plan.num_blocks == 0
            assert plan.num_blocks % plan.split == 0
            assert plan.split_tiles * plan.split <= plan.num_blocks
            assert plan.num_blocks // plan.split <= resident_clusters(num_sms, plan.split)
            assert -(-k * itemsize // 128) >= plan.split * matmul_model.LEAST_STEPS
    assert splits == set(matmul_model.SPLITS)


def test_resident_clusters():
    """What cudaOccupancyMaxActiveClusters says of an H200."""
    assert [resident_clusters(132, blocks) for blocks in (2, 4, 8)] == [66, 30, 15]


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.name)
def test_a_tile_can_be_asked_for(tile):
    assert choose(8192, 8192, 8192, 132, (tile.rows, tile.cols)).tile == tile.name


def test_few_rows_fill_the_chip():
    """By small tiles, and by splitting k where even those are few."""
    for m in (1, 16, 64, 128):
        plan = choose(m, 8192, 3584, 132)
        assert plan.tile == ("64x128" if m == 128 else "64x64")
        assert plan.split == 1 and plan.num_blocks == 128
    plan = choose(16, 1280, 8192, 132)
    assert plan.tile == "64x128" and plan.split == 8 and plan.num_blocks == 80


def test_a_last_wave_is_split():
    plan = choose(8192, 1280, 8192, 132)
    assert plan.tile == "128x256" and plan.split == 2 and plan.split_tiles == 56


def test_the_choice_is_the_fastest():
    for (m, n, k), num_sms in shapes():
        best = choose(m, n, k, num_sms)
        assert best.seconds == min(plan.seconds for plan in candidates(m, n, k, num_sms))


def test_operands_of_a_byte():
    """At a rate that is predicted: faster than operands of two bytes, and not twice as fast."""
    assert {choose(m, 8192, 8192, 132, itemsize=1).tile for m in (16, 8192)} == {
        "64x128",
        "128x128",
    }
    for m, n, k in ((8192, 8192, 8192), (16, 8192, 3584), (128, 4096, 256)):
        wide, narrow = (choose(m, n, k, 132, itemsize=itemsize) for itemsize in (2, 1))
        assert wide.seconds / 2 < narrow.seconds < wide.seconds


def test_time_grows_with_the_work():
    times = [choose(8192, 8192, k, 132).seconds for k in (1024, 4096, 8192)]
    assert times == sorted(times) and times[2] > 6 * times[0]

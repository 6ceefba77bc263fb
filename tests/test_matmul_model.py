"""Plans of matrix products: what the kernels require of them holds for every shape and SM count."""

import random

import pytest

from pk_jax._tuning import matmul_model
from pk_jax._tuning.matmul_model import TILES, candidates, choose

TILE = {tile.name: tile for tile in TILES}


def shapes():
    rng = random.Random(0)
    for _ in range(300):
        sizes = (1, 7, 64, 128, 1000, 8192, rng.randint(1, 20_000))
        yield tuple(rng.choice(sizes) for _ in range(3)), rng.choice((1, 2, 78, 114, 132, 144))


def test_plans_are_what_the_kernels_take():
    splits = 0
    for (m, n, k), num_sms in shapes():
        plans = list(candidates(m, n, k, num_sms))
        assert plans
        for plan in plans:
            tile = TILE[plan.tile]
            workers = plan.num_blocks // tile.blocks
            num_tiles = -(-m // tile.rows) * -(-n // tile.cols)
            assert plan.num_blocks == workers * tile.blocks <= num_sms
            assert plan.seconds > 0
            if plan.split_tiles == 0:
                assert plan.split == 1 and plan.scratch_bytes == 0
                assert workers == min(num_sms // tile.blocks, num_tiles)
                continue
            splits += 1
            assert (num_tiles - plan.split_tiles) % workers == 0
            assert plan.split >= 2 and plan.split_tiles * plan.split <= workers
            assert -(-k // 64) >= plan.split * matmul_model.LEAST_STEPS
            left = plan.split_tiles * (plan.split - 1)
            flags = -(-4 * left * tile.blocks // 256) * 256
            assert plan.scratch_bytes == flags + left * tile.rows * tile.cols * 4
    assert splits > 100


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.name)
def test_a_tile_can_be_asked_for(tile):
    assert choose(8192, 8192, 8192, 132, (tile.rows, tile.cols)).tile == tile.name


def test_few_rows_take_the_short_tile_and_many_blocks():
    plan = choose(1, 8192, 3584, 132)
    assert plan.tile == "64x256" and plan.num_blocks == 128


def test_the_choice_is_the_fastest():
    for (m, n, k), num_sms in shapes():
        best = choose(m, n, k, num_sms)
        assert best.seconds == min(plan.seconds for plan in candidates(m, n, k, num_sms))


def test_time_grows_with_the_work():
    times = [choose(8192, 8192, k, 132).seconds for k in (1024, 4096, 8192)]
    assert times == sorted(times) and times[2] > 6 * times[0]

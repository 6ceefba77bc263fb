"""The order of attention's tiles: the kernels' own walk."""

import random

import pytest

pytestmark = pytest.mark.without_jax


@pytest.fixture(scope="module")
def ffi():
    return pytest.importorskip("pk_jax._ffi")


def _draws(count):
    """(tiles of a head, heads, heads of a band, whether from the last)."""
    rng = random.Random(0)
    for _ in range(count):
        heads = rng.randint(1, 40)
        yield rng.randint(1, 20), heads, rng.randint(1, heads), rng.random() < 0.5


def test_every_tile_is_there_once(ffi):
    for rows, heads, band, from_last in _draws(200):
        tiles = ffi.attention_walk(rows, heads, band, from_last)
        assert len(tiles) == rows * heads
        expected = {(h, r) for h in range(heads) for r in range(rows)}
        assert set(map(tuple, tiles)) == expected


def test_bands_follow_each_other_and_rows_inside_a_band(ffi):
    for rows, heads, band, from_last in _draws(200):
        tiles = ffi.attention_walk(rows, heads, band, from_last)
        keys = [(head // band, -row if from_last else row, head) for head, row in tiles]
        assert keys == sorted(keys)


def test_there_is_no_walk_of_nothing(ffi):
    for sizes in ((0, 1, 1), (1, 0, 1), (1, 1, 0), (1 << 20, 1 << 20, 1)):
        with pytest.raises(ValueError, match="no such walk"):
            ffi.attention_walk(*sizes)

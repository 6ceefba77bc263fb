"""Who makes which tile of a product whose rows are scattered, and when: the kernels' own walk."""

import collections
import random

import pytest

pytestmark = pytest.mark.without_jax

RANKS = (2, 3, 4, 5, 8, 9, 16)


@pytest.fixture(scope="module")
def ffi():
    return pytest.importorskip("pk_jax._ffi")


def _draws(count, seed=0):
    """(rows and columns of tiles of an owner, ranks, blocks, lead): few tiles, and many."""
    rng = random.Random(seed)
    for _ in range(count):
        n, blocks = rng.choice(RANKS), rng.choice((1, 2, 3, 7, 16, 131, 132))
        yield rng.randint(1, 12), rng.randint(1, 12), n, blocks, rng.randint(1, 3)


def _walks(ffi, num_m, num_n, n, blocks, lead):
    return [ffi.scatter_walk(num_m, num_n, n, rank, blocks, lead) for rank in range(n)]


def test_every_rank_makes_every_tile_of_every_owner_once(ffi):
    for draw in _draws(60):
        num_m, num_n, n, *_ = draw
        for walk in _walks(ffi, *draw):
            made = collections.Counter((o, m, c) for tiles in walk for o, m, c, _ in tiles)
            assert len(made) == n * num_m * num_n and set(made.values()) == {1}, draw
            numbers = {(o, number) for tiles in walk for o, _, _, number in tiles}
            assert numbers == {(o, i) for o in range(n) for i in range(num_m * num_n)}, draw


def test_blocks_make_as_many_tiles(ffi):
    for draw in _draws(60, seed=1):
        for walk in _walks(ffi, *draw):
            counts = [len(tiles) for tiles in walk]
            assert max(counts) - min(counts) <= 1, draw


def test_what_a_block_adds_up_comes_from_blocks_of_its_number(ffi):
    """In the order in which it adds: so a counter for each peer's block says what has come."""
    for draw in _draws(40, seed=2):
        walks = _walks(ffi, *draw)
        for owner, walk in enumerate(walks):
            for block, tiles in enumerate(walk):
                own = [number for o, _, _, number in tiles if o == owner]
                for peer in walks:
                    assert own == [number for o, _, _, number in peer[block] if o == owner], draw


def test_own_tiles_wait_for_what_peers_have_made_by_then(ffi):
    """Where blocks keep pace, an own tile comes after those of the peers that it lacks."""
    for num_m, num_n, n, blocks, lead in _draws(40, seed=3):
        walks = _walks(ffi, num_m, num_n, n, blocks, lead)
        # Where each block makes the c-th tile of an owner.
        at = [
            [{(o, number): i for i, (o, _, _, number) in enumerate(tiles)} for tiles in walk]
            for walk in walks
        ]
        for owner, walk in enumerate(walks):
            for block, tiles in enumerate(walk):
                for i, (o, _, _, number) in enumerate(tiles):
                    if o != owner:
                        continue
                    for peer in range(n):
                        if peer != owner:
                            assert at[peer][block][owner, number] <= i, (n, blocks, lead)


def test_the_same_share_of_blocks_sends_at_all_times(ffi):
    """Between the lead and the tail; for 2 ranks every other block sends."""
    for n in (2, 4, 8):
        walk = ffi.scatter_walk(32, 33, n, 0, 132)
        for i in range(2 * n, 8 * n - 2 * n):
            sending = sum(tiles[i][0] != 0 for tiles in walk)
            assert abs(sending - 132 * (n - 1) / n) <= 4, (n, i, sending)


def test_one_resident_block_a_rank_is_enough(ffi):
    """Blocks run one after another by number, and an own tile waits: all ends, on all ranks."""
    for draw in _draws(60, seed=4):
        walks, n = _walks(ffi, *draw), draw[2]
        sent = collections.Counter()  # (from, to, block) -> tiles
        place = [(0, 0, 0)] * n  # block, its next tile, own tiles that it has added up
        moved = True
        while moved:
            moved = False
            for rank, (block, i, own) in enumerate(place):
                if block == len(walks[rank]):
                    continue
                tiles = walks[rank][block]
                if i == len(tiles):
                    place[rank] = (block + 1, 0, 0)
                elif tiles[i][0] != rank:
                    sent[rank, tiles[i][0], block] += 1
                    place[rank] = (block, i + 1, own)
                elif all(sent[peer, rank, block] > own for peer in range(n) if peer != rank):
                    place[rank] = (block, i + 1, own + 1)
                moved = moved or place[rank] != (block, i, own)
        assert all(block == len(walks[0]) for block, _, _ in place), draw

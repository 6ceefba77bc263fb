"""Who makes, sends and waits for what in all_gather_matmul, read from the kernels' own walk."""

import itertools
import random

import pytest

# (rows of a rank, bytes of a row, matrices): whole tiles, odd ones, fewer rows than a tile has.
PARTS = (
    *((256, 4096, 1), (4096, 16384, 1), (1, 16, 1), (7, 16, 1), (100, 4112, 1), (129, 2048, 1)),
    *((1000, 656, 1), (256, 4096, 2), (130, 48, 3), (5, 16400, 4)),
)


@pytest.fixture(scope="module")
def ffi():
    return pytest.importorskip("pk_jax._ffi")


def _walks(ffi, n, part, num_n=3, num_blocks=5, tile_rows=128, small_pieces=False):
    rows, row_bytes, outer = part
    sizes = {"num_n": num_n, "num_blocks": num_blocks, "tile_rows": tile_rows, "outer": outer}
    return [
        ffi.gather_walk(rows, row_bytes, rank, n, **sizes, small_pieces=small_pieces)
        for rank in range(n)
    ]


@pytest.mark.parametrize("n", (1, 2, 3, 8))
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_every_row_is_made_once_for_each_column(ffi, n, part):
    rows, _, outer = part
    for rank, (blocks, _, _) in enumerate(_walks(ffi, n, part, num_n=2)):
        made = [
            (row, column)
            for tiles in blocks
            for first, end, column, _, _ in tiles
            for row in range(first, end)
        ]
        assert len(made) == 2 * n * outer * rows, rank
        assert set(made) == set(itertools.product(range(n * outer * rows), range(2))), rank


@pytest.mark.parametrize("n", (2, 3, 8))
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_own_rows_come_first_and_alone(ffi, n, part):
    """A block's own tiles come before its others, and none has rows of this rank and of another."""
    rows = part[0]
    for rank, (blocks, _, _) in enumerate(_walks(ffi, n, part)):
        for tiles in blocks:
            owns = [own for *_, own, _ in tiles]
            assert owns == sorted(owns, reverse=True)
            for first, end, _, own, waited in tiles:
                of = {row // rows % n for row in range(first, end)}
                assert of == {rank} if own else rank not in of
                assert not (own and waited)


@pytest.mark.parametrize("n", (2, 3, 8))
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_tile_waits_for_the_pieces_of_its_rows(ffi, n, part):
    rows, row_bytes, _ = part
    for blocks, _, piece_bytes in _walks(ffi, n, part):
        pieces = -(-rows * row_bytes // piece_bytes)  # of a matrix
        for first, end, _, own, waited in itertools.chain.from_iterable(blocks):
            if own:
                continue
            wanted = set()
            for row in range(first, end):
                o, source = divmod(row // rows, n)
                byte = row % rows * row_bytes
                last = (byte + row_bytes - 1) // piece_bytes
                wanted |= {(source, o * pieces + i) for i in range(byte // piece_bytes, last + 1)}
            assert sorted(map(tuple, waited)) == sorted(wanted)


@pytest.mark.parametrize("n", (1, 2, 3, 8))
@pytest.mark.parametrize("part", (*PARTS, (1 << 19, 32768, 1), (16, 8192, 500)), ids=str)
@pytest.mark.parametrize("small", (False, True))
def test_each_peer_gets_each_piece_once_and_the_next_to_use_them_is_first(ffi, n, part, small):
    rows, row_bytes, outer = part
    for rank in range(n):
        _, sent, piece_bytes = ffi.gather_walk(
            rows, row_bytes, rank, n, 1, 1, small_pieces=small, outer=outer
        )
        pieces = outer * -(-rows * row_bytes // piece_bytes)
        assert pieces <= 16384 // n  # flags
        order = [(rank - turn) % n for turn in range(1, n)]
        assert list(map(tuple, sent)) == list(itertools.product(order, range(pieces)))


def test_every_piece_that_comes_is_waited_for(ffi):
    """Else a rank could end the call, and XLA reuse its memory, while a peer still writes."""
    rng = random.Random(0)
    for _ in range(50):
        n, rows, outer = rng.randint(2, 8), rng.randint(1, 600), rng.choice((1, 1, 2, 5))
        part = (rows, 16 * rng.randint(1, 400), outer)
        walks = _walks(
            *(ffi, n, part, rng.randint(1, 4), rng.randint(1, 20), rng.choice((64, 128))),
            small_pieces=rng.random() < 0.5,
        )
        for rank, (tiles, _, _) in enumerate(walks):
            waited = {
                (source, piece)
                for *_, pieces in itertools.chain.from_iterable(tiles)
                for source, piece in pieces
            }
            coming = {
                (source, piece)
                for source, (_, sent, _) in enumerate(walks)
                for to, piece in sent
                if to == rank
            }
            assert waited == coming, (n, part)


def test_bands_end_with_the_own_rows(ffi):
    """Else the first wave would wait for peers: 8 rows of tiles are one band, 32 are two."""
    for rows in (1024, 4096):
        blocks, _, _ = ffi.gather_walk(rows, 4096, 1, 8, 9, 1)
        own = [own for *_, own, _ in blocks[0]]
        assert own == [True] * (rows // 128 * 9) + [False] * (7 * rows // 128 * 9)

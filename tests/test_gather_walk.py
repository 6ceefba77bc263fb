"""Who makes, sends and waits for what in all_gather_matmul, read from the kernels' own walk."""

import itertools
import random

import pytest

# (rows of a rank, bytes of a row): whole tiles, odd ones, fewer rows than a tile has.
PARTS = ((256, 4096), (4096, 16384), (1, 16), (7, 16), (100, 4112), (129, 2048), (1000, 656))


@pytest.fixture(scope="module")
def ffi():
    return pytest.importorskip("pk_jax._ffi")


def _walks(ffi, n, rows, row_bytes, num_n=3, num_blocks=5, tile_rows=128):
    return [
        ffi.gather_walk(rows, row_bytes, rank, n, num_n, num_blocks, tile_rows) for rank in range(n)
    ]


@pytest.mark.parametrize("n", (1, 2, 3, 4, 8))
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_every_row_is_made_once_for_each_column(ffi, n, part):
    for rank, (blocks, _, _) in enumerate(_walks(ffi, n, *part)):
        made = [
            (row, column)
            for tiles in blocks
            for first, end, column, _, _ in tiles
            for row in range(first, end)
        ]
        assert len(made) == 3 * n * part[0], rank
        assert set(made) == set(itertools.product(range(n * part[0]), range(3))), rank


@pytest.mark.parametrize("n", (2, 3, 8))
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_own_rows_come_first_and_alone(ffi, n, part):
    """A block's own tiles come before its others, and none has rows of this rank and of another."""
    rows = part[0]
    for rank, (blocks, _, _) in enumerate(_walks(ffi, n, *part)):
        for tiles in blocks:
            owns = [own for *_, own, _ in tiles]
            assert owns == sorted(owns, reverse=True)
            for first, end, _, own, waited in tiles:
                of = {row // rows for row in range(first, end)}
                assert of == {rank} if own else rank not in of
                assert not (own and waited)


@pytest.mark.parametrize("n", (2, 3, 8))
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_tile_waits_for_the_pieces_of_its_rows(ffi, n, part):
    rows, row_bytes = part
    for blocks, _, piece_bytes in _walks(ffi, n, *part):
        for first, end, _, own, waited in itertools.chain.from_iterable(blocks):
            if own:
                continue
            wanted = set()
            for row in range(first, end):
                source, byte = row // rows, row % rows * row_bytes
                last = byte + row_bytes - 1
                wanted |= {(source, i) for i in range(byte // piece_bytes, last // piece_bytes + 1)}
            assert sorted(map(tuple, waited)) == sorted(wanted)


@pytest.mark.parametrize("n", (1, 2, 3, 8))
@pytest.mark.parametrize("part", (*PARTS, (1 << 19, 32768)), ids=str)
@pytest.mark.parametrize("small", (False, True))
def test_each_peer_gets_each_piece_once_and_the_next_to_use_them_is_first(ffi, n, part, small):
    rows, row_bytes = part
    for rank in range(n):
        _, sent, piece_bytes = ffi.gather_walk(rows, row_bytes, rank, n, 1, 1, small_pieces=small)
        pieces = -(-rows * row_bytes // piece_bytes)
        assert pieces <= 16384 // n  # flags
        order = [(rank - turn) % n for turn in range(1, n)]
        assert list(map(tuple, sent)) == list(itertools.product(order, range(pieces)))


def test_every_piece_that_comes_is_waited_for(ffi):
    """Else a rank could end the call, and XLA reuse its memory, while a peer still writes."""
    rng = random.Random(0)
    for _ in range(50):
        n, rows = rng.randint(2, 8), rng.randint(1, 600)
        row_bytes, blocks = 16 * rng.randint(1, 400), rng.randint(1, 20)
        walks = _walks(
            *(ffi, n, rows, row_bytes, rng.randint(1, 4), blocks, rng.choice((64, 128))),
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
            assert waited == coming, (n, rows, row_bytes)


def test_bands_end_with_the_own_rows(ffi):
    """Else the first wave would wait for peers: 8 rows of tiles are one band, 32 are two."""
    for rows in (1024, 4096):
        blocks, _, _ = ffi.gather_walk(rows, 4096, 1, 8, 9, 1)
        own = [own for *_, own, _ in blocks[0]]
        assert own == [True] * (rows // 128 * 9) + [False] * (7 * rows // 128 * 9)

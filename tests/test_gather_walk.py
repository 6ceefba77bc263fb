"""Who makes, sends and waits for what in all_gather_matmul, read from the kernels' own walk."""

import itertools
import random

import numpy as np
import pytest

from pk_jax._tuning import all_gather_matmul_model as model

pytestmark = pytest.mark.without_jax

# (rows of a rank, bytes of a row, matrices): whole tiles, odd ones, fewer rows than a tile has;
# rows of one chunk, of whole ones and of others.
PARTS = (
    *((256, 4096, 1), (4096, 16384, 1), (1, 16, 1), (7, 16, 1), (100, 4112, 1), (129, 2048, 1)),
    *((1000, 656, 1), (256, 4096, 2), (130, 48, 3), (5, 16400, 4), (300, 6000, 1), (65, 2064, 2)),
)


@pytest.fixture(scope="module")
def ffi():
    return pytest.importorskip("pk_jax._ffi")


def _walks(ffi, n, part, num_n=3, num_blocks=5, tile_rows=128, **kwargs):
    rows, row_bytes, outer = part
    sizes = {"num_n": num_n, "num_blocks": num_blocks, "tile_rows": tile_rows, "outer": outer}
    return [ffi.gather_walk(rows, row_bytes, rank, n, **sizes, **kwargs) for rank in range(n)]


def _pieces(sent, to):
    """Of those for one peer: number -> (first row, end, first byte, end)."""
    return {
        number: (row, row + rows, col, col + cols)
        for peer, number, (row, col, rows, cols), _ in sent
        if peer == to
    }


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
def test_a_tile_waits_for_a_chunk_of_its_rows_before_it_reads_it(ffi, n, part):
    """For each piece that has bytes of them, and for no other."""
    rows, row_bytes, outer = part
    walks = _walks(ffi, n, part)
    for rank, (blocks, _, chunk_bytes) in enumerate(walks):
        pieces = {source: _pieces(walks[source][1], rank) for source in range(n) if source != rank}
        for first, end, _, own, waited in itertools.chain.from_iterable(blocks):
            if own:
                continue
            assert len(waited) == -(-row_bytes // chunk_bytes)
            stretches = {row // rows for row in range(first, end)}
            for chunk, got in enumerate(waited):
                wanted = []
                for stretch in sorted(stretches):
                    o, source = divmod(stretch, n)
                    here = max(first - stretch * rows, 0), min(end - stretch * rows, rows)
                    top, bottom = (o * rows + row for row in here)
                    wanted += [
                        (source, number)
                        for number, (row, past, col, _) in pieces[source].items()
                        if row < bottom and past > top and col == chunk * chunk_bytes
                    ]
                assert sorted(map(tuple, got)) == sorted(wanted)
    assert outer * rows > 0


def test_chunks_are_whole_steps(ffi):
    """Or all of a row; and wide enough for the link where the rows are."""
    for row_bytes in (*range(16, 9000, 16), 14336, 16384, 131072, 131088):
        _, _, chunk = ffi.gather_walk(64, row_bytes, 0, 2, 1, 1)
        assert chunk == row_bytes if chunk >= row_bytes else chunk % 128 == 0
        assert min(row_bytes, 2048) <= chunk <= 4096


def test_mover_and_watcher_count_the_same_chunks(ffi):
    """One counts steps of 64 columns, the other bytes; with few flags chunks are wider."""
    for k in (1, 8, 63, 64, 65, 1000, 2047, 2048, 2049, 3000, 6208, 7168, 20480):
        for outer in (1, 3000):
            blocks, _, chunk = ffi.gather_walk(1, 2 * (k + -k % 8), 0, 2, 1, 1, outer=outer)
            by_mover = range(0, -(-k // 64), -(-chunk // 128))
            watched = {len(chunks) for *_, own, chunks in blocks[0] if not own}
            assert watched == {len(by_mover)}, (k, outer)
            # For which there are flags, unless there are many matrices.
            assert outer > 1 or model.num_chunks(k) == len(by_mover), k


@pytest.mark.parametrize("n", (1, 2, 3, 8))
@pytest.mark.parametrize("part", (*PARTS, (1 << 19, 32768, 1), (16, 8192, 500)), ids=str)
@pytest.mark.parametrize("small", (False, True))
def test_each_peer_gets_each_piece_once_and_the_next_to_use_them_is_first(ffi, n, part, small):
    rows, row_bytes, outer = part
    for rank in range(n) if rows < 1 << 19 else (n - 1,):
        _, sent, _ = ffi.gather_walk(
            rows, row_bytes, rank, n, 1, 1, small_pieces=small, outer=outer
        )
        order = [(rank - turn) % n for turn in range(1, n)]
        count = len(sent) // max(n - 1, 1)
        assert count <= 16384 // n  # flags
        assert [to for to, *_ in sent] == [to for to in order for _ in range(count)]
        for to in order:
            pieces = _pieces(sent, to)
            assert sorted(pieces) == list(range(count))
            assert pieces == _pieces(sent, order[0])
            area = sum((end - row) * (past - col) for row, end, col, past in pieces.values())
            assert area == outer * rows * row_bytes


# Of one wide row, of more matrices than flags for their chunks, of rows that a stage has many of.
MOVED = (*PARTS, (3, 131072, 1), (2, 40960, 3000), (5000, 16, 1), (33, 6000, 2), (700, 3072, 1))


@pytest.mark.parametrize("part", MOVED, ids=str)
@pytest.mark.parametrize("small", (False, True))
def test_moves_are_each_byte_once_and_fit_a_stage(ffi, part, small):
    rows, row_bytes, outer = part
    _, sent, _ = ffi.gather_walk(
        rows, row_bytes, 1, 3, 1, 1, small_pieces=small, outer=outer, moves=True
    )
    moved = np.zeros((outer * rows, row_bytes // 16), np.int8)
    for to, _, (top, left, height, width), moves in sent:
        if to != 0:
            continue
        of_piece = 0
        for row, col, count, cols in moves:
            assert 0 <= count * cols <= 16384
            assert col % 16 == 0 and cols % 16 == 0
            if count * cols == 0:
                continue
            if cols > row_bytes - col:  # whole rows, as one
                assert (col, count, cols % row_bytes) == (0, 1, 0)
                count, cols = cols // row_bytes, row_bytes
            assert top <= row and row + count <= top + height
            assert left <= col and col + cols <= left + width
            assert row // rows == (row + count - 1) // rows  # of one matrix
            moved[row : row + count, col // 16 : (col + cols) // 16] += 1
            of_piece += count * cols
        assert of_piece == height * width
    assert (moved == 1).all()


def test_pieces_have_bytes_for_the_link_and_flags_for_the_tiles(ffi):
    """16 KiB at least where there are as many, 128 KiB at most; few bytes are in many pieces."""
    for rows, row_bytes, small, want in (
        *((4096, 16384, False, (32, 4096)), (1024, 8192, False, (16, 4096))),
        *((256, 16384, False, (8, 4096)), (64, 16384, False, (4, 4096))),
        *((4096, 16384, True, (4, 4096)), (4096, 512, False, (32, 512)), (8, 16, True, (8, 16))),
        *((4096, 14336, False, (32, 3584)), (4096, 6144, False, (32, 3072))),
    ):
        _, sent, _ = ffi.gather_walk(rows, row_bytes, 0, 2, 5, 108, small_pieces=small)
        assert tuple(sent[0][2][2:]) == want, (rows, row_bytes, small)


@pytest.mark.parametrize("part", ((4096, 16384, 1), (1024, 8192, 3), (300, 6000, 1)), ids=str)
def test_pieces_come_in_the_order_in_which_tiles_need_them(ffi, part):
    """Of one group of bands all of a chunk, then the next chunk; then the next group."""
    rows, row_bytes, outer = part
    blocks, _, chunk_bytes = ffi.gather_walk(rows, row_bytes, 1, 2, 5, 9, outer=outer)
    _, sent, _ = ffi.gather_walk(rows, row_bytes, 0, 2, 5, 9, outer=outer)
    came = {number: i for i, (_, number, _, _) in enumerate(sent)}
    others = [tile for tiles in blocks for tile in tiles if not tile[3]]
    firsts = sorted({first for first, *_ in others})
    height = 16 if rows == 4096 else 12 if rows == 1024 else 3  # rows of tiles in a band
    assert len(firsts) == outer * -(-rows // 128)
    last = {  # when all of a band's pieces of a chunk are there
        (firsts.index(first) // height, chunk): 0
        for first, *_ in others
        for chunk in range(-(-row_bytes // chunk_bytes))
    }
    for first, _, _, _, waited in others:
        for chunk, pieces in enumerate(waited):
            at = firsts.index(first) // height, chunk
            last[at] = max(last[at], *(came[number] for _, number in pieces))
    assert list(last.values()) == sorted(last.values())
    share = len(sent) / len(last)
    assert all(
        abs(last[at] + 1 - (i + 1) * share) <= share / 2 for i, at in enumerate(sorted(last))
    )


def test_every_piece_that_comes_is_waited_for(ffi):
    """Else a rank could end the call, and XLA reuse its memory, while a peer still writes."""
    rng = random.Random(0)
    for _ in range(50):
        n, rows, outer = rng.randint(2, 8), rng.randint(1, 600), rng.choice((1, 1, 2, 5))
        part = (rows, 16 * rng.randint(1, 600), outer)
        walks = _walks(
            *(ffi, n, part, rng.randint(1, 4), rng.randint(1, 20), rng.choice((64, 128))),
            small_pieces=rng.random() < 0.5,
        )
        for rank, (tiles, _, _) in enumerate(walks):
            waited = {
                (source, piece)
                for *_, chunks in itertools.chain.from_iterable(tiles)
                for source, piece in itertools.chain.from_iterable(chunks)
            }
            coming = {
                (source, piece)
                for source, (_, sent, _) in enumerate(walks)
                for to, piece, *_ in sent
                if to == rank
            }
            assert waited == coming, (n, part)


def test_flags_do_not_depend_on_the_number_of_blocks(ffi):
    """Ranks may run with different numbers: only the order in which pieces come is another."""
    for part in PARTS:
        rows, row_bytes, outer = part
        few, many = (
            ffi.gather_walk(rows, row_bytes, 0, 3, 1, blocks, outer=outer, band_rows=1)[1]
            for blocks in (1, 132)
        )
        assert _pieces(few, 2) == _pieces(many, 2)


def test_bands_end_with_the_own_rows(ffi):
    """Else the first wave would wait for peers: 8 rows of tiles are one band, 32 are two."""
    for rows in (1024, 4096):
        blocks, _, _ = ffi.gather_walk(rows, 4096, 1, 8, 9, 1)
        own = [own for *_, own, _ in blocks[0]]
        assert own == [True] * (rows // 128 * 9) + [False] * (7 * rows // 128 * 9)

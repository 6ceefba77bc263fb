"""The kernels' tile walks cover every byte exactly once, in pieces of the promised size."""

import random

import pytest

pytestmark = pytest.mark.without_jax

SHAPES = [
    (rows, inner)
    for rows in (1, 2, 7, 1000)
    for inner in (1, 16, 100, 127, 4096, 16384, 16400, 65536, 99_999, 1_000_003)
]


@pytest.fixture(scope="module")
def ffi():
    return pytest.importorskip("pk_jax._ffi")


def check(tiles, rows, inner, most):
    position = 0
    for row, col, num_rows, num_cols in tiles:
        assert row * inner + col == position  # in order, with no gap and no overlap
        assert 0 < num_rows * num_cols <= most
        assert num_rows == 1 or (col == 0 and num_cols == inner)
        assert col % 128 == 0 and col + num_cols <= inner
        position += num_rows * num_cols
    assert position == rows * inner


@pytest.mark.parametrize("rows, inner", SHAPES)
@pytest.mark.parametrize("tile_bytes", (16 << 10, 32 << 10))
def test_tiles(ffi, rows, inner, tile_bytes):
    tiles = ffi.row_tiles(rows, inner, tile_bytes)
    check(tiles, rows, inner, tile_bytes)
    if inner > tile_bytes:  # no slivers: parts of a row are about equally wide
        widths = [num_cols for _, _, _, num_cols in tiles]
        parts = -(-inner // max(widths))
        assert max(widths) - min(widths) <= 128 * parts


@pytest.mark.parametrize("rows, inner", [*SHAPES, (1, 1 << 30), (4096, 1 << 20), (3, 40_000_000)])
def test_chunks(ffi, rows, inner):
    limits = ffi.build_info()["limits"]
    chunks = ffi.chunk_walk(rows, inner)
    check(chunks, rows, inner, limits["chunk_bytes_max"])
    largest = max(num_rows * num_cols for _, _, num_rows, num_cols in chunks)
    # No chunk has more tiles than the first: the drain sizes its walk by it.
    assert largest == chunks[0][2] * chunks[0][3]


def _matmul_walks():
    """Sizes of products, blocks, split tiles and their parts, drawn once."""
    rng = random.Random(0)
    for _ in range(400):
        num_m, num_n = rng.randint(1, 40), rng.randint(1, 20)
        steps = rng.choice((1, 2, 3, 16, 64, 97))
        blocks = rng.choice((1, 2, 3, 7, 16, 128, 132, 144))
        splits = [s for s in (2, 4, 8) if blocks % s == 0 and s <= steps]
        rest = num_m * num_n % blocks
        splits = [s for s in splits if 0 < rest * s <= blocks]
        split = rng.choice(splits) if splits else 1
        rest = rest if split > 1 else 0
        yield (
            num_m,
            num_n,
            steps,
            blocks,
            rest,
            split,
            rng.choice((8, 16, 32)),
        )


def test_matmul_walk_does_every_step_once(ffi):
    for sizes in _matmul_walks():
        num_m, num_n, steps, *_ = sizes
        done = [
            (m, n, step)
            for parts in ffi.matmul_walk(*sizes)
            for m, n, begin, end in parts
            for step in range(begin, end)
        ]
        assert len(done) == num_m * num_n * steps, sizes
        assert set(done) == {
            (m, n, k) for m in range(num_m) for n in range(num_n) for k in range(steps)
        }, sizes


def test_plans_that_no_walk_can_follow(ffi):
    """The launchers refuse them. 4 x 3 tiles: 10 blocks make one each, then 2 in 2 parts each."""
    plan = {"num_m": 4, "num_n": 3, "num_steps": 8, "num_blocks": 10, "split_tiles": 2, "split": 4}
    assert ffi.matmul_walk(**plan | {"split": 2})
    for wrong in (
        {},  # 10 blocks are no whole clusters of 4
        {"split": 2, "num_blocks": 0},
        {"split": 2, "num_blocks": 4},  # 10 whole tiles are no whole waves
        {"split": 2, "split_tiles": 12},  # more parts than blocks
        {"split": 2, "split_tiles": -1},
        {"split": 2, "split_tiles": 13},
        {"split": 5},
        {"split": 2, "num_steps": 1},
        {"split": 1, "split_tiles": 0, "num_m": 1 << 30},
    ):
        with pytest.raises(ValueError, match="cannot share"):
            ffi.matmul_walk(**plan | wrong)


def test_matmul_walk_splits_last_and_within_clusters(ffi):
    splits = 0
    for sizes in _matmul_walks():
        steps, split = sizes[2], sizes[5]
        parts_of = {}  # who makes parts of a tile, in the order of k
        for block, parts in enumerate(ffi.matmul_walk(*sizes)):
            for i, (m, n, begin, end) in enumerate(parts):
                if (begin, end) != (0, steps):
                    assert i == len(parts) - 1, sizes
                    parts_of.setdefault((m, n), []).append((begin, block))
        for parts in parts_of.values():
            blocks = [block for _, block in sorted(parts)]
            # One cluster, in the order of its blocks, which is that of the sum.
            assert blocks[0] % split == 0, sizes
            assert blocks == list(range(blocks[0], blocks[0] + split)), sizes
            splits += 1
    assert splits > 100


def test_matmul_walk_goes_by_bands(ffi):
    # Down a band of 16 rows, then the next column, then the next band.
    (tiles,) = ffi.matmul_walk(18, 2, 1, 1)
    assert [tuple(t[:2]) for t in tiles[15:18]] == [(15, 0), (0, 1), (1, 1)]
    assert [tuple(t[:2]) for t in tiles[-4:]] == [(16, 0), (17, 0), (16, 1), (17, 1)]

"""The kernels' tile walks cover every byte exactly once, in pieces of the promised size."""

import pytest

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

"""all_gather_matmul's plans, and the custom calls that its operands become."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pk_jax._primitives.all_gather_matmul_call import call, why_not
from pk_jax._tuning import all_gather_matmul_model as model
from pk_jax._tuning import matmul_model
from pk_jax._tuning.hardware import H200

# (rows of all ranks, columns, k) of two ranks, and the SMs that a plan may take from the product
# and cost nothing: the tiles come in as many waves on those that are left. Where four push too
# slowly and more would cost a wave, a part of every block pushes.
WAVES = (((8192, 7168, 8192), 0), ((8192, 3584, 4096), 0), ((8192, 4096, 8192), 0))


def _choose(rows, p, k, n=2, **kwargs):
    return model.choose(H200, rows // n, p, k, n, **kwargs)


@pytest.mark.parametrize("sizes, free", WAVES, ids=str)
def test_takes_no_wave_from_the_product(sizes, free):
    plan = _choose(*sizes)
    assert (plan.tile, plan.num_comm_blocks) == ("128x256", free)
    alone = _choose(*sizes, num_comm_blocks=1).seconds
    assert plan.seconds <= alone


def test_takes_none_where_four_would_cost_a_wave():
    """132 tiles of the own rows, and 132 of the peer's."""
    rows, p = 2 * 11 * 128, 12 * 256
    assert _choose(rows, p, 8192).num_comm_blocks == 0
    assert _choose(rows, p, 8192, num_comm_blocks=4).seconds > 1.1 * _choose(rows, p, 8192).seconds


def test_takes_none_where_their_entry_would_show():
    assert _choose(512, 7168, 8192, tile=(128, 256)).num_comm_blocks == 0


def test_takes_more_where_the_link_is_the_bound():
    """8192 x 1280 x 8192 is 235 us of tensor cores, and 168 us of a link that is all its own."""
    plan = _choose(8192, 1280, 8192)
    assert plan.num_comm_blocks == 16  # as long as with 8 or 24, and what fills the link
    assert plan.seconds > 4096 * 8192 * 2 / 370e9


def test_seconds_are_no_less_than_what_they_are_made_of():
    rng = np.random.default_rng(0)
    for _ in range(12):
        m, p, k = (int(2 ** rng.uniform(3, 13)) for _ in range(3))
        n = int(rng.integers(2, 9))
        for plan in model.candidates(H200, m, p, k, n):
            sent = (
                2 * (n - 1) * m * k / model.push_bandwidth(H200, plan.num_comm_blocks, H200.num_sms)
            )
            flops = 2 * n * m * p * k / (5.3e12 * H200.num_sms)
            assert plan.seconds > max(sent, flops)
            assert 0 <= plan.num_comm_blocks < plan.num_blocks <= H200.num_sms


def by_simulation(m, p, k, num_ranks, outer, tile, num_comm):
    """When the last block ends, each making its tiles one by one, and each of them chunk by chunk.

    What comes is counted in units, rows or rows of tiles, of which a part of a rank has `size`.
    """
    workers, num_n, own = 132 - num_comm, -(-p // tile.cols), outer * -(-m // tile.rows)
    others, chunks = num_ranks - 1, model.num_chunks(k)
    band = model._band(tile, own, num_n, workers)
    size, height, each = (own, band, 1) if outer > 1 else (m, band * tile.rows, tile.rows)
    bandwidth = model.push_bandwidth(H200, num_comm, 132)
    unit_s = outer * m * 2 * k / bandwidth / size
    there, begin = [], 0  # by row of tiles and chunk
    comes_at = []  # by unit: when the last one before its group has come, and how many the group is
    for _ in range(others):
        for group in range(0, size, height):
            count = min(height, size - group)
            comes_at += [(begin, count)] * count
            begin += count
    for first in range(0, len(comes_at), each):
        before, count = comes_at[min(first + each, len(comes_at)) - 1]
        there.append(
            [
                model.COMM_ENTRY_S + model.PIECE_S + (before + count * (c + 1) / chunks) * unit_s
                for c in range(chunks)
            ]
        )
    there = [[0.0] * chunks] * own + there
    tiles = [
        there[row]
        for first in range(0, len(there), band)
        for _ in range(num_n)
        for row in range(first, min(first + band, len(there)))
    ]
    free = [0.0] * workers
    tile_s = matmul_model.tile_seconds(tile, k)
    for i, at in enumerate(tiles):
        for chunk in at:
            free[i % workers] = max(free[i % workers], chunk) + tile_s / chunks
    return max(free)


def test_tiles_end_when_a_simulation_says():
    rng, decided = np.random.default_rng(0), 0
    for _ in range(60):
        m, p, k = (int(size) for size in rng.integers(1, (5000, 5000, 9000)))
        num_ranks, outer = int(rng.integers(2, 9)), int(rng.integers(1, 4))
        tile = model.TILES[rng.integers(2)]
        num_comm = int(rng.choice(model.COMM_BLOCKS[1:]))
        work = model._Work(m, p, k, num_ranks, outer, False)
        seconds = model._seconds(H200, work, tile, 132, num_comm)
        simulated = by_simulation(m, p, k, num_ranks, outer, tile, num_comm)
        assert seconds >= simulated * (1 - 1e-9)
        decided += seconds <= simulated * (1 + 1e-9)
    assert decided > 40  # else memory decides


def test_rows_that_come_in_chunks_are_waited_for_less():
    """One chunk alone is there when all of it is; of two the second is needed half a tile later."""
    tile, sizes = model.TILES[0], {"tile_rows": 128, "own": 8, "band": 8}
    for k, chunks in ((2048, 1), (2056, 2), (8192, 4), (7168, 4)):
        assert model.num_chunks(k) == chunks
        work = model._Work(1024, 1024, k, 2, 1, False)
        tile_s = matmul_model.tile_seconds(tile, k)
        for sent_s in (tile_s / 4, 4 * tile_s):
            (start,) = set(model._first_starts(work, **sizes, sent_s=sent_s, tile_s=tile_s))
            first, last = sent_s / chunks, sent_s - (1 - 1 / chunks) * tile_s
            assert start == pytest.approx(max(first, last))
    # Two groups: the second comes when the first has.
    sizes |= {"band": 4}
    starts = model._first_starts(work, **sizes, sent_s=1.0, tile_s=0.0)
    assert list(starts) == [0.5] * 4 + [1.0] * 4


def test_more_ranks_more_rows_more_time():
    times = [_choose(1024 * n, 4096, 4096, n).seconds for n in (2, 4, 8)]
    assert times == sorted(times)
    times = [_choose(rows, 4096, 4096).seconds for rows in (256, 2048, 16384)]
    assert times == sorted(times)


def test_several_matrices_cost_their_last_tiles():
    """Rows of whole tiles cost the same in several matrices, others more."""
    one, several = (_choose(8192 // outer, 4096, 4096, outer=outer).seconds for outer in (1, 8))
    assert several == pytest.approx(one, rel=0.05)
    one, several = (_choose(8000 // outer, 4096, 4096, outer=outer).seconds for outer in (1, 50))
    assert several > 1.3 * one


def test_own_rows_cost_no_less():
    for rows in (512, 8192):
        with_rows = _choose(rows, 512, 8192, own_rows=True).seconds
        assert with_rows >= _choose(rows, 512, 8192).seconds


def test_push_bandwidth_is_that_of_the_loaded_link():
    assert model.push_bandwidth(H200, 16, 132) == 334e9
    assert model.push_bandwidth(H200, 4, 132) == 96e9
    assert model.push_bandwidth(H200, 100, 132) == 334e9
    assert model.push_bandwidth(H200, 0, 132) == 2 * model.push_bandwidth(H200, 0, 66)


def test_what_is_asked_for_is_honoured_or_refused():
    plan = _choose(4096, 4096, 4096, tile=(128, 128), num_comm_blocks=7, num_sms=100)
    assert (plan.tile, plan.num_comm_blocks, plan.num_blocks) == ("128x128", 7, 100)
    with pytest.raises(ValueError, match=r"\(128, 256\) or \(128, 128\), not \(64, 64\)"):
        _choose(4096, 4096, 4096, tile=(64, 64))
    with pytest.raises(ValueError, match="num_comm_sms=132"):
        _choose(4096, 4096, 4096, num_comm_blocks=132)
    assert _choose(4096, 4096, 4096, num_comm_blocks=0).num_comm_blocks == 0
    small = dataclasses.replace(H200, num_sms=2)
    assert model.choose(small, 64, 64, 64, 2).num_comm_blocks in (0, 1)


# The custom call


def _lowered(mesh_of, x, weights, **kwargs):
    """The program for CUDA of four ranks, in two groups."""
    mesh = mesh_of(a=2, b=2)
    site = {
        "groups": np.array([0, 1, 2, 3], np.int64),
        "devices": np.array([0, 1, 2, 3], np.int64),
        "group_size": np.int64(2),
        "channel": np.int64(5),
    }
    kwargs = {"transpose_w": False, "dtype": jnp.bfloat16} | kwargs
    plan = model.Plan("128x128", 100, 6, 1e-3)
    f = functools.partial(call, site=site, plan=plan, num_sms=132, **kwargs)
    mapped = jax.shard_map(
        lambda x, *ws: f(x, ws), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in (x, *weights)]
    traced = jax.jit(mapped).trace(*shapes)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return text, jax.eval_shape(mapped, *shapes)


def _attribute(text, name):
    found = re.search(rf"\b{name} = (\"[^\"]*\"|[\w.-]+)", text)
    assert found, name
    return found[1]


def test_attributes(mesh_of):
    text, (gathered, (y,)) = _lowered(mesh_of, (3, 8, 72), [(72, 80)])
    (line,) = [line for line in text.splitlines() if "@pk_jax_all_gather_matmul(" in line]
    wanted = {
        **{"outer": "3", "m": "8", "k": "72", "p": "80", "channel": "5", "group_size": "2"},
        **{"num_blocks": "100", "num_comm_blocks": "6", "tile": '"128x128"', "own_rows": "true"},
        **{"transpose_w": "false", "mechanism": '"tma"', "protocol": '"simple"'},
    }
    assert {name: _attribute(line, name) for name in wanted} == wanted
    assert "groups = dense<[0, 1, 2, 3]>" in line and "devices = dense<[0, 1, 2, 3]>" in line
    assert "(tensor<24x72xbf16>, tensor<72x80xbf16>)" in line
    assert (gathered.shape, y.shape, y.dtype) == ((3, 16, 72), (3, 16, 80), jnp.bfloat16)


def test_rows_are_padded(mesh_of):
    """To whole 16 bytes, before and after the call."""
    text, (gathered, (y,)) = _lowered(
        mesh_of, (1, 5, 13), [(7, 13)], transpose_w=True, dtype=jnp.float32, own_rows=False
    )
    (line,) = [line for line in text.splitlines() if "@pk_jax_all_gather_matmul(" in line]
    assert "(tensor<5x16xbf16>, tensor<7x16xbf16>)" in line
    assert "(tensor<10x16xbf16>, tensor<10x8xf32>)" in line
    assert (_attribute(line, "k"), _attribute(line, "p")) == ("13", "7")
    assert (_attribute(line, "transpose_w"), _attribute(line, "own_rows")) == ("true", "false")
    assert (gathered.shape, y.shape, y.dtype) == ((1, 10, 13), (1, 10, 7), jnp.float32)


def test_the_widest_of_several_weights_is_fused(mesh_of):
    """The others follow on the gathered matrix, which must then be whole."""
    weights = [(64, 32), (64, 96), (64, 8)]
    text, (_, products) = _lowered(mesh_of, (2, 8, 64), weights, own_rows=False)
    (fused,) = [line for line in text.splitlines() if "@pk_jax_all_gather_matmul(" in line]
    assert (_attribute(fused, "p"), _attribute(fused, "own_rows")) == ("96", "true")
    others = [line for line in text.splitlines() if "@pk_jax_matmul(" in line]
    assert [_attribute(line, "n") for line in others] == ["32", "8"]
    assert all(_attribute(line, "m") == "32" for line in others)
    assert [y.shape for y in products] == [(2, 16, 32), (2, 16, 96), (2, 16, 8)]


def test_sizes_that_the_kernel_does_not_count():
    assert why_not(4, 1024, 1024, [1024], 8) is None
    assert "2147483648" in str(why_not(2, 1 << 27, 64, [64], 8))
    assert "the kernel counts to" in str(why_not(1, 16, 64, [64, 2**31 - 1], 2))
    assert "vectors of 16 bytes" in str(why_not(1, 1 << 20, 1 << 15, [64], 2))
    assert why_not(2048, 16, 64, [64], 8) is None
    assert "2049 matrices; with 8 ranks" in str(why_not(2049, 16, 64, [64], 8))

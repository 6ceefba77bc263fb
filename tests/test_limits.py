"""The limits that Python repeats are those that the compiled library was built with."""

import pytest

from pk_jax import _registry, _selection, config
from pk_jax._primitives import all_gather_matmul_call, rules
from pk_jax._tuning import cost_model, few_rows_model, hardware, matmul_reduce_model


def test_limits_of_the_library():
    if _registry.library is None:
        pytest.skip(f"no compiled library: {_registry.load_error}")
    assert _registry.library.build_info()["limits"] == {
        "ranks": _selection.MAX_RANKS,
        "channels": rules.NUM_CHANNELS,
        "ll_bytes": [0, *map(hardware.H200.ll_max_bytes, range(1, _selection.MAX_RANKS + 1))],
        "blocks": config.MAX_BLOCKS,
        "tile_flags": all_gather_matmul_call.TILE_FLAGS,
        "matmul_reduce_ranks": matmul_reduce_model.MOST_RANKS,
        "few_rows": few_rows_model.MOST_ROWS,
        "few_rows_ranks": few_rows_model.MOST_RANKS,
        "chunk_bytes_min": cost_model.CHUNK_BYTES[0],
        "chunk_bytes_max": cost_model.CHUNK_BYTES[1],
        "chunks": cost_model.CHUNKS,
    }

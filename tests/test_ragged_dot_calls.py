"""The custom call of pk.ragged_dot, on a machine where the kernels can run; its plans."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pk_jax as pk
from pk_jax import _capability, _selection
from pk_jax._primitives.ragged_dot import ragged_dot_p
from pk_jax._tuning import matmul_model, ragged_dot_model
from pk_jax.config import Config


@pytest.fixture
def call_of(can_run, lowered, calls):
    def lower(m, k, n, g, dtype="bfloat16", sizes="int32", **kwargs):
        f = functools.partial(pk.ragged_dot, **({"implementation": "cuda"} | kwargs))
        shapes = ((m, k), dtype), ((g, k, n), dtype), ((g,), sizes)
        text = lowered(f, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
        found = calls(text)
        return found[0] if found else None, text

    return lower


def test_call(call_of):
    call, text = call_of(32768, 7168, 2048, 128)
    assert call["op"] == "ragged_dot" and call["results"] == ["32768x2048xbf16"]
    assert (call["m"], call["n"], call["k"]) == (32768, 2048, 7168)
    assert call["num_groups"] == 128 and call["num_blocks"] == 132
    assert call["tile"] == "128x256" and "transpose_b = false" in text
    assert "pad" not in text and "slice" not in text and "convert" not in text
    assert set(call) == {"op", "results", "m", "n", "k", "num_groups", "tile", "num_blocks"}


def test_rows_are_padded_to_16_bytes_and_the_result_is_cut(call_of):
    call, text = call_of(3, 7, 9, 2, sizes="int16", preferred_element_type=jnp.float32)
    assert call["results"] == ["3x16xf32"] and (call["m"], call["n"], call["k"]) == (3, 9, 7)
    assert "tensor<3x8xbf16>" in text and "tensor<2x7x16xbf16>" in text
    assert "[0:3, 0:9]" in text and "tensor<2xi32>" in text


def test_transposed_matrices(can_run, lowered, calls):
    """The rows of what is stored are padded, k; n is a dimension between."""
    types = ((3, 7), (2, 9, 7))
    xs = [jax.ShapeDtypeStruct(shape, jnp.float16) for shape in types]
    params = {"dtype": np.dtype("float16"), "precision": None, "implementation": "cuda"}
    f = functools.partial(ragged_dot_p.bind, transpose_b=True, config=Config(), **params)
    text = lowered(f, *xs, jax.ShapeDtypeStruct((2,), jnp.int32))
    (call,) = calls(text)
    assert "transpose_b = true" in text and "tensor<2x9x8xf16>" in text
    assert (call["m"], call["n"], call["k"]) == (3, 9, 7) and call["results"] == ["3x16xf16"]


def test_the_gradient_of_lhs_is_a_kernel_where_a_tile_is_the_default(can_run, lowered, calls):
    xs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((32, 8), (2, 8, 16))]

    def loss(lhs, rhs, sizes):
        return jnp.sum(pk.ragged_dot(lhs, rhs, sizes))

    grad = jax.grad(lambda *xs: loss(*xs).astype(jnp.float32), (0, 1))
    with pk.use_config(tile=(64, 128)):
        text = lowered(grad, *xs, jax.ShapeDtypeStruct((2,), jnp.int32))
    (call,) = calls(text)  # the product itself is not needed
    assert (call["n"], call["k"], call["tile"]) == (8, 16, "64x128")
    assert "transpose_b = true" in text


def test_when_the_kernels_run(call_of):
    sizes = (16, 8, 8, 2)
    assert call_of(*sizes, implementation=None)[0] is None
    tile = {"implementation": None, "config": pk.Config(tile=(128, 128))}
    assert call_of(*sizes, **tile)[0]["tile"] == "128x128"
    assert call_of(*sizes, implementation="reference")[0] is None
    assert call_of(0, 8, 8, 2)[0] is None and call_of(16, 8, 8, 0)[0] is None
    with pytest.raises(NotImplementedError, match="dtype float32 has no CUDA ragged_dot"):
        call_of(*sizes, "float32")
    with pytest.raises(NotImplementedError, match="to float16 has no CUDA ragged_dot"):
        call_of(*sizes, preferred_element_type=jnp.float16)
    with pytest.raises(NotImplementedError, match="at most, got 67108864; split it"):
        call_of(2**26, 8, 8, 2)


def test_maps_of_kernels(can_run, lowered, calls, caplog):
    """A loop of kernels, but for a map over all operands."""
    f = functools.partial(pk.ragged_dot, config=pk.Config(tile=(64, 64)))
    lhs, rhs = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((3, 16, 8), (3, 2, 8, 8)))
    sizes = jax.ShapeDtypeStruct((3, 2), jnp.int32)
    one = jax.ShapeDtypeStruct((2, 8, 8), jnp.bfloat16)
    text = lowered(jax.vmap(f, (0, None, 0)), lhs, one, sizes)
    assert len(calls(text)) == 1 and "stablehlo.while" in text
    _selection._logged.clear()
    with caplog.at_level("INFO", logger="pk_jax"):
        assert not calls(lowered(jax.vmap(f), lhs, rhs, sizes))
    assert "ragged_dot takes the reference: a map over all operands" in caplog.text


def test_plans():
    assert ragged_dot_model.choose(128 * 96, 128, 132).tile == "128x256"
    assert ragged_dot_model.choose(128 * 96 - 1, 128, 132).tile == "64x256"
    assert ragged_dot_model.choose(1, 300, 78) == ragged_dot_model.Plan("64x256", 78)
    for plan, tile in zip(ragged_dot_model.candidates(132), matmul_model.TILES, strict=True):
        assert plan == ragged_dot_model.choose(5, 1, 132, (tile.rows, tile.cols))


@pytest.mark.parametrize("op", ["matmul", "ragged_dot", "psum", "attention_backward"])
def test_a_library_without_the_kernel(op):
    """It was built from other sources: nothing that could be loaded besides."""
    old = _capability.Capability(0, handlers=("pk_jax_all_gather",))
    reason = _selection.why_no_kernel(op, [old])
    assert reason == f"the extension library has no kernel for {op}; rebuild pk_jax"

"""pk.attention: what runs where, and what is refused."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_models import gradients, ids, operands
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import pk_jax as pk
from pk_jax import _selection

pair = functools.partial(pk.attention, return_residual=True)


def test_what_has_no_kernel(lowered, caplog):
    f = functools.partial(pk.attention, implementation="cuda")
    with pytest.raises(NotImplementedError, match=r"^attention: dtype float32 has no CUDA att"):
        lowered(f, *operands())
    with pytest.raises(NotImplementedError, match=r"^attention is lowered for platform 'cpu', and"):
        jax.jit(f)(*operands())
    _selection._logged.clear()
    with caplog.at_level(logging.INFO, logger="pk_jax"):
        text = [lowered(gradients(pair), *operands()) for _ in range(2)]
        lowered(functools.partial(pk.attention, implementation="reference"), *operands())
    assert "pk_jax" not in text[0]
    assert [record.message for record in caplog.records] == [
        f"{op} takes the reference: dtype float32 has no CUDA {op}; the kernels multiply "
        "('float16', 'bfloat16')"
        for op in ("attention", "attention_backward")
    ]


def shaped(*shape, dtype="float32"):
    return jnp.zeros(shape, dtype)


Q, K = shaped(2, 4, 4, 8), shaped(2, 6, 2, 8)
IDS = {"query_segment_ids": ids(2, 4), "key_value_segment_ids": ids(2, 6)}
BAD = {
    "a list": (([1.0], K, K), {}, TypeError, r"query must be an array, got \[1.0\]"),
    "integers": ((*[shaped(1, 1, 1, 1, dtype="int32")] * 3,), {}, TypeError, "int32; convert them"),
    "dtypes": ((Q, K.astype("float16"), K), {}, TypeError, "got float32, float16, float32; conv"),
    "float8": (
        [shaped(1, 1, 1, 1, dtype="float8_e4m3fn")] * 3,
        {},
        TypeError,
        "must have one dtype, of .* got float8_e4m3fn",
    ),
    "no batch": ((Q[0], K[0], K[0]), {}, ValueError, r"got shapes \(4, 4, 8\), .* query\[None\]"),
    "value": ((Q, K, K[:, 1:]), {}, ValueError, r"\(2, 6, 2, 8\) and value \(2, 5, 2, 8\) must"),
    "batch": ((Q[1:], K, K), {}, ValueError, "query has a batch of 1, .* and key one of 2"),
    "width": ((Q[..., 1:], K, K), {}, ValueError, "dimension of query, 7 of .* that of key, 8 of"),
    "heads": ((Q[:, :, 1:], K, K), {}, ValueError, "heads of query, 3 of .* value, 2 of .*repeat"),
    "no heads": ((Q, K[:, :, :0], K[:, :, :0]), {}, ValueError, "must be a multiple of .*, 0 of"),
    "window": ((Q, K, K), {"local_window_size": -1}, ValueError, "=-1 must not be negative; a que"),
    "window side": ((Q, K, K), {"local_window_size": (1, -2)}, ValueError, r"=\(1, -2\) must not"),
    "three sides": (
        (Q, K, K),
        {"local_window_size": (1, 2, 3)},
        TypeError,
        r"a pair .*\(1, 2, 3\)",
    ),
    "window of 1.5": ((Q, K, K), {"local_window_size": 1.5}, TypeError, "or None, got 1.5"),
    "one side": (
        (Q, K, K),
        {"query_segment_ids": IDS["query_segment_ids"]},
        ValueError,
        "query_segment_ids came without key_value_segment_ids; give both",
    ),
    "shape of ids": (
        (Q, K, K),
        IDS | {"key_value_segment_ids": ids(2, 5)},
        ValueError,
        r"key_value_segment_ids must be \[2, 6\], an id for each row of key .* got shape \(2, 5\)",
    ),
    "ids of floats": (
        (Q, K, K),
        IDS | {"query_segment_ids": jnp.zeros((2, 4))},
        TypeError,
        "query_segment_ids must hold integers, got dtype float32; convert them to int32",
    ),
    "dtypes of ids": (
        (Q, K, K),
        IDS | {"query_segment_ids": ids(2, 4).astype("int8")},
        TypeError,
        "must have one dtype, got int8 and int32; convert them to int32",
    ),
    "cap": (
        (Q, K, K),
        {"logits_soft_cap": 0},
        ValueError,
        "must be positive and finite, got 0.0; N",
    ),
    "cap of text": ((Q, K, K), {"logits_soft_cap": "2"}, TypeError, "that is known here, got '2'"),
    "scale": (
        (Q, K, K),
        {"scale": float("nan")},
        ValueError,
        "scale must be finite, got nan; None",
    ),
    "scales": (
        (Q, K, K),
        {"scale": jnp.ones(2)},
        TypeError,
        "scale must be .*; multiply the query",
    ),
    "complex scale": ((Q, K, K), {"scale": np.complex64(1j)}, TypeError, "scale must be a number"),
    "true scale": ((Q, K, K), {"scale": jnp.array(True)}, TypeError, "scale must be a number"),
    "huge scale": ((Q, K, K), {"scale": 10**400}, ValueError, "scale must be finite, got inf"),
    "flag": (
        (Q, K, K),
        {"is_causal": "yes"},
        TypeError,
        "is_causal must be True or False, got 'ye",
    ),
    "implementation": ((Q, K, K), {"implementation": "xla"}, ValueError, "implementation must be"),
    "knob": ((Q, K, K), {"config": pk.Config(tile=(64, 64))}, ValueError, "it has no knobs yet"),
}


@pytest.mark.parametrize("name", BAD)
def test_refusals(name):
    xs, arguments, error, text = BAD[name]
    with pytest.raises(error, match=f"attention.*{text}"):
        pk.attention(*xs, **arguments)


def test_scale_that_is_traced():
    with pytest.raises(TypeError, match=r"scale must be a number that is known here, got .*Tracer"):
        jax.jit(lambda scale: pk.attention(Q, K, K, scale=scale))(1.0)
    assert pk.attention(Q, K, K, scale=np.float32(2), logits_soft_cap=jnp.float32(3)).shape


def test_sums_that_are_not_done(mesh_of):
    def f(query):
        query = jax.lax.pcast(query, "x", to="unreduced")
        return pk.attention(query, K, K)

    mapped = jax.shard_map(f, mesh=mesh_of(x=2), in_specs=P(None, "x"), out_specs=P())
    with pytest.raises(NotImplementedError, match=r"attention: query is typed as unreduced over"):
        jax.eval_shape(mapped, Q)


def test_types_that_name_mesh_axes():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match=r"call it inside jax.shard_"):
        pk.attention(Q, K, K)

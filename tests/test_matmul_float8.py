"""pk.matmul of float8_e4m3fn on CPU devices, against the product of what the operands stand for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from product_models import check_equal, reals

import pk_jax as pk

F8 = jnp.float8_e4m3fn
SCALES = ("none", "scalars", "each", "x alone", "w alone")


def operands(*rows, k=9, n=11):
    return reals((*rows, k)).astype(F8), reals((k, n), seed=1).astype(F8)


def scales_of(kind, rows, n):
    x, w = jnp.abs(reals(rows, seed=2)) + 0.5, jnp.abs(reals((n,), seed=3)) + 0.5
    return {
        "none": {},
        "scalars": {"scale_x": jnp.float32(0.5), "scale_w": 3.0},
        "each": {"scale_x": x, "scale_w": w},
        "x alone": {"scale_x": x},
        "w alone": {"scale_w": w},
    }[kind]


def dequantised(x, w, scale_x=1.0, scale_w=1.0, bias=None, activation=None, dtype="float32"):
    """The product in fp32 of what x and w stand for."""
    scale_x = jnp.asarray(scale_x, jnp.float32)
    x = x.astype(jnp.float32) * (scale_x[..., None] if scale_x.ndim else scale_x)
    w = w.astype(jnp.float32) * jnp.reshape(jnp.asarray(scale_w, jnp.float32), (1, -1))
    y = jnp.matmul(x, w, precision="highest")
    if bias is not None:
        y += bias.astype(jnp.float32).reshape((1,) * (y.ndim - 1) + (-1,))
    return (jax.nn.silu(y) if activation == "silu" else y).astype(dtype)


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("rows", [(), (4,), (2, 3)])
def test_values(rows, kind):
    x, w = operands(*rows)
    scales = scales_of(kind, rows, 11)
    got = pk.matmul(x, w, preferred_element_type=jnp.float32, **scales)
    check_equal(got, dequantised(x, w, **scales), rtol=1e-5, atol=1e-5)


def test_the_result_is_bfloat16_unless_asked_otherwise():
    x, w = operands(4)
    assert pk.matmul(x, w).dtype == jnp.bfloat16
    for dtype in ("float16", "bfloat16", "float32"):
        got = pk.matmul(
            x,
            w,
            scale_x=0.1,
            bias=jnp.ones(11, jnp.float16),
            activation="silu",
            preferred_element_type=dtype,
        )
        want = dequantised(x, w, 0.1, bias=jnp.ones(11), activation="silu", dtype=dtype)
        check_equal(got, want, rtol=1e-5 if dtype == "float32" else 1e-2, atol=1e-6)
    # Rounded once, from a sum that does not fit in float8.
    big = jnp.full((1, 64), 448, F8)
    assert float(pk.matmul(big, big.T)[0, 0]) == float(jnp.bfloat16(64 * 448.0**2))


@pytest.mark.parametrize("activation", [None, "silu"])
def test_derivatives(activation):
    """Of the scales and the bias those of the dequantised product; of the operands rounded."""
    x, w = operands(4)
    args = (x, w, *scales_of("each", (4,), 11).values(), reals((11,), seed=4))

    def loss(f, *args):
        return jnp.sum(jnp.sin(f(*args)))

    def ours(x, w, scale_x, scale_w, bias):
        more = {"bias": bias, "activation": activation, "preferred_element_type": jnp.float32}
        return pk.matmul(x, w, scale_x=scale_x, scale_w=scale_w, **more)

    theirs = functools.partial(dequantised, activation=activation)
    got, want = (
        jax.jit(jax.grad(functools.partial(loss, f), (0, 1, 2, 3, 4)))(*args)
        for f in (ours, theirs)
    )
    assert [g.dtype for g in got] == [F8, F8, *["float32"] * 3]
    for one, other in zip(got[2:], want[2:], strict=True):
        check_equal(one, other, rtol=1e-4, atol=1e-4)
    for one, other in zip(got[:2], want[:2], strict=True):  # a step of e4m3 is an eighth
        check_equal(one, other, rtol=0.13, atol=0.02)

    def squared(f, *scales):
        return jnp.sum(
            jax.grad(functools.partial(loss, lambda *s: f(x, w, *s, args[4])))(*scales) ** 2
        )

    second = [
        jax.jit(jax.grad(functools.partial(squared, f), (0, 1)))(*args[2:4]) for f in (ours, theirs)
    ]
    for one, other in zip(*second, strict=True):
        check_equal(one, other, rtol=1e-3, atol=1e-3)


def test_gradients_of_the_operands_alone_save_no_product():
    x, w = operands(4)
    _, pull = jax.vjp(lambda x, w: pk.matmul(x, w, scale_x=2.0), x, w)
    equations = jax.make_jaxpr(pull)(jnp.ones((4, 11), jnp.bfloat16)).eqns
    products = [each for each in equations if each.primitive.name == "pk_matmul"]
    assert [each.params["dtype"] for each in products] == ["bfloat16"] * 2
    assert not any(jax.typeof(each).shape == (4, 11) for each in jax.tree.leaves(pull))


@pytest.mark.parametrize(
    ("mapped", "one"),
    [
        ((0, None, 0, None), True),
        ((1, None, None, None), True),
        ((None, 0, None, 0), True),
        ((None, 1, None, None), True),
        ((0, 0, 0, 0), False),
        ((0, None, None, 0), False),
        ((None, None, 0, None), False),
    ],
)
@pytest.mark.parametrize("each", [True, False])
def test_vmap(mapped, one, each):
    shapes = (6, 5), (5, 7), (6,) if each else (), (7,) if each else ()
    args = [
        jnp.abs(reals(shape if d is None else (*shape[:d], 4, *shape[d:]), seed=i))
        for i, (shape, d) in enumerate(zip(shapes, mapped, strict=True))
    ]
    args[:2] = [x.astype(F8) for x in args[:2]]
    more = {"preferred_element_type": jnp.float32, "bias": reals((7,), seed=9)}
    f = jax.vmap(lambda x, w, sx, sw: pk.matmul(x, w, scale_x=sx, scale_w=sw, **more), mapped)
    g = jax.vmap(lambda x, w, sx, sw: dequantised(x, w, sx, sw, bias=more["bias"]), mapped)
    check_equal(f(*args), g(*args), rtol=1e-4, atol=1e-4)
    assert str(jax.make_jaxpr(f)(*args)).count("pk_matmul_epilogue[") == one


def test_inside_shard_map_and_where_xla_cuts_the_program(mesh_of):
    mesh = mesh_of(x=4)
    x, w = operands(8)
    scales = scales_of("each", (8,), 11)

    def loss(f, x, w, scale_x, scale_w):
        return jnp.sum(f(x, w, scale_x, scale_w) ** 2)

    def ours(x, w, scale_x, scale_w):
        return pk.matmul(x, w, scale_x=scale_x, scale_w=scale_w, preferred_element_type=jnp.float32)

    mapped = jax.shard_map(ours, mesh=mesh, in_specs=(P("x"), P(), P("x"), P()), out_specs=P("x"))
    cut = jax.device_put(x, NamedSharding(mesh, P("x")))
    want = jax.grad(functools.partial(loss, dequantised), (2, 3))(x, w, *scales.values())
    for f, rows in ((mapped, x), (ours, cut)):
        got = jax.jit(jax.grad(functools.partial(loss, f), (2, 3)))(rows, w, *scales.values())
        for one, other in zip(got, want, strict=True):
            check_equal(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("keywords", "error", "words"),
    [
        (
            {"scale_x": jnp.ones((3,))},
            ValueError,
            r"of shape \(2,\) .* each row of x, got shape \(3,\)",
        ),
        ({"scale_w": jnp.ones((1, 4))}, ValueError, r"of shape \(4,\) .* each column of w"),
        (
            {"scale_w": jnp.ones(4, jnp.bfloat16)},
            TypeError,
            "scale_w must be float32, got bfloat16",
        ),
        ({"scale_x": [1.0, 2.0]}, TypeError, "scale_x must be an array"),
        (
            {"bias": jnp.ones(4, F8)},
            TypeError,
            "bfloat16 or float16 with operands of float8_e4m3fn",
        ),
        ({"config": pk.Config(tile=(128, 256))}, ValueError, r"their tiles are \(\(128, 128\), "),
    ],
)
def test_what_does_not_fit(keywords, error, words):
    with pytest.raises(error, match=f"matmul.*{words}"):
        pk.matmul(jnp.ones((2, 3), F8), jnp.ones((3, 4), F8), **keywords)


def test_scales_are_for_float8_alone():
    x = jnp.ones((2, 2), jnp.bfloat16)
    with pytest.raises(TypeError, match="goes with operands of float8_e4m3fn, got bfloat16"):
        pk.matmul(x, x, scale_w=2.0)


def test_two_dtypes_that_have_none_in_common(mesh_of):
    """Of all products, in their own words; JAX's promotion has no floats of 8 bits."""
    x, w, total = jnp.ones((4, 2), F8), jnp.ones((2, 4), jnp.bfloat16), jnp.array([2, 2])
    converted = r"convert one, as by x\.astype\('bfloat16'\)"
    found = f"x of dtype float8_e4m3fn and w of dtype bfloat16 have no common dtype.*; {converted}"
    products = {
        "all_gather_matmul": lambda x, w: pk.all_gather_matmul(x, w, "x"),
        "matmul_reduce_scatter": lambda x, w: pk.matmul_reduce_scatter(x, w, "x"),
        "matmul_all_reduce": lambda x, w: pk.matmul_all_reduce(x, w, "x"),
    }
    for op, f in products.items():
        g = jax.shard_map(f, mesh=mesh_of(x=2), in_specs=(P("x"), P()), out_specs=P("x"))
        with pytest.raises(TypeError, match=f"{op}: {found}"):
            jax.eval_shape(g, x, w)
    for first, second, words in (
        (x, w, found),
        (w.T, x.T, r"convert one, as by w\.astype\('bfloat16'\)"),
        (x, w.astype("float8_e5m2"), "convert both to a wider one"),
        (x, w.astype("int4"), "convert both to a wider one"),
        (x, np.ones((2, 4)), r"as by x\.astype\('float32'\)"),
    ):
        with pytest.raises(TypeError, match=f"matmul: .*{words}"):
            pk.matmul(first, second)
    with pytest.raises(TypeError, match=r"ragged_dot: lhs .* rhs of dtype .* by lhs\.astype"):
        pk.ragged_dot(x, jnp.ones((2, 2, 4), jnp.bfloat16), total)


def test_a_default_tile_gives_way():
    x, w = operands(4)
    with pk.use_config(tile=(128, 256)):
        assert pk.matmul(x, w).shape == (4, 11)


# The custom call, on a machine where the kernels can run.


def test_call(can_run, lowered, calls):
    """Both operands with k contiguous, in rows of 16 bytes; float16 by way of float32."""
    x, w = jax.ShapeDtypeStruct((3, 40), F8), jax.ShapeDtypeStruct((40, 9), F8)

    def f(x, w, **more):
        return pk.matmul(x, w, implementation="cuda", scale_w=jnp.ones(9), **more)

    text = lowered(f, x, w)
    (call,) = calls(text)
    assert call["results"] == ["3x16xbf16"] and (call["m"], call["n"], call["k"]) == (3, 9, 40)
    assert call["tile"] in ("64x128", "128x128")
    assert "transpose_b = true" in text and "scales = true" in text
    operands = "(tensor<3x48xf8E4M3FN>, tensor<9x48xf8E4M3FN>, tensor<1xf32>, tensor<9xf32>)"
    assert operands in text
    bias = jnp.ones(9, jnp.float16)
    text = lowered(functools.partial(f, bias=bias, preferred_element_type=jnp.float16), x, w)
    (call,) = calls(text)
    assert call["results"] == ["3x16xf32"] and "tensor<3x9xf16>" in text
    assert operands.replace(")", ", tensor<16xf32>)") in text


def test_when_the_kernels_run(can_run, lowered, calls):
    x, w = jax.ShapeDtypeStruct((8, 16), F8), jax.ShapeDtypeStruct((16, 8), F8)
    assert not calls(lowered(pk.matmul, x, w))
    asked = functools.partial(pk.matmul, implementation="cuda")
    with pytest.raises(NotImplementedError, match="to float8_e4m3fn has no CUDA matmul"):
        lowered(functools.partial(asked, preferred_element_type=F8), x, w)
    tile = functools.partial(pk.matmul, config=pk.Config(tile=(64, 128)))
    assert calls(lowered(tile, x, w))[0]["tile"] == "64x128"

    def loss(x, w):
        return jnp.sum(asked(x, w).astype(jnp.float32))

    (call,) = calls(lowered(jax.value_and_grad(loss, (0, 1)), x, w))
    assert call["results"] == ["8x8xbf16"]  # the backward pass is XLA's, in bfloat16

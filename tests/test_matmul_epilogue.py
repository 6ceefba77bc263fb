"""pk.matmul with a bias and an activation on CPU devices, against the unfused ops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from product_models import check_equal, reals

import pk_jax as pk

ACTIVATIONS = {
    None: lambda x: x,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
}


def unfused(x, w, bias=None, activation=None, dtype=None):
    y = jnp.matmul(x, w, preferred_element_type=jnp.float32)
    if bias is not None:
        y += bias.astype(jnp.float32).reshape((1,) * (y.ndim - 1) + (-1,))
    return ACTIVATIONS[activation](y).astype(dtype or x.dtype)


def operands(*rows, k=9, n=11, dtype="float32"):
    return reals((*rows, k), dtype), reals((k, n), dtype, seed=1), reals((n,), dtype, seed=2)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [None, "same", "float32"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values(dtype, bias, activation):
    """Rounded once: to the bit what the unfused ops give that keep fp32 until the end."""
    x, w, b = operands(3, 5, dtype=dtype)
    b = None if bias is None else b.astype(dtype if bias == "same" else bias)
    got = pk.matmul(x, w, bias=b, activation=activation)
    check_equal(
        got, unfused(x, w, b, activation), rtol=1e-5 if dtype == "float32" else 0, atol=1e-6
    )


def test_preferred_element_type():
    x, w, b = operands(4, dtype="bfloat16")
    got = pk.matmul(x, w, bias=b, activation="silu", preferred_element_type=jnp.float32)
    check_equal(got, unfused(x, w, b, "silu", "float32"), rtol=1e-6)


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_derivatives(activation):
    """To second order, forward and reverse, of every operand; the bias alone as well."""
    args = operands(4, k=3, n=5)

    def loss(f, *args):
        return jnp.sum(f(*args) ** 3)

    ours = functools.partial(loss, lambda x, w, b: pk.matmul(x, w, bias=b, activation=activation))
    theirs = functools.partial(loss, lambda x, w, b: unfused(x, w, b, activation))

    def derivatives(f):
        grad = jax.grad(f, (0, 1, 2))
        squared = lambda *args: sum(jnp.sum(g**2) for g in grad(*args))  # noqa: E731
        bias_alone = jax.grad(f, 2)
        both = jax.grad(squared, (0, 1, 2))
        return jax.jit(
            lambda *args: (grad(*args), both(*args), bias_alone(*args), jax.jvp(grad, args, args))
        )(*args)

    for got, want in zip(*map(jax.tree.leaves, map(derivatives, (ours, theirs))), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-4)


def test_what_is_saved_for_the_gradient():
    """The product in fp32, and only with an activation; gradients are products in 16 bits."""
    x, w, b = operands(4, k=3, n=5, dtype="bfloat16")

    def residuals(activation):
        f = functools.partial(pk.matmul, activation=activation)
        _, pull = jax.vjp(lambda x, w, b: f(x, w, bias=b), x, w, b)
        equations = jax.make_jaxpr(pull)(jnp.ones((4, 5), jnp.bfloat16)).eqns
        products = [each for each in equations if each.primitive.name == "pk_matmul"]
        assert [each.params["dtype"] for each in products] == ["bfloat16"] * 2
        return {str(jax.typeof(each)) for each in jax.tree.leaves(pull)}

    assert "float32[4,5]" not in residuals(None)
    assert "float32[4,5]" in residuals("silu")


@pytest.mark.parametrize(
    "mapped",
    [
        (0, None, None),
        (1, None, None),
        (None, 0, None),
        (None, 1, 0),
        (0, 0, 0),
        (0, None, 0),
        (None, None, 0),
    ],
)
def test_vmap(mapped):
    shapes = (6, 5), (5, 7), (7,)
    args = [
        reals(shape if d is None else (*shape[:d], 4, *shape[d:]), seed=i)
        for i, (shape, d) in enumerate(zip(shapes, mapped, strict=True))
    ]
    f = jax.vmap(lambda x, w, b: pk.matmul(x, w, bias=b, activation="gelu"), mapped)
    g = jax.vmap(lambda x, w, b: unfused(x, w, b, "gelu"), mapped)
    check_equal(f(*args), g(*args), rtol=1e-4, atol=1e-5)
    # One product, longer, where one matrix is mapped and what belongs to the other is not.
    one = mapped[:2] != (None, None) and None in mapped[:2] and mapped != (0, None, 0)
    assert str(jax.make_jaxpr(f)(*args)).count("pk_matmul_epilogue[") == one


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma, mesh_of):
    """Gradients of operands that all ranks have are sums over ranks; remat and scan go with it."""
    x, w, b = operands(8, k=5, n=5)

    def loss(matmul, x, w, b):
        specs = {"in_specs": (P("x"), P(), P()), "out_specs": P("x"), "check_vma": check_vma}
        body = lambda x, w, b: jax.lax.scan(  # noqa: E731
            jax.checkpoint(lambda y, _: (matmul(y, w, b), None)), x, length=2
        )[0]
        return jnp.sum(jax.shard_map(body, mesh=mesh_of(x=4), **specs)(x, w, b) ** 2)

    ours = lambda x, w, b: pk.matmul(x, w, bias=b, activation="silu")  # noqa: E731
    theirs = lambda x, w, b: unfused(x, w, b, "silu")  # noqa: E731
    for argnums in ((0, 1, 2), 2):
        got, want = (
            jax.jit(jax.grad(functools.partial(loss, f), argnums))(x, w, b) for f in (ours, theirs)
        )
        for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_where_xla_cuts_the_program(mesh_of):
    mesh = mesh_of(x=4)
    x, w, b = operands(8)
    x = jax.device_put(x, NamedSharding(mesh, P("x")))
    f = functools.partial(pk.matmul, activation="relu")
    check_equal(
        jax.jit(lambda x, w, b: f(x, w, bias=b))(x, w, b), unfused(x, w, b, "relu"), rtol=1e-5
    )


@pytest.mark.parametrize(
    ("keywords", "error", "words"),
    [
        (
            {"activation": "tanh"},
            ValueError,
            r"one of \['relu', 'gelu', 'silu'\] or None, got 'tanh'",
        ),
        ({"activation": jax.nn.relu}, ValueError, "call another one on the result"),
        ({"bias": jnp.ones((1, 4))}, ValueError, r"of the 4 columns of w, got shape \(1, 4\)"),
        ({"bias": jnp.ones(3)}, ValueError, r"got shape \(3,\)"),
        ({"bias": 1.0}, TypeError, "bias must be an array, got 1.0"),
        ({"bias": jnp.ones(4, jnp.float16)}, TypeError, "float32, got float16; convert it"),
    ],
)
def test_what_does_not_fit(keywords, error, words):
    with pytest.raises(error, match=f"matmul: .*{words}"):
        pk.matmul(jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 4), jnp.bfloat16), **keywords)


def test_integers_have_no_epilogue():
    with pytest.raises(TypeError, match="real floating-point operands, got int32"):
        pk.matmul(jnp.ones((2, 2), int), jnp.ones((2, 2), int), activation="relu")


def test_no_kernel_here():
    x = jnp.ones((2, 2), jnp.bfloat16)
    cuda = functools.partial(pk.matmul, activation="relu", implementation="cuda")
    with pytest.raises(NotImplementedError, match="matmul is lowered for platform 'cpu'"):
        cuda(x, x)
    with pytest.raises(NotImplementedError, match="no kernels for a map over both operands"):
        jax.vmap(cuda)(x[None], x[None])


def test_call(can_run, lowered, calls):
    """The bias is padded as columns are; the product that is saved for gradients is a call too."""
    x, w, b = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((3, 16), (16, 9), (9,)))

    def f(x, w, b):
        return pk.matmul(x, w, bias=b, activation="gelu", implementation="cuda")

    text = lowered(f, x, w, b)
    (call,) = calls(text)
    assert call["activation"] == "gelu" and call["results"] == ["3x16xbf16"]
    assert "bias = true" in text and "tensor<16xbf16>" in text

    def loss(x, w, b):
        return jnp.sum(f(x, w, b).astype(jnp.float32))

    (call,) = calls(lowered(jax.grad(loss), x, w, b))
    assert call["activation"] == "none" and call["results"] == ["3x16xf32"]

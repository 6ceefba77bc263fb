"""pk.matmul on CPU devices: values, derivatives, maps and types against jax.lax and NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import pk_jax as pk
from pk_jax import _selection
from pk_jax._primitives.matmul import matmul_p
from pk_jax.config import Config


def numbers(*shape, dtype="float32", seed=0):
    """Small integers, whose products and sums are exact in every dtype here."""
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, shape), dtype)


def exact(x, w):
    return np.asarray(x, np.complex128) @ np.asarray(w, np.complex128)


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int8", "int32", "uint8", "complex64"]
)
@pytest.mark.parametrize("rows", [(), (1,), (7,), (3, 5), (2, 0, 3)])
def test_values(rows, dtype):
    x, w = numbers(*rows, 9, dtype=dtype), numbers(9, 11, dtype=dtype, seed=1)
    if dtype == "uint8":
        x, w = x % 3, w % 3
    got = pk.matmul(x, w)
    assert got.dtype == x.dtype and got.shape == (*rows, 11)
    np.testing.assert_array_equal(np.asarray(got, np.complex128), exact(x, w))


@pytest.mark.parametrize("sizes", [(0, 3, 4), (3, 0, 4), (3, 4, 0)])
def test_no_elements(sizes):
    m, k, n = sizes
    np.testing.assert_array_equal(pk.matmul(jnp.ones((m, k)), jnp.ones((k, n))), jnp.zeros((m, n)))


def test_preferred_element_type():
    x, w = numbers(5, 64, dtype="bfloat16") * 9, numbers(64, 3, dtype="bfloat16", seed=1) * 9
    got = pk.matmul(x, w, preferred_element_type=jnp.float32)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(got, np.complex128), exact(x, w))


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("out", ["bfloat16", "float32"])
def test_transposes(transpose_a, transpose_b, out):
    """Each operand's gradient lies as the operand does, in its dtype, and is exact."""
    a, b = numbers(6, 5, dtype="bfloat16"), numbers(5, 7, dtype="bfloat16", seed=1)
    probe = numbers(6, 7, dtype=out, seed=2)

    def product(a, b):
        return matmul_p.bind(
            *(a, b),
            transpose_a=transpose_a,
            transpose_b=transpose_b,
            dtype=np.dtype(out),
            precision=None,
            implementation=None,
            config=Config(),
        )

    stored = a.T if transpose_a else a, b.T if transpose_b else b
    y, pull = jax.vjp(product, *stored)
    np.testing.assert_array_equal(np.asarray(y, np.complex128), exact(a, b))
    da, db = pull(probe)
    for got, want, like in (
        (da.T if transpose_a else da, exact(probe, b.T), a),
        (db.T if transpose_b else db, exact(a.T, probe), b),
    ):
        assert got.dtype == like.dtype
        np.testing.assert_array_equal(np.asarray(got, np.complex128), want)
    text = str(jax.make_jaxpr(pull)(probe))
    assert text.count("pk_matmul[") == 2 and "transpose[" not in text


def test_second_order_and_forward():
    x, w = numbers(2, 4, 3), numbers(3, 5, seed=1)

    def loss(matmul, x, w):
        return jnp.sum(matmul(x, w) ** 3)

    ours, theirs = (functools.partial(loss, f) for f in (pk.matmul, jnp.matmul))
    for argnum in (0, 1):
        for transform in (
            lambda f, argnum=argnum: jax.grad(lambda *xs: jnp.sum(jax.grad(f, argnum)(*xs) ** 2)),
            lambda f, argnum=argnum: jax.jacfwd(jax.grad(f), argnum),
            jax.hessian,
        ):
            got, want = (jax.jit(transform(f))(x, w) for f in (ours, theirs))
            np.testing.assert_allclose(got, want)
    _, tangent = jax.jvp(pk.matmul, (x, w), (x + 1, w - 1))
    np.testing.assert_allclose(tangent, (x + 1) @ w + x @ (w - 1))


@pytest.mark.parametrize("flags", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("mapped", [(0, None), (1, None), (2, None), (None, 0), (None, 2), (1, 0)])
def test_vmap(flags, mapped):
    def product(a, b):
        params = {"transpose_a": flags[0], "transpose_b": flags[1], "implementation": None}
        dtype = np.dtype("float32")
        return matmul_p.bind(a, b, dtype=dtype, precision=None, config=Config(), **params)

    shapes = ((5, 6) if flags[0] else (6, 5)), ((7, 5) if flags[1] else (5, 7))
    a, b = (
        numbers(*(shape if d is None else (*shape[:d], 4, *shape[d:])), seed=i)
        for i, (shape, d) in enumerate(zip(shapes, mapped, strict=True))
    )
    f = jax.vmap(product, mapped)
    want = [
        product(
            *(x if d is None else jnp.take(x, i, d) for x, d in zip((a, b), mapped, strict=True))
        )
        for i in range(4)
    ]
    np.testing.assert_array_equal(f(a, b), jnp.stack(want))
    # One product, longer; lax's batched one only where both are mapped.
    assert str(jax.make_jaxpr(f)(a, b)).count("pk_matmul[") == (None in mapped)


def test_scan_and_remat():
    x, w = numbers(4, 5), numbers(5, 5, seed=1) / 4

    def loss(matmul, x, w):
        layer = jax.checkpoint(lambda y, _: (matmul(y, w), None))
        return jnp.sum(lax.scan(layer, x, length=3)[0] ** 2)

    got, want = (
        jax.jit(jax.grad(functools.partial(loss, f), (0, 1)))(x, w) for f in (pk.matmul, jnp.matmul)
    )
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma, mesh_of):
    """The gradient of an operand that all ranks have is the sum over ranks."""
    x, w = numbers(8, 3), numbers(3, 5, seed=1)

    def loss(matmul, x, w):
        f = jax.shard_map(
            matmul,
            mesh=mesh_of(x=4),
            in_specs=(P("x"), P()),
            out_specs=P("x"),
            check_vma=check_vma,
        )
        return jnp.sum(f(x, w) ** 2)

    for argnum in (0, 1):
        got, want = (
            jax.grad(functools.partial(loss, f), argnum)(x, w) for f in (pk.matmul, jnp.matmul)
        )
        np.testing.assert_array_equal(got, want)


def test_the_result_varies_where_an_operand_does(mesh_of):
    types = []

    def f(x, w):
        for matmul in (pk.matmul, jnp.matmul):
            types.append([jax.typeof(matmul(*xs)) for xs in ((x, w), (w.T, w), (w, x.T))])
        return x

    specs = {"in_specs": (P("x"), P()), "out_specs": P("x")}
    jax.make_jaxpr(jax.shard_map(f, mesh=mesh_of(x=4), **specs))(numbers(8, 3), numbers(3, 3))
    assert types[0] == types[1]


def test_a_jitted_caller_is_traced_once():
    traces = []

    @jax.jit
    def f(x, w):
        traces.append(x)
        return pk.matmul(x, w)

    for _ in range(3):
        f(numbers(3, 4), numbers(4, 5))
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("x", "w", "error", "words"),
    [
        ((3, 4), (5, 6), ValueError, r"of x, 4 of \(3, 4\), must equal .* 5 of \(5, 6\)"),
        ((), (5, 6), ValueError, r"x must be \[\.\.\., k\] and w \[k, n\]"),
        ((3, 4), (2, 4, 6), ValueError, "got shapes"),
        ("keys", (4, 6), TypeError, "x must hold numbers, got dtype key<fry>"),
        ("list", (4, 6), TypeError, r"x must be an array, got \[\[1.0\]\] of type list"),
    ],
)
def test_what_does_not_fit(x, w, error, words):
    if isinstance(x, str):
        x = {"keys": jax.random.split(jax.random.key(0), (3, 4)), "list": [[1.0]]}[x]
    else:
        x = jnp.ones(x)
    with pytest.raises(error, match=f"matmul.*{words}"):
        pk.matmul(x, jnp.ones(w))


def test_knobs():
    x = jnp.ones((2, 2))
    assert pk.matmul(x, x, config=pk.Config(tile=(128, 256))).shape == (2, 2)
    with pytest.raises(ValueError, match=r"cannot honour config.tile=\(1, 2\): its knobs are tile"):
        pk.matmul(x, x, config=pk.Config(tile=(1, 2)))
    with pytest.raises(ValueError, match=r"cannot honour config\.num_comm_sms=4"):
        pk.matmul(x, x, config=pk.Config(num_comm_sms=4))
    with pytest.raises(ValueError, match="implementation must be"):
        pk.matmul(x, x, implementation="fast")


def test_no_kernel_here():
    x = jnp.ones((2, 2), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="matmul is lowered for platform 'cpu'"):
        pk.matmul(x, x, implementation="cuda")
    with pytest.raises(NotImplementedError, match="no kernels for a map over both operands"):
        jax.vmap(functools.partial(pk.matmul, implementation="cuda"))(x[None], x[None])


# The custom call, on a machine where the kernels can run.


@pytest.fixture
def call_of(can_run, lowered, calls):
    def lower(x, w, dtype="bfloat16", **kwargs):
        f = functools.partial(pk.matmul, **({"implementation": "cuda"} | kwargs))
        text = lowered(f, jax.ShapeDtypeStruct(x, dtype), jax.ShapeDtypeStruct(w, dtype))
        found = calls(text)
        return found[0] if found else None, text

    return lower


def test_call(call_of):
    call, text = call_of((4096, 4096), (4096, 4096))
    assert call["op"] == "matmul" and call["results"] == ["4096x4096xbf16"]
    assert (call["m"], call["n"], call["k"]) == (4096, 4096, 4096)
    assert call["split_tiles"] == 0 and call["split"] == 1
    assert "pad" not in text and "slice" not in text


def test_rows_are_padded_to_16_bytes_and_the_result_is_cut(call_of):
    call, text = call_of((3, 7), (7, 9), preferred_element_type=jnp.float32)
    assert call["results"][0] == "3x16xf32" and (call["m"], call["n"], call["k"]) == (3, 9, 7)
    assert "tensor<3x8xbf16>" in text and "tensor<7x16xbf16>" in text
    assert "[0:3, 0:9]" in text


def test_few_rows_split_k(call_of):
    call, _ = call_of((1, 3584), (3584, 8192), config=pk.Config(tile=(64, 256)))
    assert call["tile"] == "64x256" and call["split_tiles"] == 32 and call["split"] == 2
    assert call["num_blocks"] == 64 and call["results"] == ["1x8192xbf16"]


def test_when_the_kernels_run(call_of, monkeypatch):
    assert call_of((8, 8), (8, 8), implementation=None)[0] is None
    tile = {"implementation": None, "config": pk.Config(tile=(128, 128))}
    assert call_of((8, 8), (8, 8), **tile)[0]["tile"] == "128x128"
    assert call_of((8, 8), (8, 8), implementation="reference")[0] is None
    with pytest.raises(NotImplementedError, match="float32 has no CUDA matmul"):
        call_of((8, 8), (8, 8), "float32")
    with pytest.raises(NotImplementedError, match="bfloat16 times bfloat16 to float16"):
        call_of((8, 8), (8, 8), preferred_element_type=jnp.float16)
    with pytest.raises(NotImplementedError, match="at most, got 2147483640; split it"):
        call_of((2**31 - 8, 8), (8, 8))


def test_a_partitioned_program_takes_the_reference(can_run, mesh_of, lowered):
    """A custom call there would make XLA gather its operands on every device."""
    mesh = mesh_of(x=4)
    sharding = jax.sharding.NamedSharding(mesh, P("x"))
    x = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16, sharding=sharding)
    w = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="partitions this program over several devices"):
        lowered(functools.partial(pk.matmul, implementation="cuda"), x, w)
    mapped = jax.shard_map(
        functools.partial(pk.matmul, implementation="cuda"),
        mesh=mesh,
        in_specs=(P("x"), P()),
        out_specs=P("x"),
    )
    assert "@pk_jax_matmul(" in lowered(mapped, x, w)


def test_reasons_are_logged(can_run, lowered, caplog):
    _selection._logged.clear()
    x = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)
    with caplog.at_level("INFO", logger="pk_jax"):
        lowered(pk.matmul, x, x)
    assert "matmul takes the reference: the kernels are not as fast" in caplog.text

"""pk.matmul where lax has corners: dtypes, precision, meshes that XLA cuts, GPUs of all sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from product_models import check_equal, lax_matmul, reals, values

import pk_jax as pk
from pk_jax import _selection
from pk_jax._capability import Capability, Gpu

DTYPES = ("float32", "bfloat16", "float16", "complex64", "int8", "uint16", "int32", "bool")
ALL = (*DTYPES, "float8_e4m3fn", "uint8", "int16")
SPECS = (P("a"), P("a", "b"), P(None, "b"), P(None, None, "b"))


def test_operands_of_numpy():
    x, w = np.ones((2, 3), np.float64), np.ones((3, 4), np.float32)
    with jax.numpy_dtype_promotion("standard"):
        got = pk.matmul(x, w)
    assert isinstance(got, jax.Array) and got.dtype == jnp.float32
    np.testing.assert_array_equal(got, np.full((2, 4), 3))


@pytest.mark.parametrize(
    "dtypes, common",
    [
        (("bfloat16", "float32"), "float32"),
        (("float16", "bfloat16"), "float32"),
        (("bfloat16", "int8"), "bfloat16"),
        (("int8", "int32"), "int32"),
        (("float32", "complex64"), "complex64"),
        (("bool", "float16"), "float16"),
    ],
)
def test_two_dtypes(dtypes, common):
    x, w = values((3, 6), dtypes[0]), values((6, 5), dtypes[1], seed=1)
    with jax.numpy_dtype_promotion("standard"):
        got, want = pk.matmul(x, w), jnp.matmul(x, w)
    assert got.dtype == common
    check_equal(got, want)


def test_two_dtypes_are_multiplied_in_the_common_one():
    x, w = reals((3, 40), "float16"), reals((40, 5), "bfloat16", seed=1)
    with jax.numpy_dtype_promotion("standard"):
        got = pk.matmul(x, w)
    want = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)  # not rounded to bfloat16


def test_strict_promotion_refuses_two_dtypes():
    words = r"no common dtype by jax_numpy_dtype_promotion=strict; .*x\.astype\('float32'\)"
    with pytest.raises(TypeError, match=words):
        pk.matmul(jnp.ones((1, 1), jnp.bfloat16), jnp.ones((1, 1)))


@pytest.mark.parametrize("dtype", ALL)
def test_preferred_element_type(dtype):
    """What lax refuses is refused, and by the same rule; the rest has lax's value."""
    x, w = values((3, 6), dtype), values((6, 5), dtype, seed=1)
    taken = []
    for preferred in ALL:
        try:
            jax.eval_shape(functools.partial(lax_matmul, dtype=jnp.dtype(preferred)), x, w)
        except TypeError:
            with pytest.raises(TypeError) as error:
                pk.matmul(x, w, preferred_element_type=preferred)
            assert f"matmul: preferred_element_type={preferred!r} does not go with" in str(error)
            assert f"operands of dtype {dtype}" in str(error.value)
            continue
        taken.append(jnp.dtype(preferred))
    assert taken
    ours = jax.jit(lambda x, w: [pk.matmul(x, w, preferred_element_type=p) for p in taken])
    theirs = jax.jit(lambda x, w: [lax_matmul(x, w, p) for p in taken])
    for got, want in zip(ours(x, w), theirs(x, w), strict=True):
        check_equal(got, want)


@pytest.mark.parametrize("where", ["inside jit", "around it"])
def test_the_default_precision_holds_where_the_op_is_called(where, lowered):
    def f(x, w):
        with jax.default_matmul_precision("highest"):
            return pk.matmul(x, w)

    if where == "inside jit":
        text = lowered(f, reals((3, 5)), reals((5, 7)), platform="cpu")
    else:
        with jax.default_matmul_precision("highest"):
            text = lowered(pk.matmul, reals((3, 5)), reals((5, 7)), platform="cpu")
    assert "precision = [HIGHEST, HIGHEST]" in text
    gradient = jax.grad(lambda x: jnp.sum(f(x, reals((5, 7)))))
    assert "precision = [HIGHEST, HIGHEST]" in lowered(gradient, reals((3, 5)), platform="cpu")


def test_another_precision_at_lowering_does_not_count(lowered):
    x, w = reals((3, 5)), reals((5, 7))
    traced = jax.jit(pk.matmul).trace(x, w)
    with jax.default_matmul_precision("highest"):
        assert "HIGHEST" not in traced.lower().as_text()

        def f(x, w):
            with jax.default_matmul_precision(None):
                return pk.matmul(x, w)

        assert "HIGHEST" not in lowered(f, x, w, platform="cpu")


@pytest.mark.parametrize("preferred", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_with_a_result_of_another_dtype(dtype, preferred):
    x, w = reals((3, 40), dtype), reals((40, 5), dtype, seed=1)
    ct = reals((3, 5), preferred, seed=2)

    def gradients(matmul):
        y, vjp = jax.vjp(lambda x, w: matmul(x, w), x, w)
        assert y.dtype == preferred
        return vjp(ct)

    got = gradients(functools.partial(pk.matmul, preferred_element_type=preferred))
    want = gradients(functools.partial(lax_matmul, dtype=jnp.dtype(preferred)))
    # The cotangent is not rounded to the operands' dtype before it is multiplied.
    exact = (np.asarray(ct, np.float64) @ np.asarray(w, np.float64).T).astype(dtype)
    np.testing.assert_allclose(
        np.asarray(got[0], np.float64), np.asarray(exact, np.float64), rtol=1e-2, atol=1e-2
    )
    both = {"rtol": 1e-5, "atol": 1e-5} if preferred == "float32" else {"rtol": 2e-2, "atol": 2e-2}
    for one, other in zip(got, want, strict=True):
        check_equal(one, other, **both)


def test_gradients_of_two_dtypes():
    with jax.numpy_dtype_promotion("standard"):
        x, w = reals((3, 6), "bfloat16"), reals((6, 5), seed=1)
        got, want = (
            jax.grad(lambda x, w, f=f: jnp.sum(f(x, w) ** 2), (0, 1))(x, w)
            for f in (pk.matmul, jnp.matmul)
        )
        for one, other in zip(got, want, strict=True):
            check_equal(one, other, rtol=1e-2)


def test_vmap_over_nothing():
    x = jnp.zeros((0, 3, 5))
    assert jax.vmap(pk.matmul, (0, None))(x, reals((5, 7))).shape == (0, 3, 7)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_arrays_that_xla_cuts(kind, spec, mesh_of):
    """Sharding and value are lax's: dimensions are not folded where that moves data."""
    devices = mesh_of(a=2, b=2).devices
    mesh = jax.sharding.Mesh(devices, ("a", "b"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        x = jax.device_put(reals((4, 6, 8)), NamedSharding(mesh, spec))
        w = jax.device_put(reals((8, 4), seed=1), NamedSharding(mesh, P(None, None)))
        results = []
        for matmul in (pk.matmul, lax_matmul):
            loss = lambda x, w, m=matmul: jnp.sum(m(x, w) ** 2)  # noqa: E731
            results.append((jax.jit(matmul)(x, w), jax.jit(jax.grad(loss, (0, 1)))(x, w)))
        for got, want in zip(*map(jax.tree.leaves, results), strict=True):
            check_equal(got, want, rtol=1e-4)
            assert got.sharding == want.sharding
        with pytest.raises(NotImplementedError, match="matmul: XLA partitions this program"):
            pk.matmul(x, w, implementation="cuda")


def test_axes_that_are_left_to_xla(mesh_of):
    def f(implementation):
        return jax.jit(
            jax.shard_map(
                functools.partial(pk.matmul, implementation=implementation),
                mesh=mesh_of(a=2, b=2),
                in_specs=(P("a"), P()),
                out_specs=P("a"),
                axis_names={"a"},
            )
        )

    x, w = reals((4, 5)), reals((5, 3))
    check_equal(f(None)(x, w), lax_matmul(x, w), rtol=1e-5)
    with pytest.raises(NotImplementedError, match=r"matmul: the mesh axes \('b',\) are not manual"):
        f("cuda")(x, w)


@pytest.mark.parametrize("outside", ["an array", "a tracer"])
def test_weights_from_outside_the_shard_map(outside, mesh_of, can_run, lowered):
    """What is closed over names the mesh outside, whose axes are manual here."""
    mesh = mesh_of(x=4)
    w = jax.device_put(values((8, 5), "bfloat16"), NamedSharding(mesh, P()))
    x = values((8, 8), "bfloat16", seed=1)

    def f(implementation, x, w):
        body = lambda x: pk.matmul(x, w, implementation=implementation)  # noqa: E731
        return jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(x)

    if outside == "an array":
        text = lowered(lambda x: f("cuda", x, w), x)
    else:
        text = lowered(functools.partial(f, "cuda"), x, w)
    assert text.count("@pk_jax_matmul(") == 1
    check_equal(jax.jit(functools.partial(f, None))(x, w), lax_matmul(x, w))


def test_types_that_name_an_axis_of_one_device(mesh_of):
    mesh = jax.sharding.Mesh(mesh_of(x=1).devices, ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(reals((2, 4, 5)), NamedSharding(mesh, P(None, "x")))
        w = jax.device_put(reals((5, 3), seed=1), NamedSharding(mesh, P()))
        check_equal(pk.matmul(x, w), lax_matmul(x, w), rtol=1e-6)
        with pytest.raises(NotImplementedError, match="matmul: the operands' types name mesh axes"):
            pk.matmul(x, w, implementation="cuda")


class FakeGpu:
    platform, device_kind = "gpu", "NVIDIA H100 PCIe"

    def __init__(self, index):
        self.id = index


def test_sms_are_those_of_the_smallest_gpu(monkeypatch, can_run, lowered, calls):
    gpus = tuple(Gpu(i, f"gpu{i}", (9, 0), {}, num_sms=sms) for i, sms in enumerate((114, 78, 66)))
    records = [Capability(0, gpus=gpus)]
    monkeypatch.setattr(_selection._capability, "of_processes", lambda devices: records)
    assert _selection.num_sms([FakeGpu(0), FakeGpu(1)]) == 78
    assert _selection.num_sms([FakeGpu(0)]) == 114
    assert _selection.num_sms([FakeGpu(7)]) is None
    assert _selection.num_sms(jax.devices("cpu")) is None
    x = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)
    # Where the processes say nothing it is the record of the device kind: the H200's.
    for devices, sms in (([FakeGpu(0), FakeGpu(1)], 78), ([FakeGpu(7)], 132)):
        monkeypatch.setattr(jax, "local_devices", lambda backend, found=devices: found)
        (call,) = calls(lowered(lambda x, w: pk.matmul(x, w, implementation="cuda"), x, x))
        assert sms - 2 < call["num_blocks"] <= sms  # whole clusters

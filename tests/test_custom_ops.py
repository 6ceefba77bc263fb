"""pk.call_op without a library: which arguments it refuses, and what else it has to say."""

import functools
import logging
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import pk_jax as pk
from pk_jax import _registry, _selection
from pk_jax._primitives import custom, rules

IMPLEMENTATIONS = (None, "reference")


def total(x, *, axis_name, **attributes):
    return lax.psum(x, axis_name)


@pytest.fixture
def on_two(mesh_of, per_rank):
    return functools.partial(per_rank, mesh_of(x=2), x=np.ones((2, 3), np.float32))


@pytest.fixture
def refused(on_two):
    """Calls an op on two ranks, which has to raise."""

    def check(error, text, name="op", reference=total, operands=None, **kwargs):
        def f(x):
            return pk.call_op(name, reference, operands(x) if operands else (x,), "x", **kwargs)

        with pytest.raises(error, match=re.escape(text)):
            on_two(f)

    return check


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_names(refused, implementation):
    refused = functools.partial(refused, implementation=implementation)
    for name in (*_selection.OPS, "matmul", "ragged_dot", "noop"):
        refused(ValueError, f"{name!r} is pk_jax's own and no custom op", name=name)
    for name in (3, None, b"op", ["op"]):
        refused(TypeError, f"name must be a string, the name of a custom op; got {name!r}", name)


# Attributes


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("key", custom.RESERVED)
def test_attributes_that_every_call_has(refused, key, implementation):
    text = f"attribute {key!r} is one that pk_jax gives every call"
    refused(ValueError, text, implementation=implementation, **{key: 1})
    assert "axis_name" in custom.RESERVED


# Parameters of functions between call_op and XLA.
INNER = ("op", "ctx", "operands", "choice", "aliases", "attributes", "name", "self", "asked")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_attributes_of_any_other_name(can_run, mesh_of, lowered, calls, implementation):
    attributes = {name: np.int64(i) for i, name in enumerate((*INNER, "reference", "shape"))}
    seen = []

    def reference(*xs, axis_name, **attributes):
        seen.append(attributes)
        return lax.psum(xs[0], axis_name)

    def f(x):
        more = {"implementation": implementation}
        return pk.call_op("an_op", reference, (x,), "x", **attributes, **more)

    mapped = jax.shard_map(f, mesh=mesh_of(x=2), in_specs=P("x"), out_specs=P())
    text = lowered(mapped, jnp.zeros(4))
    assert seen and all(found == attributes for found in seen)
    if implementation is None:
        (call,) = calls(text, "an_op")
        assert attributes.items() <= call.items() and call["custom_op"] == "an_op"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "value, error, text",
    [
        (2**63, ValueError, "does not fit in an int64_t; pass it as an operand"),
        (-(2**63) - 1, ValueError, "does not fit in an int64_t"),
        (np.uint64(2**63), ValueError, "does not fit in an int64_t"),
        (1j, TypeError, "must not be complex; pass its real and its imaginary part"),
        (np.complex64(1), TypeError, "must not be complex"),
        (np.timedelta64(1, "s"), TypeError, "must be a number of at most 64 bits or a string"),
        (np.longdouble(1), TypeError, "must be a number of at most 64 bits or a string"),
        ([1], TypeError, "must be a number of at most 64 bits or a string"),
        (None, TypeError, "must be a number of at most 64 bits or a string"),
        (np.ones(2), TypeError, "must be a number of at most 64 bits or a string"),
    ],
    ids=repr,
)
def test_values_that_are_no_attributes(refused, value, error, text, implementation):
    refused(error, f"op: attribute v={value!r} {text}", v=value, implementation=implementation)


@pytest.mark.parametrize(
    "value, text",
    [
        (2**63 - 1, "9223372036854775807 : i64"),
        (-(2**63), "-9223372036854775808 : i64"),
        (np.uint64(3), "3 : ui64"),
        (np.int8(3), "3 : i8"),
        (True, "true"),
        (np.bool_(False), "false"),
        (0.5, "5.000000e-01 : f64"),
        (np.float32(0.5), "5.000000e-01 : f32"),
        (np.float16(0.5), "5.000000e-01 : f16"),
        ("word", '"word"'),
    ],
    ids=repr,
)
def test_values_that_are_attributes(can_run, mesh_of, lowered, value, text):
    def f(x):
        return pk.call_op("an_op", total, (x,), "x", v=value)

    mapped = jax.shard_map(f, mesh=mesh_of(x=2), in_specs=P("x"), out_specs=P())
    assert f"v = {text}" in lowered(mapped, jnp.zeros(4))


# Operands and reference


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_operands(refused, on_two, implementation):
    refused = functools.partial(refused, implementation=implementation)
    text = "op: operands must be a tuple of arrays, got one array of shape (3,); pass (x,)"
    refused(TypeError, text, operands=lambda x: x)
    refused(TypeError, text, operands=lambda x: np.ones(3))
    refused(TypeError, "operands must be a tuple of arrays, got 3", operands=lambda x: 3)
    refused(TypeError, "operands must be arrays, at least one", operands=lambda x: ())
    text = "op: operands must be arrays, got 0.5 as number 1; pass jnp.asarray of it"
    refused(TypeError, text, operands=lambda x: [x, 0.5])
    got = on_two(
        lambda x: pk.call_op("op", total, (y for y in [x]), "x", implementation=implementation)
    )
    np.testing.assert_array_equal(got, np.full((2, 3), 2))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_results_of_a_reference(refused, on_two, implementation):
    refused = functools.partial(refused, implementation=implementation)
    refused(TypeError, "reference must be a function of the operands, got None", reference=None)
    for result in (
        lambda x: [x],
        lambda x: {"a": x},
        lambda x: (x, x),
        lambda x: (x,),
        lambda x: None,
        lambda x: 1.0,
    ):
        kind = type(result(0)).__name__
        text = f"op: the reference must return one array, got a {kind}"
        refused(TypeError, text, reference=lambda x, axis_name, result=result: result(x))

    def constant(x, axis_name):
        return np.arange(3.0)

    def f(x):
        got = pk.call_op("op", constant, (x,), "x", implementation=implementation)
        assert isinstance(got, jax.Array)
        return got

    np.testing.assert_array_equal(on_two(f), [[0, 1, 2]] * 2)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_reference_without_a_hash(refused, implementation):
    class Reference(types.SimpleNamespace):
        __hash__ = None

        def __call__(self, x, *, axis_name):
            return x

    text = "op: reference must be hashable (unhashable type: 'Reference')"
    refused(TypeError, text, reference=Reference(), implementation=implementation)


def test_a_reference_of_a_traced_value(on_two):
    table = jnp.arange(3.0)

    def f(x, scale):
        def reference(x, *, axis_name):
            return lax.psum(x * scale, axis_name)

        return pk.call_op("op", reference, (x,), "x")

    with pytest.raises(TypeError, match=r"op: the reference uses float32\[3\].* as an operand"):
        on_two(lambda x: f(x, x + 1))
    np.testing.assert_array_equal(on_two(lambda x: f(x, table)), [[0, 2, 4]] * 2)


def test_derivatives(on_two):
    def f(x, implementation=None):
        return pk.call_op("op", total, (x,), "x", implementation=implementation).sum()

    text = r"op: a custom op has no derivative; wrap it in jax\.custom_vjp, or pass impl"
    with pytest.raises(NotImplementedError, match=text):
        on_two(jax.grad(f))
    with pytest.raises(NotImplementedError, match=text):
        on_two(lambda x: jax.jvp(jax.jit(f), (x,), (x,)))
    np.testing.assert_array_equal(on_two(jax.grad(lambda x: f(x, "reference"))), np.ones((2, 3)))
    got = on_two(jax.grad(lambda x: f(lax.stop_gradient(x)) + x.sum()))
    np.testing.assert_array_equal(got, np.ones((2, 3)))


# What is said


def test_a_group_of_one_rank(can_run, mesh_of, lowered, caplog, monkeypatch):
    monkeypatch.setattr(_selection, "_logged", set())

    def text(implementation, size=4, **sizes):
        def f(x):
            return pk.call_op("an_op", total, (x,), "x", implementation=implementation)

        mapped = jax.shard_map(f, mesh=mesh_of(**sizes), in_specs=P("x"), out_specs=P())
        return lowered(mapped, jnp.zeros(size))

    with caplog.at_level(logging.INFO, "pk_jax"):
        assert "pk_jax" not in text("reference", x=1) and not caplog.messages
        assert "pk_jax" not in text("cuda", size=0, x=1) and not caplog.messages
        assert "pk_jax" not in text(None, x=1)
    (message,) = caplog.messages
    assert message.startswith("an_op takes the reference: a group of one rank has no peers")
    with pytest.raises(NotImplementedError, match="an_op: a group of one rank has no peers"):
        text("cuda", x=1)
    assert "@pk_jax_an_op(" in text("cuda", x=2)


def test_a_reason_names_its_op_once():
    for op, text in (("d", "d: dtype x"), ("dtype", "dtype x"), ("dtyp", "dtyp: dtype x")):
        with pytest.raises(NotImplementedError, match=f"^{text}$"):
            rules.fall_back(op, "cuda", _selection.Decision("reference", "dtype x"))


def test_headers_that_are_not_there(tmp_path, monkeypatch):
    library = types.SimpleNamespace(__file__=str(tmp_path / "_ffi.abi3.so"))
    monkeypatch.setattr(_registry, "library", library)
    with pytest.raises(ImportError, match=r"has no headers, there is no folder .*include; "):
        pk.get_include()
    (tmp_path / "include").mkdir()
    assert pk.get_include() == str(tmp_path / "include")

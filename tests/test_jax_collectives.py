"""jax_collectives on CPU devices: who is redirected, who is not, and what is left afterwards."""

import ast
import functools
import inspect
import sys
import textwrap
import threading
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import pk_jax as pk
from pk_jax import _redirect

ORIGINALS = {name: getattr(lax, name) for name in _redirect.REDIRECTED}

# What pk's primitives are called in a jaxpr, for lax's functions on an operand of four elements.
CALLS = {
    "all_gather": (lambda m, x: m.all_gather(x, "x", tiled=True), "pk_all_gather["),
    "all_to_all": (lambda m, x: m.all_to_all(x, "x", 0, 0), "pk_all_to_all["),
    "pmax": (lambda m, x: m.pmax(x, "x"), "pk_pmax["),
    "pmean": (lambda m, x: m.pmean(x, axis_name="x"), "pk_psum["),
    "pmin": (lambda m, x: m.pmin(x, "x"), "pk_pmin["),
    "ppermute": (lambda m, x: m.ppermute(x, "x", [(0, 1), (1, 2)]), "pk_ppermute["),
    "pshuffle": (lambda m, x: m.pshuffle(x, "x", [1, 3, 0, 2]), "pk_ppermute["),
    "psum": (lambda m, x: m.psum(x, "x"), "pk_psum["),
    "psum_scatter": (lambda m, x: m.psum_scatter(x, "x", tiled=True), "pk_psum_scatter["),
    "pswapaxes": (lambda m, x: m.pswapaxes(x, "x", 0), "pk_all_to_all["),
    "ragged_all_to_all": (
        lambda m, x: m.ragged_all_to_all(x, x, *[jnp.ones(4, int)] * 4, axis_name="x"),
        "pk_ragged_all_to_all[",
    ),
}


@pytest.fixture(autouse=True)
def restored():
    yield
    assert {name: getattr(lax, name) for name in ORIGINALS} == ORIGINALS


@pytest.fixture
def library():
    """A module that calls jax.lax in both usual ways, as a library does."""
    module = types.ModuleType("some_library")
    source = """
        import jax
        from jax import lax
        from jax.lax import pmax

        def normalise(x, axis_name):
            return x / jax.lax.psum(x, axis_name) + lax.pmean(x, axis_name=axis_name)

        def largest(x, axis_name):
            return pmax(x, axis_name)
    """
    exec(textwrap.dedent(source), module.__dict__)
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


@pytest.fixture
def mapped(mesh_of):
    def make(f, num_ranks=4):
        return jax.shard_map(
            f, mesh=mesh_of(x=num_ranks), in_specs=P("x"), out_specs=P("x"), check_vma=False
        )

    return make


def traced(f, x):
    # A new function each time: nothing comes from a cache.
    return str(jax.make_jaxpr(lambda x: f(x))(x))


@pytest.mark.parametrize("name", CALLS)
def test_each_is_redirected(name, mapped):
    call, primitive = CALLS[name]
    x = jnp.arange(16.0)
    body = functools.partial(call, lax)
    outside = traced(mapped(body), x)
    with pk.jax_collectives():
        assert primitive in traced(mapped(body), x)
        inside = jax.jit(mapped(lambda x: body(x)))(x)
    assert "pk_" not in outside and traced(mapped(body), x) == outside
    if name != "ragged_all_to_all":  # which XLA's CPU does not have
        np.testing.assert_array_equal(inside, jax.jit(mapped(lambda x: body(x)))(x))


def test_all_of_them_are_tried():
    assert set(CALLS) == set(_redirect.REDIRECTED)


def test_a_library(library, mapped):
    x = jnp.arange(1.0, 17.0)
    f = mapped(lambda x: library.normalise(x, "x"))
    want = jax.jit(f)(x)
    with pk.jax_collectives():
        jaxpr = traced(f, x)
        got = jax.jit(mapped(lambda x: library.normalise(x, "x")))(x)
        bound_before = traced(mapped(lambda x: library.largest(x, "x")), x)
    assert jaxpr.count("pk_psum[") == 2 and "pk_" not in bound_before
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_jit_keeps_inside_and_outside_apart(mapped):
    traces = []

    def f(x):
        traces.append(lax.psum is not ORIGINALS["psum"])
        return lax.psum(x, "x")

    inner = jax.jit(f)
    jitted = jax.jit(mapped(lambda x: inner(x)))
    x = jnp.arange(16.0)
    want = np.tile(np.arange(16.0).reshape(4, 4).sum(0), 4)
    for _ in range(2):
        np.testing.assert_array_equal(jitted(x), want)
        with pk.jax_collectives():
            np.testing.assert_array_equal(jitted(x), want)
            assert "pk_psum" in str(jax.make_jaxpr(jitted)(x))
        assert "pk_psum" not in str(jax.make_jaxpr(jitted)(x))
    assert traces == [False, True]


def test_caches_of_control_flow_and_remat(mapped):
    @jax.checkpoint
    def body(c, _):
        return lax.psum(c, "x"), None

    f = mapped(lambda x: lax.scan(body, x, None, length=2)[0])
    x = jnp.arange(16.0)
    assert "pk_psum" not in traced(f, x)
    with pk.jax_collectives():
        assert "pk_psum[" in traced(f, x)
    assert "pk_psum" not in traced(f, x)


def test_grad_and_vmap(mapped):
    def loss(x):
        f = lambda x: lax.all_gather(x, "x", tiled=True) ** 2  # noqa: E731
        return jnp.sum(mapped(lambda x: jax.vmap(f)(x.reshape(2, 2)).reshape(-1))(x) ** 2)

    x = jnp.arange(16.0)
    want = jax.grad(loss)(x)
    with pk.jax_collectives():
        text = traced(jax.grad(loss), x)
        got = jax.jit(jax.grad(loss))(x)
    assert "pk_all_gather[" in text and "pk_psum_scatter[" in text
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_gradient_taken_outside_of_a_function_traced_inside(mapped):
    x = jnp.arange(16.0)
    f = mapped(lambda x: lax.psum_scatter(x, "x", tiled=True))
    with pk.jax_collectives():
        _, vjp = jax.vjp(f, x)
    (got,) = vjp(jnp.arange(4.0))
    np.testing.assert_array_equal(got, np.tile(np.arange(4.0), 4))


def test_vmap_over_a_named_axis():
    x = jnp.arange(6.0).reshape(3, 2)
    with pk.jax_collectives():
        got = jax.vmap(lambda x: lax.psum(x, "i") + lax.psum(1, "i"), axis_name="i")(x)
    np.testing.assert_array_equal(got, np.tile(x.sum(0) + 3, (3, 1)))


def test_restored_after_an_exception(mapped):
    def f(x):
        lax.psum(x, "x")
        raise KeyError("of the user")

    with pytest.raises(KeyError, match="of the user"), pk.jax_collectives():
        jax.eval_shape(mapped(f), jnp.zeros(16))
    assert lax.psum is ORIGINALS["psum"]
    assert "pk_" not in traced(mapped(lambda x: lax.psum(x, "x")), jnp.zeros(16))


def test_nested(mapped):
    f = mapped(lambda x: lax.psum(x, "x"))
    x = jnp.zeros(16)
    with pk.jax_collectives():
        dispatcher = lax.psum
        with pk.jax_collectives():
            assert lax.psum is dispatcher
            assert "pk_psum[" in traced(f, x)
        assert "pk_psum[" in traced(f, x)
    # Who kept the dispatcher has lax's function.
    assert "pk_psum" not in traced(mapped(lambda x: dispatcher(x, "x")), x)


def test_decorator(mapped):
    @pk.jax_collectives()
    def f(x):
        return lax.psum(x, "x")

    x = jnp.zeros(16)
    for _ in range(2):
        assert "pk_psum[" in traced(mapped(f), x)
        assert lax.psum is ORIGINALS["psum"]


def test_other_threads_keep_lax(mapped):
    x = jnp.zeros(16)
    f = mapped(lambda x: lax.psum(x, "x"))
    entered, may_leave, texts = threading.Event(), threading.Event(), {}

    def inside():
        with pk.jax_collectives():
            texts["inside"] = traced(f, x)
            entered.set()
            may_leave.wait(60)

    thread = threading.Thread(target=inside)
    thread.start()
    assert entered.wait(60)
    texts["outside"] = traced(f, x)
    with pk.jax_collectives():
        may_leave.set()
        thread.join()
        # The other thread has left; this one has not.
        texts["still"] = traced(f, x)
    assert "pk_psum[" in texts["inside"] and "pk_psum[" in texts["still"]
    assert "pk_psum" not in texts["outside"]


def test_many_threads_leave_lax_as_it_was():
    def work():
        for _ in range(50):
            with pk.jax_collectives(), pk.jax_collectives():
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lax.psum is ORIGINALS["psum"] and _redirect._users == 0


def test_a_patch_of_someone_else_stays(mapped):
    x = jnp.zeros(16)
    seen = []
    with pk.jax_collectives():
        under = lax.psum

        def patch(*args, **kwargs):
            seen.append(args)
            return under(*args, **kwargs)

        lax.psum = patch
        assert "pk_psum[" in traced(mapped(lambda x: lax.psum(x, "x")), x)
    assert lax.psum is patch
    assert "pk_psum" not in traced(mapped(lambda x: lax.psum(x, "x")), x) and len(seen) == 2
    lax.psum = ORIGINALS["psum"]


def test_a_jax_without_one_of_the_names(mapped, monkeypatch):
    with monkeypatch.context() as patch:
        patch.delattr(lax, "pshuffle")
        with pk.jax_collectives():
            assert not hasattr(lax, "pshuffle")
            assert "pk_psum[" in traced(mapped(lambda x: lax.psum(x, "x")), jnp.zeros(16))
        assert lax.psum is ORIGINALS["psum"] and not hasattr(lax, "pshuffle")


def test_a_failure_to_enter_leaves_lax_alone(mapped, monkeypatch):
    def fail(ours, theirs):
        if theirs is ORIGINALS["ppermute"]:
            raise TypeError("no signature")
        return ours

    with monkeypatch.context() as patch:
        patch.setattr(_redirect, "_dispatcher", fail)
        with pytest.raises(TypeError, match="no signature"), pk.jax_collectives():
            pass
    assert {name: getattr(lax, name) for name in ORIGINALS} == ORIGINALS
    with pk.jax_collectives():
        assert "pk_psum[" in traced(mapped(lambda x: lax.psum(x, "x")), jnp.zeros(16))


def test_arguments_of_lax_alone_go_to_lax(mapped, monkeypatch):
    def newer(x, axis_name, *, axis_index_groups=None, fast=False):
        return x if fast else ORIGINALS["psum"](x, axis_name)

    with monkeypatch.context() as patch:
        patch.setattr(lax, "psum", newer)
        with pk.jax_collectives():
            assert "pk_" not in traced(mapped(lambda x: lax.psum(x, "x", fast=True)), jnp.zeros(16))
            assert "pk_psum[" in traced(mapped(lambda x: lax.psum(x, "x")), jnp.zeros(16))
    with pk.jax_collectives():
        with pytest.raises(TypeError, match="unexpected keyword argument 'config'"):
            lax.psum(1.0, "x", config=None)
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'axis_name'"):
            lax.psum(1.0)


def test_signatures_are_those_of_lax():
    with pk.jax_collectives():
        for name, original in ORIGINALS.items():
            assert inspect.signature(getattr(lax, name)) == inspect.signature(original)
            assert getattr(lax, name).__doc__ == original.__doc__


def test_pshuffle_of_no_permutation(mapped):
    with pk.jax_collectives(), pytest.raises(ValueError, match=r"not a permutation of 0\.\.3"):
        jax.eval_shape(mapped(lambda x: lax.pshuffle(x, "x", [0, 0, 1, 2])), jnp.zeros(16))


def test_with_use_config_and_lowering_inside(mapped):
    # Lowered inside the context, and for CUDA too: a reference that called the redirected names
    # would never end.
    x = jnp.zeros(16)
    for name, (call, _) in CALLS.items():
        f = jax.jit(mapped(functools.partial(call, lax)))
        with pk.jax_collectives(), pk.use_config(num_comm_sms=4):
            for platform in ("cpu", "cuda"):
                text = f.trace(x).lower(lowering_platforms=(platform,)).as_text()
                assert "stablehlo" in text, name


def test_no_rule_or_reference_uses_the_redirected_names():
    root = Path(pk.__file__).parent
    found = []
    for folder in ("_primitives", "_reference"):
        for path in sorted((root / folder).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if (
                    isinstance(node, ast.Attribute)
                    and node.attr in _redirect.REDIRECTED
                    and ast.unparse(node.value) in ("lax", "jax.lax")
                ):
                    found.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
                if isinstance(node, ast.ImportFrom) and node.module == "jax.lax":
                    found.append(f"{path.name}:{node.lineno}: from jax.lax import")
    assert not found, f"use pk_jax._compat.parallel: {found}"

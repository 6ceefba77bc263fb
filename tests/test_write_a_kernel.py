"""docs/write_a_kernel.md: its code is the example's, which builds, loads and means what it says.

What needs no GPU: the reference, the custom call, the way into the library and out of it again. The
kernel runs in test_gpu_write_a_kernel.py.
"""

import ctypes
import functools
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import kernel_example
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from kernel_example import in_numpy

import pk_jax as pk
from pk_jax import _selection
from pk_jax._capability import Capability

ROOT = kernel_example.ROOT
PAGE = ROOT / "docs" / "write_a_kernel.md"
if not PAGE.is_file():
    pytest.skip("needs the checkout, not just the tests", allow_module_level=True)

DTYPES = (np.float32, ml_dtypes.bfloat16)


@pytest.fixture
def op():
    return kernel_example.module().rms_norm_gather


def random(shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# The page


def blocks():
    """Language and text of each block of code of the page that is taken from a file."""
    return [
        pytest.param(language, text, id=text.strip().splitlines()[0][:40])
        for language, text in re.findall(
            r"^```(cuda|cpp|python)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
        )
    ]


@pytest.mark.parametrize("language, text", blocks())
def test_code_of_the_page_is_the_example_s(language, text):
    suffixes = {"cuda": {".cu"}, "cpp": {".cc", ".h"}, "python": {".py"}}[language]
    files = [*kernel_example.EXAMPLE.iterdir(), ROOT / "tests" / "test_gpu_write_a_kernel.py"]
    sources = [path.read_text() for path in files if path.suffix in suffixes]
    assert text.strip() and any(text in source for source in sources)


def test_page_shows_the_whole_kernel():
    shown = PAGE.read_text()
    source = (kernel_example.EXAMPLE / "rms_norm_gather.cu").read_text()
    body = re.search(r"^template [^\n]*\n__global__.*?^}$", source, re.MULTILINE | re.DOTALL)[0]
    lines = [line for line in body.splitlines() if line.strip()]
    assert len(lines) > 30 and [line for line in lines if line not in shown] == []


# The op without its kernel


@pytest.mark.parametrize("check_vma", (True, False))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ((5, 7), (1, 1), (3, 2, 33), (9,)), ids=str)
def test_reference_is_numpy(op, mesh_of, per_rank, shape, dtype, check_vma):
    x, weight = random((8, *shape), dtype), random(shape[-1:], dtype, seed=1)
    got = per_rank(mesh_of(x=8), lambda x: op(x, jnp.asarray(weight), "x", 1e-3), x, check_vma)
    want = in_numpy(x, weight, 1e-3).reshape(8 * shape[0], *shape[1:])
    assert got.dtype == dtype and got.shape == (8, *want.shape)
    eps = float(ml_dtypes.finfo(dtype).eps)
    for rank in range(8):
        np.testing.assert_allclose(np.asarray(got[rank], np.float64), want, rtol=4 * eps, atol=eps)


@pytest.mark.parametrize("axes", ("b", ("b", "a")))
def test_gradients_are_those_of_the_reference(op, mesh_of, axes):
    reference = kernel_example.module().reference
    mesh = mesh_of(a=2, b=4)
    x, weight, factor = random((8, 7)), random(7, seed=1), random((8 * 8, 7), seed=2)

    def loss(f, x, weight):
        def body(x, weight, factor):
            y = f(x, weight)
            return lax.psum((y * factor[: y.shape[0]]).sum(), ("a", "b"))

        specs = (P(("a", "b")), P(), P(("a", "b")))
        return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P())(x, weight, factor)

    ours = functools.partial(loss, lambda x, w: op(x, w, axes))
    plain = functools.partial(loss, functools.partial(reference, axis_name=axes, eps=1e-6))
    results = (jax.jit(jax.grad(f, (0, 1)))(x, weight) for f in (ours, plain))
    for got, want in zip(*results, strict=True):
        assert np.abs(want).max() > 0.1
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_the_reference_has_all_transforms(op, mesh_of, per_rank):
    def f(x):
        call = lambda x: op(x, jnp.ones(6), "x", 1e-6, "reference")  # noqa: E731
        return jax.vmap(jax.grad(lambda x: (call(x) ** 2).sum()))(x), jax.vmap(call)(x)

    x = random((2, 5, 3, 6))
    gradients, values = per_rank(mesh_of(x=2), f, x)
    assert gradients.shape == x.shape
    want = in_numpy(np.concatenate([x[0], x[1]], 1), np.ones(6), 1e-6)
    np.testing.assert_allclose(values[0], want, rtol=1e-5)


def test_under_scan_and_remat(op, mesh_of, per_rank):
    def f(x, call=lambda x: op(x, jnp.ones(6), "x")):
        return lax.scan(lambda c, _: (jax.checkpoint(call)(c)[:3] + c, None), x, length=3)[0]

    mesh, x = mesh_of(x=4), random((4, 3, 6))
    plain = functools.partial(kernel_example.module().reference, axis_name="x", eps=1e-6)
    want = per_rank(mesh, lambda x: f(x, lambda x: plain(x, jnp.ones(6))), x)
    np.testing.assert_array_equal(per_rank(mesh, f, x), want)


def test_the_example_runs(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "3"}
    script = kernel_example.module().__file__
    command = [sys.executable, "-W", "error", script]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "3 x cpu: reference",
        "largest difference from the reference: 0.0e+00",
    ]


# What XLA gets


def lowered_for_cuda(lowered, mesh, f, shape=(5, 7)):
    mapped = jax.shard_map(f, mesh=mesh, in_specs=P(mesh.axis_names), out_specs=P(mesh.axis_names))
    return lowered(mapped, jax.ShapeDtypeStruct((mesh.size * shape[0], *shape[1:]), np.float32))


def test_the_call(op, can_run, mesh_of, lowered, calls):
    def f(x):
        return pk.all_gather(op(pk.psum(x, "b"), jnp.ones(7), "b", 1e-3), "a")

    text = lowered_for_cuda(lowered, mesh_of(a=2, b=2), f)
    assert "eps = 1.000000e-03 : f64" in text and "stablehlo.all_gather" not in text
    psum, call, all_gather = calls(text)
    del call["eps"]  # read above: the fixture knows integers and words
    assert (psum["channel"], all_gather["channel"]) == (0, 0)
    assert call == {
        "op": "rms_norm_gather",
        "custom_op": "rms_norm_gather",
        "results": ["10x7xf32"],
        "groups": [0, 1, 2, 3],
        "devices": [0, 1, 2, 3],
        "group_size": 2,
        "channel": 1,
        "mechanism": "register",
        "protocol": "simple",
        "num_blocks": 0,
    }


def test_without_kernels_or_elements_the_reference_runs(op, can_run, mesh_of, lowered):
    def f(x, **kwargs):
        return op(x, jnp.ones(x.shape[-1]), "x", **kwargs)

    reference = functools.partial(f, implementation="reference")
    text = lowered_for_cuda(lowered, mesh_of(x=4), reference)
    assert "stablehlo.all_gather" in text and "pk_jax" not in text
    assert "pk_jax" not in lowered_for_cuda(lowered, mesh_of(x=4), f, (5, 0))
    assert "pk_jax" not in lowered_for_cuda(lowered, mesh_of(x=1), f)


def test_an_op_that_was_not_loaded():
    other = Capability(1, handlers=("pk_jax_psum",))
    reason = _selection.why_no_kernel("rms_norm_gather", [other])
    assert reason == (
        "no library with a kernel for rms_norm_gather was loaded; call pk_jax.load_ops() in every "
        "process before its first pk op is lowered"
    )
    mine = Capability(0, handlers=("pk_jax_rms_norm_gather",))
    assert _selection.why_no_kernel("rms_norm_gather", [mine]) is None
    assert _selection.why_no_kernel("rms_norm_gather", [mine, other]) == f"process 1: {reason}"


def test_refused_arguments(op, mesh_of, per_rank):
    mesh, x = mesh_of(x=2), random((2, 3, 4))

    def refused(f, error, text):
        with pytest.raises(error, match=text):
            per_rank(mesh, f, x)

    weight = np.ones(4, np.float32)
    refused(lambda x: op(x, weight, "x", 1e-6, "cuda"), NotImplementedError, "platform 'cpu'")
    refused(lambda x: op(x, weight, "y"), NameError, "axis 'y' is not in the mesh")
    refused(lambda x: op(x, weight[:2], "x"), ValueError, "the shape of a row of x")
    refused(lambda x: op(x, weight.astype(int), "x"), TypeError, "both be float32 or both bfloat16")
    refused(
        lambda x: jax.vmap(lambda x: op(x, weight, "x"))(x[:, None]),
        NotImplementedError,
        "no rule for jax.vmap; give it one with",
    )


# The library


def test_headers_are_the_checkout_s_and_include_nothing_else():
    folder = kernel_example.headers()
    names = kernel_example.relative(folder)
    assert {"ffi/custom_op.h", "schedule/rendezvous.cuh", "tile/comm_view.h"} <= set(names)
    for name in names:
        text = (folder / name).read_text()
        root = ROOT if name.startswith("ffi/") else ROOT / "cuda"
        assert text == (root / name).read_text(), f"{name} is not the checkout's: install it again"
        included = re.findall(r'#include "([^"]+)"', text)
        assert [i for i in included if i not in names and not i.startswith("xla/")] == [], name
    for layer in ("tile", "mechanism", "schedule"):
        headers = {path.name for path in (ROOT / "cuda" / layer).glob("*.*h")}
        missing = headers - {Path(n).name for n in names}
        assert all(name.startswith("copy_engine") for name in missing), missing


@pytest.fixture
def compiled():
    """Compiles a library in C of ops by some names, which nobody calls; of none, without a list."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    own, *layout = (ctypes.c_uint32 * 7).in_dll(
        ctypes.CDLL(str(kernel_example.library())), "pk_jax_custom_ops"
    )

    def compile_(path, names, version=own, mailbox=layout[-1]):
        numbers = (version, *layout[:-1], mailbox, len(names))
        ops = ", ".join(f'{{"{name}"}}' for name in names)
        source = path.with_suffix(".c")
        source.write_text(
            f"static struct {{ const char* name; void *execute, *load; }} ops[] = {{{ops}}};\n"
            "static const void* functions;\n"
            "struct { unsigned numbers[8]; const void *ops, *functions; } pk_jax_custom_ops = "
            f"{{{{{', '.join(map(str, numbers))}}}, ops, &functions}};\n"
            if names
            else "int nothing;\n"
        )
        built = path.with_suffix(".new")
        subprocess.run([compiler, "-shared", "-fPIC", source, "-o", built], check=True)
        return built.rename(path)

    return compile_


def test_library_is_loaded_once():
    path = kernel_example.library()
    kernel_example.module()
    assert pk.load_ops(path) == ()
    copy = path.with_name("librebuilt.so")
    shutil.copy(path, copy)
    with pytest.raises(ImportError, match=f"rms_norm_gather is here already, from {path}"):
        pk.load_ops(copy)


def test_library_that_was_built_again_where_it_was(tmp_path, compiled):
    """The dynamic loader would give back the old one, also if that one was refused."""
    path = compiled(tmp_path / "lib.so", ["grown"])
    assert pk.load_ops(path) == ("grown",) and pk.load_ops(path) == ()
    compiled(path, ["grown", "added"])
    with pytest.raises(
        ImportError, match=f"{path} has changed since it was loaded; .* new process"
    ):
        pk.load_ops(path)
    path = compiled(tmp_path / "refused.so", ["grew"], version=99)
    for _ in range(2):
        with pytest.raises(ImportError, match="built for version 99"):
            pk.load_ops(path)
    compiled(path, ["grew"])
    with pytest.raises(ImportError, match="has changed since it was loaded"):
        pk.load_ops(path)
    path = tmp_path / "text.so"
    path.write_text("not a library")
    with pytest.raises(ImportError, match=r"text\.so"):
        pk.load_ops(path)
    assert pk.load_ops(compiled(path, ["mended"])) == ("mended",)


def test_handler_gets_its_call_from_pk_jax(tmp_path):
    """Through XLA on CPU: the call site is made, and its execute asks pk_jax for the communicator.

    There is none on CPU, so that is what the error has to say.
    """
    program = """
    import sys
    import jax, numpy as np
    import pk_jax as pk
    from pk_jax import _registry
    jax.devices()
    assert pk.load_ops(sys.argv[1]) == ("rms_norm_gather",)
    target = "pk_jax_rms_norm_gather"
    for name, ids in _registry.library.types().items():
        jax.ffi.register_ffi_type(name, ids, platform="cpu")
    jax.ffi.register_ffi_target(target, _registry.library.handlers()[target], platform="cpu")
    common = dict(mechanism="register", protocol="simple", eps=1e-6)
    common |= dict(groups=np.array([0]), devices=np.array([0]))
    common |= dict.fromkeys(("channel", "num_blocks"), np.int64(0)) | {"group_size": np.int64(1)}
    x, weight = np.ones((3, 5), np.float32), np.ones(5, np.float32)
    def call(**attributes):
        f = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct(x.shape, x.dtype))
        try:
            jax.block_until_ready(f(x, weight, **common | attributes))
        except jax.errors.JaxRuntimeError as error:
            print(str(error).splitlines()[-1])
    call(custom_op="rms_norm_gather")
    call(custom_op="rms_norm_gather", channel=np.int64(99))
    call(custom_op="another")
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(kernel_example.library())]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines() == [
        "pk_jax: device 0 was not initialised for this call",
        "INTERNAL: pk_jax rms_norm_gather: attribute channel is 99, not in 0..15",
        "INTERNAL: pk_jax: a call names no op that was loaded",
    ], done.stdout + done.stderr


def test_libraries_that_do_not_fit(tmp_path, compiled):
    def refused(text, *args, **kwargs):
        library = compiled(tmp_path / f"{len(list(tmp_path.iterdir()))}.so", *args, **kwargs)
        with pytest.raises(ImportError, match=text):
            pk.load_ops(library)

    refused("holds no ops: PK_JAX_CUSTOM_OPS", [])
    again = "build it again .*get_include"
    refused(rf"built for version 99 .* this is version \d+; {again}", ["other"], version=99)
    refused(f"built with headers of another pk_jax; {again}", ["other"], mailbox=1)
    refused("op other is twice in its PK_JAX_CUSTOM_OPS", ["other", "more", "other"])
    for name in (*_selection.OPS, "matmul", "ragged_dot", "noop"):
        refused(f"{name} is the name of an op of pk_jax; choose another", ["other", name])
    with pytest.raises(FileNotFoundError, match=r"at .*none\.so; build it first"):
        pk.load_ops(tmp_path / "none.so")
    with pytest.raises(FileNotFoundError, match="is a folder; name the library in it"):
        pk.load_ops(tmp_path)


def test_names_of_pk_s_own_calls_are_taken():
    kernel_example.library()  # so there are kernels
    code = "from pk_jax import _registry; print(*_registry.library.handlers())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    targets = {target.removeprefix("pk_jax_") for target in done.stdout.split()}
    assert "psum" in targets and targets <= _selection.TAKEN

"""What all_gather becomes for CUDA, without a GPU: the text of the module that XLA would get.

The selection is made to say "cuda", as it would on a machine that can; what is checked is the
custom call's side of the contract with ffi/: groups, devices, view, channel, mechanism, protocol.
"""

import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pk_jax as pk
from pk_jax import _selection

TARGET = "pk_jax_all_gather"


@pytest.fixture
def call_of(mesh_of, lowered, calls):
    """The one custom call of all_gather on a rank's part of a shape."""

    def lower(shape, dtype="float32", axis_name="x", sizes=None, order=None, **kwargs):
        mesh = mesh_of(order=order, **(sizes or {"x": 4}))
        mapped = jax.shard_map(
            lambda x: pk.all_gather(x[0], axis_name, **kwargs)[None],
            mesh=mesh,
            in_specs=P(mesh.axis_names),
            out_specs=P(mesh.axis_names),
        )
        text = lowered(mapped, jax.ShapeDtypeStruct((mesh.size, *shape), dtype))
        (call,) = calls(text, "all_gather")
        return call

    return lower


def test_attributes(can_run, call_of):
    call = call_of((4, 6), tiled=True)
    assert call == {
        "groups": [0, 1, 2, 3],
        "devices": [0, 1, 2, 3],
        "group_size": 4,
        "channel": 0,
        "outer": 1,
        "mechanism": "register",
        "protocol": "ll",
        "num_blocks": 0,
    }


def test_attribute_types(can_run, mesh_of, lowered):
    mapped = jax.shard_map(
        lambda x: pk.all_gather(x, "x"), mesh=mesh_of(x=4), in_specs=P("x"), out_specs=P("x")
    )
    text = lowered(mapped, jnp.zeros(8))
    (line,) = [line for line in text.splitlines() if TARGET in line]
    assert "groups = dense<[0, 1, 2, 3]> : tensor<4xi64>" in line
    assert "group_size = 4 : i64" in line and "channel = 0 : i64" in line
    assert "mhlo.backend_config = {" in line  # the form of a typed FFI call
    assert "operand_layouts = [dense<0> : tensor<1xindex>]" in line
    assert "result_layouts = [dense<[1, 0]> : tensor<2xindex>]" in line
    assert line.rstrip().endswith("(tensor<2xf32>) -> tensor<4x2xf32>")


@pytest.mark.parametrize(
    "shape, axis, tiled, outer",
    [
        ((), 0, False, 1),
        ((4, 6), 0, True, 1),
        ((4, 6), 0, False, 1),
        ((4, 6), 1, True, 4),
        ((4, 6), -1, False, 24),
        ((2, 3, 5), -1, True, 6),
    ],
)
def test_outer(shape, axis, tiled, outer, can_run, call_of):
    assert call_of(shape, axis=axis, tiled=tiled)["outer"] == outer


MIB = 1 << 20


@pytest.mark.parametrize("num_bytes", [4, 256 << 10, (256 << 10) + 4, MIB, 256 * MIB])
def test_choice_by_size(num_bytes, can_run, call_of):
    call = call_of((num_bytes // 4,))
    if num_bytes <= 256 << 10:  # the limit of four ranks
        assert (call["mechanism"], call["protocol"]) == ("register", "ll")
    else:
        assert call["protocol"] == "simple"
    if num_bytes == 256 * MIB:
        assert (call["mechanism"], call["num_blocks"]) == ("tma", 0)  # one block an SM


@pytest.mark.parametrize("mechanism", ["register", "tma", "copy_engine"])
@pytest.mark.parametrize("columns", [4, 1 << 20])
def test_mechanism_of_the_config(mechanism, columns, can_run, call_of):
    call = call_of((columns,), config=pk.Config(mechanism=mechanism))
    assert call["mechanism"] == mechanism
    small = mechanism == "register" and columns == 4
    assert call["protocol"] == ("ll" if small else "simple")
    with pk.use_config(mechanism=mechanism):
        assert call_of((columns,))["mechanism"] == mechanism


def test_num_comm_sms_of_the_config(can_run, call_of):
    call = call_of((1 << 22,), config=pk.Config(num_comm_sms=3))
    assert call["num_blocks"] == 3 and call["mechanism"] in ("tma", "register")


def test_num_comm_sms_of_the_copy_engine(can_run, call_of):
    call = call_of((1 << 20,), config=pk.Config(mechanism="copy_engine", num_comm_sms=3))
    assert call["num_blocks"] == 3 and call["mechanism"] == "copy_engine"


def test_tma_of_unaligned_blocks(can_run, call_of):
    config = pk.Config(mechanism="tma")
    with pytest.raises(ValueError) as error:
        call_of((4, 3), axis=1, tiled=True, config=config)
    for word in ("mechanism='tma'", "12 contiguous bytes", "multiple of 16", "copy_engine", "reg"):
        assert word in str(error.value)
    # The same bytes along the first axis are aligned, and a mere default gives way.
    assert call_of((4, 3), tiled=True, config=config)["mechanism"] == "tma"
    with pk.use_config(mechanism="tma"):
        assert call_of((4, 3), axis=1, tiled=True)["mechanism"] == "register"


def test_devices_of_the_mesh_in_context(can_run, mesh_of, lowered, calls):
    # shard_map without a mesh= sees only the axes; the devices are those of set_mesh.
    mapped = jax.shard_map(lambda x: pk.all_gather(x, "x"), in_specs=P("x"), out_specs=P("x"))
    with jax.set_mesh(mesh_of(order=[2, 0, 3, 1], x=4)):
        (call,) = calls(lowered(mapped, jax.ShapeDtypeStruct((8,), jnp.float32)), "all_gather")
    assert call["groups"] == [0, 1, 2, 3] and call["devices"] == [2, 0, 3, 1]


@pytest.mark.parametrize("names, auto", [({"a"}, ("b",)), ({"a", "b"}, ()), ({"a", "c"}, ("b",))])
def test_axes_that_are_not_manual(names, auto, mesh_of, monkeypatch, lowered):
    seen = []

    def decide(op, dtype, groups, devices, auto_axes):
        seen.append(auto_axes)
        return _selection.Decision("reference", "asked")

    monkeypatch.setattr(_selection, "decide", decide)
    mapped = jax.shard_map(
        lambda x: pk.all_gather(x, "a"),
        mesh=mesh_of(a=2, b=2, c=1),
        in_specs=P("a"),
        out_specs=P("a"),
        axis_names=names,
    )
    lowered(mapped, jnp.zeros(8))
    assert seen == [auto]


def test_text_is_the_same_in_every_process(mesh_of):
    program = textwrap.dedent("""
        import hashlib, jax, numpy as np, pk_jax as pk
        from jax.sharding import Mesh, PartitionSpec as P
        from pk_jax import _selection
        _selection.decide = lambda *args: _selection.Decision("cuda")
        def body(x):
            for i in range(3):
                x = pk.all_gather(x, ("b", "a"), tiled=True).reshape(4, -1).sum(0)
            return x
        mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
        f = jax.shard_map(body, mesh=mesh, in_specs=P("a"), out_specs=P(("a", "b")))
        text = jax.jit(f).trace(np.zeros(8, np.float32)).lower(lowering_platforms=("cuda",))
        print(hashlib.sha256(text.as_text().encode()).hexdigest())
    """)
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    }
    assert len(outputs) == 1 and len(outputs.pop().strip()) == 64


@pytest.mark.parametrize(
    "sizes, shape", [({"x": 1}, (3,)), ({"x": 4}, (0,)), ({"x": 4}, (3, 0)), ({"x": 4}, (0, 3))]
)
def test_no_call_where_nothing_moves(sizes, shape, can_run, mesh_of, lowered):
    mapped = jax.shard_map(
        lambda x: pk.all_gather(x[0], "x", implementation="cuda")[None],
        mesh=mesh_of(**sizes),
        in_specs=P("x"),
        out_specs=P("x"),
    )
    text = lowered(mapped, jnp.zeros((sizes["x"], *shape)))
    assert TARGET not in text and "all_gather" not in text.replace("jit_all_gather", "")


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_the_reference_for_cuda(implementation, mesh_of, lowered):
    # Without the fixture: this machine cannot run the kernels.
    mapped = jax.shard_map(
        lambda x: pk.all_gather(x, "x", implementation=implementation),
        mesh=mesh_of(x=4),
        in_specs=P("x"),
        out_specs=P("x"),
    )
    text = lowered(mapped, jnp.zeros(8))
    assert "stablehlo.all_gather" in text and TARGET not in text


@pytest.mark.parametrize("dtype", ["int4", "key<fry>"])
def test_dtypes_that_only_the_reference_moves(dtype, can_run, mesh_of, lowered):
    def body(implementation):
        def f(x):
            x = x.astype(dtype) if dtype == "int4" else jax.random.split(jax.random.key(0), 4)
            x = pk.all_gather(x, "x", implementation=implementation)
            words = x.astype(jnp.int8) if dtype == "int4" else jax.random.key_data(x)
            return words.ravel()

        return jax.shard_map(f, mesh=mesh_of(x=4), in_specs=P("x"), out_specs=P("x"))

    text = lowered(body(None), jnp.zeros(8, jnp.int8))
    assert TARGET not in text and "stablehlo.all_gather" in text
    with pytest.raises(NotImplementedError, match=f"all_gather: dtype {dtype} is"):
        lowered(body("cuda"), jnp.zeros(8, jnp.int8))


def test_cuda_without_known_devices(mesh_of, lowered):
    mapped = jax.shard_map(
        lambda x: pk.all_gather(x, "x", implementation="cuda"),
        mesh=mesh_of(x=4),
        in_specs=P("x"),
        out_specs=P("x"),
    )
    with pytest.raises(NotImplementedError, match="the CUDA devices are not known here"):
        lowered(mapped, jnp.zeros(8))


@pytest.mark.parametrize("abstract", [True, False])
def test_export(abstract, mesh_of):
    mesh = mesh_of(x=4)
    mapped = jax.shard_map(
        lambda x: pk.all_gather(x, "x", tiled=True),
        mesh=mesh.abstract_mesh if abstract else mesh,
        in_specs=P("x"),
        out_specs=P("x"),
    )
    x = jax.device_put(jnp.arange(8.0), jax.sharding.NamedSharding(mesh, P("x")))
    exported = jax.export.export(jax.jit(mapped), platforms=("cpu", "cuda"))(x)
    assert TARGET not in exported.mlir_module()
    np.testing.assert_array_equal(jax.jit(exported.call)(x), np.tile(x, 4))


def test_gradient_of_the_cuda_path(can_run, mesh_of, lowered, calls):
    def loss(x):
        mapped = jax.shard_map(
            lambda x: pk.all_gather(x, "x", implementation="cuda"),
            mesh=mesh_of(x=4),
            in_specs=P("x"),
            out_specs=P("x"),
        )
        return jnp.sum(mapped(x) ** 2)

    text = lowered(jax.grad(loss), jnp.zeros(8))
    assert [call["op"] for call in calls(text)] == ["all_gather", "psum_scatter"]
    second = lowered(jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2)), jnp.zeros(8))
    # The gather and, transposed twice, the gather again; and the transpose of each.
    ops = sorted(call["op"] for call in calls(second))
    assert ops == ["all_gather", "all_gather", "psum_scatter", "psum_scatter"]


def test_vmap_of_the_cuda_path(can_run, mesh_of, lowered, calls):
    mapped = jax.shard_map(
        lambda x: jax.vmap(lambda x: pk.all_gather(x, "x", axis=1, tiled=True))(x),
        mesh=mesh_of(x=4),
        in_specs=P("x"),
        out_specs=P("x"),
    )
    (call,) = calls(lowered(mapped, jnp.zeros((8, 3, 5))))
    assert call["outer"] == 2 * 3

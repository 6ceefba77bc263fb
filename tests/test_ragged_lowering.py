"""ragged_all_to_all: the custom call for CUDA, the checks of PK_JAX_CHECKS=1, and the errors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pk_jax as pk
from pk_jax import _selection

TARGET = "pk_jax_ragged_all_to_all"


@pytest.fixture
def can_run(monkeypatch):
    """The selection as on a machine where the kernels run."""
    monkeypatch.setattr(_selection, "decide", lambda *args: _selection.Decision("cuda"))


def lowered(fn, *args, platforms=("cuda",)):
    return jax.jit(fn).trace(*args).lower(lowering_platforms=platforms).as_text()


@pytest.fixture
def text_of(mesh_of):
    """The module of one call on arrays [rows, ...] of 4 ranks, for CUDA or other platforms."""

    def make(
        shape=(5, 3), places=7, k=1, dtype="float32", index="int32", platforms=("cuda",), **kw
    ):
        op = lambda *x: pk.ragged_all_to_all(*x, axis_name="x", **kw)  # noqa: E731
        mapped = jax.shard_map(op, mesh=mesh_of(x=4), in_specs=P("x"), out_specs=P("x"))
        arrays = [jnp.zeros((4 * n, *shape[1:]), dtype) for n in (shape[0], places)]
        return lowered(mapped, *arrays, *[jnp.zeros(16 * k, index)] * 4, platforms=platforms)

    return make


def calls(text):
    return [line for line in text.splitlines() if f"@{TARGET}" in line]


def attributes(line):
    body = re.search(r"backend_config = \{(.*?)\}, ", line)[1]
    return {
        name: [int(i) for i in re.findall(r"-?\d+", value.split(">")[0])]
        if value.startswith("dense")
        else value.strip('"').removesuffix(" : i64")
        for name, value in re.findall(r"(\w+) = (dense<.*?>|\"\w+\"|-?\d+)", body)
    }


def test_the_custom_call(can_run, text_of):
    (line,) = calls(text_of((5, 3), 7, dtype="bfloat16", k=2))
    assert attributes(line) == {
        "groups": [0, 1, 2, 3],
        "devices": [0, 1, 2, 3],
        "group_size": "4",
        "channel": "0",
        "row_bytes": "6",
        "checks": "0",
        "mechanism": "register",
        "protocol": "simple",
        "num_blocks": "0",
    }
    assert "output_operand_alias<output_tuple_indices = [], operand_index = 1" in line
    types = line.split(" : (")[1]
    assert types.startswith("tensor<5x3xbf16>, tensor<7x3xbf16>, " + "tensor<8xi32>, " * 3)
    assert types.endswith("-> tensor<7x3xbf16>")


def test_knobs(can_run, text_of):
    (line,) = calls(text_of(config=pk.Config(mechanism="register", num_comm_sms=5)))
    assert attributes(line)["num_blocks"] == "5"
    with pytest.raises(ValueError, match=r"mechanism='tma'.*\('register',\)"):
        text_of(config=pk.Config(mechanism="tma"))
    with pk.use_config(mechanism="copy_engine"):  # a default that does not fit gives way
        assert calls(text_of())


def test_index_arrays_of_64_bits(can_run, text_of):
    with jax.enable_x64(True):
        (line,) = calls(text_of(index="int64"))
    assert line.split(" : (")[1].count("tensor<4xi64>, ") == 3


def test_channels(can_run, mesh_of):
    def f(a, b, index):
        for _ in range(2):
            b = pk.ragged_all_to_all(a, b, index, index, index, index, axis_name="x")
        return pk.all_gather(b, "x", tiled=True)

    mapped = jax.shard_map(f, mesh=mesh_of(x=2), in_specs=P("x"), out_specs=P("x"))
    text = lowered(mapped, jnp.zeros(4), jnp.zeros(4), jnp.zeros(4, jnp.int32))
    assert [attributes(line)["channel"] for line in calls(text)] == ["0", "1"]


def test_vmap_is_one_call(can_run, mesh_of):
    op = lambda *x: pk.ragged_all_to_all(*x, axis_name="x")  # noqa: E731
    mapped = jax.shard_map(jax.vmap(op), mesh=mesh_of(x=2), in_specs=P(None, "x"), out_specs=P("x"))
    text = lowered(mapped, *[jnp.zeros((3, 10))] * 2, *[jnp.zeros((3, 4), jnp.int32)] * 4)
    (line,) = calls(text)
    assert "(tensor<15xf32>, tensor<15xf32>, tensor<6xi32>, " in line


def test_gradient_of_the_cuda_path(can_run, mesh_of):
    op = lambda *x: pk.ragged_all_to_all(*x, axis_name="x", implementation="cuda")  # noqa: E731
    mapped = jax.shard_map(op, mesh=mesh_of(x=2), in_specs=P("x"), out_specs=P("x"))
    index = [jnp.zeros(4, jnp.int32)] * 4
    grad = jax.grad(lambda a: jnp.sum(mapped(a, jnp.zeros(6), *index) ** 2))
    assert len(calls(lowered(grad, jnp.zeros(6)))) == 2


def test_where_the_kernels_cannot_run(text_of):
    # XLA has the operation for CUDA; for a module that also goes to CPU it does not.
    assert "@ragged_all_to_all" in text_of()
    assert "@ragged_all_to_all" in text_of(implementation="reference")
    for text in (text_of(platforms=("cpu",)), text_of(platforms=("cpu", "cuda"))):
        assert "@ragged_all_to_all" not in text and "stablehlo.all_gather" in text


def test_cuda_where_it_cannot_run(text_of):
    with pytest.raises(NotImplementedError, match="ragged_all_to_all"):
        text_of(implementation="cuda")
    with pytest.raises(NotImplementedError, match="ragged_all_to_all"):
        text_of(implementation="cuda", platforms=("cpu",))


@pytest.mark.parametrize("shape, places", [((0, 3), 7), ((5, 3), 0), ((5, 0), 7)])
def test_no_call_where_nothing_moves(shape, places, can_run, text_of):
    text = text_of(shape, places)
    assert not calls(text) and "@ragged_all_to_all" not in text


def test_checks_are_read_when_lowering(can_run, text_of, monkeypatch):
    monkeypatch.setenv("PK_JAX_CHECKS", "1")
    (line,) = calls(text_of())
    assert attributes(line)["checks"] == "1"
    monkeypatch.setenv("PK_JAX_CHECKS", "yes")
    with pytest.raises(ValueError, match="PK_JAX_CHECKS must be 0 or 1, got 'yes'"):
        text_of()


# Checks at run time, on CPU.


def index_arrays(**changed):
    """Two ranks that send one row to each rank, into rows 0 and 1; `name=(rank, slice, value)`."""
    index = {
        "input_offsets": [[0, 1], [0, 1]],
        "send_sizes": [[1, 1], [1, 1]],
        "output_offsets": [[0, 0], [1, 1]],
        "recv_sizes": [[1, 1], [1, 1]],
    }
    index = {name: np.array(x, np.int32) for name, x in index.items()}
    for name, (rank, i, value) in changed.items():
        index[name][rank, i] = value
    return index.values()


FAULTS = [
    (
        {"input_offsets": (1, 0, 3)},
        r"row 3 of `operand` is out of range: it has 3 rows, and rank 1 sends 1 rows with "
        r"input_offsets\[0\] = 3",
    ),
    (
        {"input_offsets": (0, 1, 2), "send_sizes": (0, 1, 2), "recv_sizes": (1, 0, 2)},
        r"row 3 of `operand` is out of range: it has 3 rows, and rank 0 sends 2 rows with "
        r"input_offsets\[1\] = 2",
    ),
    ({"input_offsets": (1, 1, -2)}, r"row -2 of `operand`.* rank 1 .*input_offsets\[1\] = -2"),
    ({"output_offsets": (1, 1, 9)}, r"row 9 of `output`.* has 4 rows.* rank 1 .*_offsets\[1\] = 9"),
    ({"output_offsets": (0, 0, -1)}, r"row -1 of `output`.* rank 0 .*output_offsets\[0\] = -1"),
    ({"send_sizes": (1, 1, -1)}, r"rank 1 has send_sizes\[1\] = -1, which is negative"),
    ({"recv_sizes": (1, 0, 2)}, r"rank 1 has recv_sizes\[0\] = 2, and 1 rows are sent there"),
    ({"output_offsets": (0, 1, 1)}, r"several slices come to row 1 of `output` on rank 1"),
]


@pytest.mark.parametrize("change, text", FAULTS, ids=[str(i) for i in range(len(FAULTS))])
def test_checks(change, text, mesh_of, monkeypatch):
    # The ranks of the other axis hold sound slices, and a sum over that axis follows: without an
    # error on all ranks they would wait in it for the others.
    def f(a, b, *index):
        wrong = jax.lax.axis_index("y") == 1
        index = [jnp.where(wrong, x[1], x[0]) for x in jnp.stack(index).reshape(4, 2, -1)]
        return jax.lax.psum(pk.ragged_all_to_all(a, b, *index, axis_name="x"), "y")

    def jitted():
        mesh = mesh_of(x=2, y=2)
        mapped = jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
        return jax.jit(lambda *x: mapped(*x))

    a, b = jnp.arange(6.0), jnp.zeros(8)
    sound = list(index_arrays())
    both = [np.stack(x, 1).reshape(-1) for x in zip(sound, index_arrays(**change), strict=True)]
    quiet = [np.stack([x, x], 1).reshape(-1) for x in sound]
    monkeypatch.setenv("PK_JAX_CHECKS", "1")
    checked = jitted()
    np.testing.assert_array_equal(checked(a, b, *quiet), [0, 6, 0, 0, 2, 8, 0, 0])
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        jax.block_until_ready(checked(a, b, *both))
    monkeypatch.delenv("PK_JAX_CHECKS")
    jax.block_until_ready(jitted()(a, b, *both))


def test_checks_under_vmap_scan_and_grad(mesh_of, monkeypatch):
    monkeypatch.setenv("PK_JAX_CHECKS", "1")

    def f(a, b, *index):
        op = jax.vmap(lambda *x: pk.ragged_all_to_all(*x, axis_name="x"), (None, 0, *[None] * 4))
        step = lambda b, _: (op(a, b, *index), None)  # noqa: E731
        return jax.lax.scan(step, jnp.stack([b, b]), None, length=2)[0]

    mapped = jax.shard_map(f, mesh=mesh_of(x=2), in_specs=P("x"), out_specs=P(None, "x"))
    grad = jax.jit(jax.grad(lambda *x: jnp.sum(mapped(*x) ** 2)))
    a, b = jnp.arange(6.0), jnp.zeros(8)
    flat = lambda index: [x.reshape(-1) for x in index]  # noqa: E731
    np.testing.assert_array_equal(grad(a, b, *flat(index_arrays())), np.where(a % 3 < 2, 4 * a, 0))
    with pytest.raises(jax.errors.JaxRuntimeError, match="row 4 of `output` of batch element 0"):
        jax.block_until_ready(grad(a, b, *flat(index_arrays(output_offsets=(0, 1, 4)))))


def over_x(f, mesh, **kwargs):
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"), **kwargs))


def test_checks_with_zeros_as_output(mesh_of, monkeypatch):
    monkeypatch.setenv("PK_JAX_CHECKS", "1")
    op = lambda a, *i: pk.ragged_all_to_all(a, jnp.zeros(4), *i, axis_name="x")  # noqa: E731
    checked = over_x(op, mesh_of(x=2))
    flat = lambda index: [x.reshape(-1) for x in index]  # noqa: E731
    got = checked(jnp.arange(6.0), *flat(index_arrays()))
    np.testing.assert_array_equal(got, [0, 3, 0, 0, 1, 4, 0, 0])
    for change, text in FAULTS:
        with pytest.raises(jax.errors.JaxRuntimeError, match=text):
            jax.block_until_ready(checked(jnp.arange(6.0), *flat(index_arrays(**change))))


def test_checks_in_a_gradient_alone(mesh_of, monkeypatch):
    """Of a linear function, so that nothing of the forward pass is left."""
    monkeypatch.setenv("PK_JAX_CHECKS", "1")
    op = over_x(lambda *x: pk.ragged_all_to_all(*x, axis_name="x"), mesh_of(x=2))
    grad = jax.jit(jax.grad(lambda *x: op(*x).sum()))
    a, b = jnp.arange(6.0), jnp.zeros(8)
    flat = lambda index: [x.reshape(-1) for x in index]  # noqa: E731
    np.testing.assert_array_equal(grad(a, b, *flat(index_arrays())), [1, 1, 0, 1, 1, 0])
    for change, text in [
        ({"output_offsets": (0, 1, 4)}, "row 4 of .* is out of range"),
        ({"input_offsets": (0, 1, 0)}, "row 0 of .*in a gradient: they leave that row"),
    ]:
        with pytest.raises(jax.errors.JaxRuntimeError, match=text):
            jax.block_until_ready(grad(a, b, *flat(index_arrays(**change))))


@pytest.mark.parametrize("axes", ["v", "x"])
def test_checks_over_an_axis_beside_a_mapped_one(axes, mesh_of, monkeypatch):
    monkeypatch.setenv("PK_JAX_CHECKS", "1")
    op = lambda *x: pk.ragged_all_to_all(*x, axis_name=axes)  # noqa: E731

    def f(a, b, *index):
        mapped = jax.vmap(op, axis_name="v")
        return mapped(*(x.reshape(2, -1) for x in (a, b, *index))).reshape(-1)

    # JAX has no types for values that vary over an axis of vmap.
    checked = over_x(f, mesh_of(x=2), check_vma=False)
    a, b = jnp.arange(12.0), jnp.zeros(16)

    def ranks(index):
        """The same for both places on the axis that the op is not over."""
        return [np.concatenate([x, x], 0 if axes == "v" else 1).reshape(-1) for x in index]

    want = [0, 3, 0, 0, 1, 4, 0, 0, 6, 9, 0, 0, 7, 10, 0, 0]
    if axes == "x":
        want = [0, 6, 0, 0, 3, 9, 0, 0, 1, 7, 0, 0, 4, 10, 0, 0]
    np.testing.assert_array_equal(checked(a, b, *ranks(index_arrays())), want)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"recv_sizes.* = 2.*, and 1 rows are sent"
    ):
        jax.block_until_ready(checked(a, b, *ranks(index_arrays(recv_sizes=(1, 0, 2)))))


# Errors at trace time.


def test_arguments(mesh_of):
    def call(change):
        def f(x):
            index = jnp.zeros(4, jnp.int32)
            names = ("operand", "output", "input_offsets", "send_sizes", "output_offsets")
            args = dict.fromkeys(("operand", "output"), jnp.zeros((3, 2)))
            args |= dict.fromkeys((*names[2:], "recv_sizes"), index)
            pk.ragged_all_to_all(*(args | change).values(), axis_name="x")
            return x

        mapped = jax.shard_map(f, mesh=mesh_of(x=2), in_specs=P("x"), out_specs=P("x"))
        jax.eval_shape(mapped, jnp.zeros(2))

    call({})
    int32 = lambda *shape: jnp.zeros(shape, jnp.int32)  # noqa: E731
    for change, error, text in [
        ({"operand": [1.0]}, TypeError, r"operand must be an array, got \[1.0\] of type list"),
        ({"recv_sizes": 3}, TypeError, "recv_sizes must be an array, got 3 of type int"),
        ({"output": jnp.float32(0)}, ValueError, "output must have a leading dimension"),
        ({"output": jnp.zeros((3, 1))}, ValueError, r"operand \(3, 2\) and output \(3, 1\) must"),
        ({"output": int32(3, 2)}, TypeError, "one dtype, got float32 and int32"),
        ({"send_sizes": jnp.zeros(4)}, ValueError, "send_sizes must be integer type, got float32"),
        ({"send_sizes": int32(2, 2)}, ValueError, r"send_sizes must be rank 1.* shape \(2, 2\)"),
        ({"input_offsets": int32(0)}, ValueError, "rank 1 with positive dimension size"),
        ({"output_offsets": int32(2)}, ValueError, "must all have one length, got .*'output_off"),
        (
            dict.fromkeys(
                ["input_offsets", "send_sizes", "output_offsets", "recv_sizes"], int32(3)
            ),
            ValueError,
            "length 3 cannot hold the same number of slices for each of 2 ranks",
        ),
    ]:
        with pytest.raises(error, match=f"ragged_all_to_all.*{text}"):
            call(change)

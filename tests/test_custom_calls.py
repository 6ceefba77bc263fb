"""The custom calls of the ops: what stands in the module that XLA would get.

The attributes are the contract with ffi/. They are checked for many shapes and groups, and for
all_to_all a NumPy interpretation of them is compared with jax.lax, so that the contract itself is
known to mean the op. What is all_gather's alone is in test_collectives_lowering.py.
"""

import functools
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import pk_jax as pk
from pk_jax._primitives import exchanges
from pk_jax._tuning import cost_model
from pk_jax._tuning.hardware import GIB, KIB, MIB

COMMON = {"groups", "devices", "group_size", "channel", "mechanism", "protocol", "num_blocks"}
ALONE = {
    "psum": {"reduction", "algorithm"},
    "psum_scatter": {"outer", "reduction"},
    "all_to_all": {"batch", "rows", "split_first"},
    "ppermute": {"destinations"},
    "all_gather": {"outer"},
}


@pytest.fixture
def call_of(can_run, mesh_of, lowered, calls):
    """The one custom call of `f` on a rank's part of a shape; checks that it has all attributes."""

    def lower(f, shape, dtype="float32", *, order=None, check_vma=True, **sizes):
        mesh = mesh_of(order=order, **(sizes or {"x": 4}))
        mapped = jax.shard_map(
            lambda x: f(x[0])[None],
            mesh=mesh,
            in_specs=P(mesh.axis_names),
            out_specs=P(mesh.axis_names),
            check_vma=check_vma,
        )
        text = lowered(mapped, jax.ShapeDtypeStruct((mesh.size, *shape), dtype))
        (call,) = calls(text)
        assert set(call) == COMMON | ALONE[call["op"]] | {"op", "results"}
        assert "stablehlo.all" not in text and "stablehlo.collective" not in text
        return call

    return lower


def psum(x, **kwargs):
    return pk.psum(x, "x", **kwargs)


# psum, pmax, pmin


@pytest.mark.parametrize("name, reduction", [("psum", "sum"), ("pmax", "max"), ("pmin", "min")])
@pytest.mark.parametrize("check_vma", [True, False])
def test_reductions(name, reduction, check_vma, call_of):
    call = call_of(lambda x: getattr(pk, name)(x, "x"), (3, 5), check_vma=check_vma)
    assert call == {
        "op": "psum",
        "results": ["3x5xf32"],
        "groups": [0, 1, 2, 3],
        "devices": [0, 1, 2, 3],
        "group_size": 4,
        "channel": 0,
        "mechanism": "register",
        "protocol": "ll",
        "num_blocks": 0,
        "reduction": reduction,
        "algorithm": "one_shot",
    }


def test_a_mean_is_a_sum(call_of):
    assert call_of(lambda x: pk.pmean(x, "x"), (3,))["reduction"] == "sum"
    assert call_of(lambda x: psum(x > 0), (3,))["results"] == ["3xi32"]


def whole_lines(part_bytes):
    """What a part takes in the scratch."""
    return -(-part_bytes // 128) * 128


@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("num_bytes", [4, 36, 128 * KIB, 512 * KIB, 512 * KIB + 4, 33 * MIB, GIB])
def test_scratch_of_a_sum(ranks, num_bytes, call_of):
    call = call_of(psum, (num_bytes // 4,), x=ranks)
    assert call["results"][0] == f"{num_bytes // 4}xf32"
    if call["protocol"] == "ll":
        assert num_bytes <= max(128 * KIB, MIB // ranks // 128 * 128)
        assert call["algorithm"] == "one_shot" and len(call["results"]) == 1
        return
    part = num_bytes if call["algorithm"] == "one_shot" else -(-num_bytes // ranks)
    assert call["results"][1:] == [f"{(ranks - 1) * whole_lines(part)}xui8"]
    # Two trips against the bytes that two shots save: (n - 1) - 2 (n - 1) / n times the operand.
    saved = (ranks - 1) * (ranks - 2) / ranks * num_bytes / 350e9
    assert call["algorithm"] == ("two_shot" if saved > 2 * 1.2e-6 else "one_shot")


def test_scratch_beyond_the_limit(call_of):
    call = call_of(psum, (GIB // 4 + 1,), x=2)
    assert call["algorithm"] == "two_shot" and call["results"][1] == f"{GIB // 2 + 128}xui8"


def test_a_scratch_is_dropped(can_run, mesh_of, lowered):
    mapped = jax.shard_map(psum, mesh=mesh_of(x=2), in_specs=P("x"), out_specs=P())
    text = lowered(mapped, jax.ShapeDtypeStruct((2 * MIB,), jnp.float32))
    (line,) = [line for line in text.splitlines() if "@pk_jax_psum" in line]
    assert ":2 = stablehlo.custom_call" in line
    assert "result_layouts = [dense<0> : tensor<1xindex>, dense<0> : tensor<1xindex>]" in line
    name = line.split("=")[0].strip().removesuffix(":2")
    assert f"{name}#0" in text and f"{name}#1" not in text


def test_num_comm_sms_of_a_sum(call_of):
    for size in (4, MIB):
        call = call_of(lambda x: psum(x, config=pk.Config(num_comm_sms=3)), (size,))
        assert call["num_blocks"] == 3
    with pk.use_config(mechanism="tma", num_comm_sms=5):
        call = call_of(psum, (MIB,))
    assert (call["mechanism"], call["num_blocks"]) == ("tma", 5)


@pytest.mark.parametrize("dtype", ["float8_e5m2", "int4"])
def test_sums_that_only_the_reference_makes(dtype, can_run, mesh_of, lowered, calls):
    def body(implementation):
        def f(x):
            return psum(x.astype(dtype), implementation=implementation).astype(jnp.float32)

        return jax.shard_map(f, mesh=mesh_of(x=2), in_specs=P("x"), out_specs=P())

    assert not calls(lowered(body(None), jnp.zeros(4)))
    with pytest.raises(NotImplementedError, match=f"psum: dtype {dtype} "):
        lowered(body("cuda"), jnp.zeros(4))


def test_uneven_groups(can_run, mesh_of, lowered, calls):
    def body(implementation):
        groups = [[2], [0, 1, 3]]

        def f(x):
            return psum(x, axis_index_groups=groups, implementation=implementation)

        spec = {"in_specs": P("x"), "out_specs": P("x"), "check_vma": False}
        return jax.shard_map(f, mesh=mesh_of(x=4), **spec)

    text = lowered(body(None), jnp.zeros(4))
    assert not calls(text) and "stablehlo.all_reduce" in text
    with pytest.raises(NotImplementedError, match=r"sizes \[1, 3\].* groups of one size"):
        lowered(body("cuda"), jnp.zeros(4))


# psum_scatter


@pytest.mark.parametrize(
    "shape, dimension, tiled, outer, result",
    [
        ((4,), 0, False, 1, ""),
        ((8,), 0, True, 1, "2x"),
        ((8, 3), 0, True, 1, "2x3x"),
        ((5, 3, 8), -1, True, 15, "5x3x2x"),
        ((5, 4, 3), 1, False, 5, "5x3x"),
    ],
)
def test_psum_scatter(shape, dimension, tiled, outer, result, call_of):
    def f(x):
        return pk.psum_scatter(x, "x", scatter_dimension=dimension, tiled=tiled)

    call = call_of(f, shape)
    assert (call["op"], call["outer"], call["reduction"]) == ("psum_scatter", outer, "sum")
    assert call["results"] == [result + "f32"] and call["protocol"] == "ll"


@pytest.mark.parametrize("ranks", range(2, 9))
def test_scratch_of_psum_scatter(ranks, call_of):
    limit = max(128 * KIB, MIB // ranks // 128 * 128) // 4  # elements of a part
    for count in (limit, limit + 1, MIB):
        call = call_of(lambda x: pk.psum_scatter(x, "x", tiled=True), (ranks * count,), x=ranks)
        if count <= limit:
            assert call["protocol"] == "ll" and len(call["results"]) == 1
        else:
            assert call["protocol"] == "simple"
            scratch = (ranks - 1) * whole_lines(4 * count)
            assert call["results"] == [f"{count}xf32", f"{scratch}xui8"]


# all_to_all

TILED = [
    # shape, split, concat, batch, rows, split_first
    ((8,), 0, 0, 1, 1, 1),
    ((8, 3), 0, 0, 1, 1, 1),
    ((3, 8), 1, 1, 3, 1, 1),
    ((8, 3, 5), 0, 2, 1, 6, 1),
    ((2, 8, 3, 5), 1, 2, 2, 2, 1),
    ((3, 8), 1, 0, 1, 3, 0),
    ((2, 3, 7, 8), 3, 1, 2, 21, 0),
]
UNTILED = [
    ((4,), 0, 0, 1, 1, 1),
    ((4, 3), 0, 0, 1, 1, 1),
    ((4, 3), 0, 1, 1, 3, 1),
    ((3, 4), 1, 0, 1, 3, 0),
    ((2, 3, 4, 5), 2, 1, 2, 3, 0),
    ((2, 4, 3, 5), 1, 3, 2, 15, 1),
]


@pytest.mark.parametrize(
    "tiled, row", [(True, row) for row in TILED] + [(False, row) for row in UNTILED], ids=str
)
def test_all_to_all(tiled, row, call_of):
    shape, split, concat, batch, rows, split_first = row
    call = call_of(lambda x: pk.all_to_all(x, "x", split, concat, tiled=tiled), shape)
    got = (call["batch"], call["rows"], call["split_first"])
    assert got == (batch, rows, split_first)
    assert (call["op"], call["mechanism"], call["protocol"]) == ("all_to_all", "register", "ll")


def test_all_to_all_mechanisms(call_of):
    def f(x, **kwargs):
        return pk.all_to_all(x, "x", 0, 1, tiled=True, **kwargs)

    tma = pk.Config(mechanism="tma")
    assert call_of(functools.partial(f, config=tma), (8, 4))["mechanism"] == "tma"
    with pytest.raises(ValueError, match=r"all_to_all cannot honour .*'tma' for blocks of 12 cont"):
        call_of(functools.partial(f, config=tma), (8, 3))
    with pk.use_config(mechanism="tma"):
        assert call_of(f, (8, 3))["mechanism"] == "register"
    assert call_of(f, (4096, 4096))["protocol"] == "simple"


def test_mechanism_of_a_transpose(can_run, mesh_of, lowered, calls):
    # The parts are the same, where they lie is not.
    def loss(x):
        def f(x):
            return pk.all_to_all(x, "x", 0, 1, tiled=True, config=pk.Config(mechanism="tma"))

        mapped = jax.shard_map(f, mesh=mesh_of(x=4), in_specs=P("x"), out_specs=P("x"))
        return jnp.sum(mapped(x) ** 2)

    forward, backward = calls(lowered(jax.grad(loss), jnp.zeros((32, 12))), "all_to_all")
    assert forward["mechanism"] == backward["mechanism"] == "tma"
    assert (forward["split_first"], backward["split_first"]) == (1, 0)


def run_all_to_all(view, operands):
    """What the attributes of the custom call say, in NumPy: operands and results by rank."""
    n = len(operands)
    source = (view.batch, n, view.rows, view.inner)
    target = (view.batch, view.rows, n, view.inner)
    if not view.split_first:
        source, target = target, source
    split, joined = (1, 2) if view.split_first else (2, 1)
    parts = [np.moveaxis(x.reshape(source), split, 0) for x in operands]
    results = []
    for rank in range(n):
        result = np.moveaxis(np.empty(target, operands[0].dtype), joined, 0)
        for peer in range(n):
            result[peer] = parts[peer][rank]
        results.append(np.moveaxis(result, 0, joined))
    return results


@pytest.mark.parametrize("seed", range(40))
def test_the_attributes_mean_all_to_all(seed, mesh_of, per_rank):
    chosen = np.random.default_rng(seed)
    n, dims = int(chosen.integers(2, 6)), int(chosen.integers(1, 5))
    split, concat = (int(i) for i in chosen.integers(0, dims, 2))
    tiled = bool(chosen.integers(0, 2))
    shape = [int(i) for i in chosen.integers(1, 4, dims)]
    shape[split] = n * (shape[split] if tiled else 1)
    x = np.arange(n * np.prod(shape)).reshape(n, *shape)
    want = per_rank(
        mesh_of(x=n), lambda p: lax.all_to_all(p, "x", split, concat, tiled=tiled), jnp.asarray(x)
    )
    if not tiled:
        # As the primitive has it: with the new dimension there from the start.
        at = concat + (split < concat)
        if split != concat:
            x = np.expand_dims(x, 1 + at)
        split, concat = split + (concat < split), at
    view = exchanges.view(x.shape[1:], n, split, concat)
    got = run_all_to_all(view, list(x))
    np.testing.assert_array_equal(np.stack(got).ravel(), np.asarray(want).ravel())


# ppermute


@pytest.mark.parametrize(
    "perm, destinations",
    [
        ([(i, (i + 1) % 4) for i in range(4)], [1, 2, 3, 0]),
        ([(0, 2), (3, -1)], [2, -1, -1, 3]),
        ([], [-1, -1, -1, -1]),
    ],
)
def test_ppermute(perm, destinations, call_of):
    call = call_of(lambda x: pk.ppermute(x, "x", perm), (5, 3))
    assert (call["op"], call["destinations"]) == ("ppermute", destinations)
    assert call["results"] == ["5x3xf32"] and call["protocol"] == "ll"


def test_ppermute_mechanisms(call_of):
    def f(x, **kwargs):
        return pk.ppermute(x, "x", [(0, 1)], **kwargs)

    tma = pk.Config(mechanism="tma", num_comm_sms=2)
    call = call_of(functools.partial(f, config=tma), (4,))
    assert (call["mechanism"], call["protocol"], call["num_blocks"]) == ("tma", "simple", 2)
    with pytest.raises(ValueError, match=r"ppermute cannot honour .*'tma' for blocks of 20 cont"):
        call_of(functools.partial(f, config=tma), (5,))


def test_ppermute_over_axes_in_another_order(call_of):
    # A pair of ranks in the tuple's own order: (b, a), b slow.
    def f(x):
        return pk.ppermute(x, ("b", "a"), [(0, 1), (1, 5)])

    with pytest.raises(RuntimeError, match=r"\('b', 'a'\) is not in the order of the mesh's axes"):
        call_of(f, (4,), a=2, b=4)
    jax.config.update("jax_raise_on_ppermute_sort_diff", False)
    try:
        call = call_of(f, (4,), a=2, b=4)
    finally:
        jax.config.update("jax_raise_on_ppermute_sort_diff", True)
    assert call["groups"] == [0, 4, 1, 5, 2, 6, 3, 7]
    assert call["destinations"] == [1, 5, -1, -1, -1, -1, -1, -1]


# All of them.

EVERY = {
    "psum": lambda x, axis, **kw: pk.psum(x, axis, **kw),
    "pmax": lambda x, axis, **kw: pk.pmax(x, axis, **kw),
    "psum_scatter": lambda x, axis, **kw: pk.psum_scatter(x, axis, tiled=True, **kw),
    "all_to_all": lambda x, axis, **kw: pk.all_to_all(x, axis, 0, 0, tiled=True, **kw),
    "all_gather": lambda x, axis, **kw: pk.all_gather(x, axis, **kw),
}


@pytest.mark.parametrize("op", EVERY)
@pytest.mark.parametrize(
    "axis_name, index_groups, groups",
    [
        ("a", None, [0, 4, 1, 5, 2, 6, 3, 7]),
        ("b", None, [0, 1, 2, 3, 4, 5, 6, 7]),
        (("a", "b"), None, [0, 1, 2, 3, 4, 5, 6, 7]),
        (("b", "a"), None, [0, 4, 1, 5, 2, 6, 3, 7]),
        ("b", [[2, 0], [1, 3]], [2, 0, 1, 3, 6, 4, 5, 7]),
    ],
    ids=str,
)
def test_groups_and_devices(op, axis_name, index_groups, groups, call_of):
    order = [3, 1, 2, 0, 7, 6, 5, 4]

    def f(x):
        return EVERY[op](x, axis_name, axis_index_groups=index_groups)

    call = call_of(f, (8,), order=order, check_vma=False, a=2, b=4)
    size = 2 if index_groups else 8 if len(axis_name) == 2 else {"a": 2, "b": 4}[axis_name]
    assert call["group_size"] == size and call["groups"] == groups
    assert call["devices"] == [order[i] for i in groups]


def test_the_choice_is_that_of_the_cost_model(call_of):
    seen = []
    real = cost_model.choose

    def spy(hardware, work, *knobs):
        seen.append(work)
        return real(hardware, work, *knobs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost_model, "choose", spy)
        call_of(psum, (3, 8), "bfloat16")
        call_of(lambda x: pk.psum_scatter(x, "x", scatter_dimension=1, tiled=True), (3, 8, 5))
        call_of(lambda x: pk.all_to_all(x, "x", 1, 0, tiled=True), (3, 8, 5), "int8")
        call_of(lambda x: pk.ppermute(x, "x", []), (3, 8, 5), "complex64")
    assert seen == [
        cost_model.Work("psum", 48, 4, 48),
        cost_model.Work("psum_scatter", 480, 4, 40),
        cost_model.Work("all_to_all", 120, 4, 10),
        cost_model.Work("ppermute", 960, 4, 960),
    ]


def test_gradients_stay_on_the_cuda_path(can_run, mesh_of, lowered, calls):
    def body(x):
        x = pk.psum_scatter(pk.ppermute(x, "x", [(0, 1), (1, 0)]), "x", tiled=True)
        return pk.psum(pk.all_to_all(x, "x", 0, 1, tiled=True), "x")

    def loss(x):
        spec = {"in_specs": P("x"), "out_specs": P("x"), "check_vma": False}
        return jnp.sum(jax.shard_map(body, mesh=mesh_of(x=2), **spec)(x) ** 2)

    text = lowered(jax.grad(loss), jnp.zeros((8, 2)))
    ops = sorted(call["op"] for call in calls(text))
    back_and_forth = ["all_to_all", "ppermute", "psum"]
    assert ops == sorted([*back_and_forth, *back_and_forth, "psum_scatter", "all_gather"])
    assert "stablehlo.all" not in text and "stablehlo.collective" not in text


def test_text_is_the_same_in_every_process():
    program = textwrap.dedent("""
        import hashlib, jax, numpy as np, pk_jax as pk
        from jax.sharding import Mesh, PartitionSpec as P
        from pk_jax import _selection
        _selection.decide = lambda *args: _selection.Decision("cuda")
        def body(x):
            x = pk.ppermute(pk.psum(x, ("b", "a")), "a", [(0, 1)])
            x = pk.all_to_all(pk.pmax(x, "a"), ("a", "b"), 0, 0, tiled=True)
            return pk.psum_scatter(x, "b", tiled=True)
        mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
        f = jax.shard_map(body, mesh=mesh, in_specs=P(("a", "b")), out_specs=P(("a", "b")))
        text = jax.jit(f).trace(np.zeros(32, np.float32)).lower(lowering_platforms=("cuda",))
        print(hashlib.sha256(text.as_text(debug_info=False).encode()).hexdigest())
    """)
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    }
    assert len(outputs) == 1 and len(outputs.pop().strip()) == 64


def test_export_for_cuda(can_run, mesh_of):
    mapped = jax.shard_map(
        lambda x: pk.psum(x, "x"), mesh=mesh_of(x=4), in_specs=P("x"), out_specs=P()
    )
    x = jax.device_put(jnp.arange(8.0), jax.sharding.NamedSharding(mesh_of(x=4), P("x")))
    with pytest.raises(ValueError, match="pk_jax_psum"):
        jax.export.export(jax.jit(mapped), platforms=["cuda"])(x)
    checks = [jax.export.DisabledSafetyCheck.custom_call("pk_jax_psum")]
    exported = jax.export.export(jax.jit(mapped), platforms=["cuda"], disabled_checks=checks)(x)
    assert "pk_jax_psum" in exported.mlir_module()

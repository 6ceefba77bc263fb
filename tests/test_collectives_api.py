"""Arguments of the collectives: what is refused, with which words, and what is only logged."""

import inspect
import logging
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import pk_jax as pk
from pk_jax import _selection

OPS = {
    "all_gather": lambda x, axis, **kw: pk.all_gather(x, axis, **kw),
    "psum_scatter": lambda x, axis, **kw: pk.psum_scatter(x, axis, **kw),
    "psum": lambda x, axis, **kw: pk.psum(x, axis, **kw),
    "pmax": lambda x, axis, **kw: pk.pmax(x, axis, **kw),
    "pmin": lambda x, axis, **kw: pk.pmin(x, axis, **kw),
    "pmean": lambda x, axis, **kw: pk.pmean(x, axis, **kw),
    "all_to_all": lambda x, axis, **kw: pk.all_to_all(x, axis, 0, 0, **kw),
    "ppermute": lambda x, axis, **kw: pk.ppermute(x, axis, [(0, 1)], **kw),
    "ragged_all_to_all": lambda x, axis, **kw: pk.ragged_all_to_all(
        x, x, *[x.astype(jnp.int32)] * 4, axis_name=axis, **kw
    ),
}
every_op = pytest.mark.parametrize("op", OPS)
with_groups = pytest.mark.parametrize("op", sorted(set(OPS) - {"ppermute"}))


@pytest.fixture
def traced(mesh_of):
    """Traces f(x) under shard_map on axes a=2, b=2; x has 4 elements on each rank."""

    def trace(f, **kwargs):
        mapped = jax.shard_map(
            lambda x: jax.tree.map(jnp.shape, f(x)) and x,
            mesh=mesh_of(a=2, b=2),
            in_specs=P(("a", "b")),
            out_specs=P(("a", "b")),
            **kwargs,
        )
        jax.eval_shape(mapped, jnp.zeros(16))

    return trace


@every_op
def test_signature_is_that_of_lax(op):
    ours = inspect.signature(getattr(pk, op)).parameters
    theirs = inspect.signature(getattr(lax, op)).parameters
    assert list(ours) == [*theirs, "implementation", "config"]
    for name, parameter in theirs.items():
        assert (ours[name].default, ours[name].kind) == (parameter.default, parameter.kind)


def test_every_op_is_listed_for_the_doctor():
    assert set(_selection.OPS) == set(OPS)


@every_op
def test_axis_not_in_the_mesh(op, traced):
    with pytest.raises(NameError) as error:
        traced(lambda x: OPS[op](x, "c"))
    for word in (op, "'c'", "('a', 'b')", "make the mesh with an axis 'c'"):
        assert word in str(error.value)


@every_op
def test_axis_outside_shard_map(op):
    with pytest.raises(NameError, match=rf"{op}: axis 'a' is unbound.* jax.shard_map\(f, mesh="):
        OPS[op](jnp.zeros(4), "a")


@every_op
def test_axis_outside_shard_map_with_a_mesh(op, mesh_of):
    with (
        jax.set_mesh(mesh_of(a=2, b=2)),
        pytest.raises(NameError, match=r"axis 'a' of the mesh \('a', 'b'\) is not manual here"),
    ):
        jax.jit(lambda x: OPS[op](x, "a"))(jnp.zeros(4))


@every_op
def test_axis_not_manual(op, mesh_of):
    mapped = jax.shard_map(
        lambda x: OPS[op](x, "b"),
        mesh=mesh_of(a=2, b=2),
        in_specs=P("a"),
        out_specs=P("a"),
        axis_names={"a"},
    )
    with pytest.raises(NameError) as error:
        jax.eval_shape(mapped, jnp.zeros(8))
    assert "axis 'b' of the mesh ('a', 'b') is not manual here (manual: ('a',))" in str(error.value)
    assert "axis_names={'a', 'b'}" in str(error.value)


@every_op
def test_axis_twice(op, traced):
    with pytest.raises(ValueError, match=r"\('a', 'a'\) names an axis twice"):
        traced(lambda x: OPS[op](x, ("a", "a")))


@every_op
@pytest.mark.parametrize("axis_name", [None, {"a": 1}, ("a", None)])
def test_axis_name_of_a_wrong_type(op, axis_name, traced):
    with pytest.raises(TypeError, match=f"{op}: axis_name must be the name of a mesh axis"):
        traced(lambda x: OPS[op](x, axis_name))


@pytest.mark.parametrize("op", ["all_gather", "psum_scatter", "all_to_all"])
@pytest.mark.parametrize("axis_name", [0, ["a"]])
def test_axis_name_only_reductions_take(op, axis_name, traced):
    with pytest.raises(TypeError, match=f"{op}: axis_name must be the name of a mesh axis"):
        traced(lambda x: OPS[op](x, axis_name))
    traced(lambda x: pk.psum(x, axis_name), check_vma=False)


GROUPS = [
    ([[0, 1]], ValueError, r"must hold each index 0\.\.3 of axis \('a', 'b'\) \(size 4\)"),
    ([[0, 1], [2, 4]], ValueError, "exactly once"),
    ([[0, 1], [1, 2, 3]], ValueError, "exactly once"),
    ([], ValueError, "exactly once"),
    ([[0, 1], "23"], TypeError, "list of lists of ints"),
    ("0123", TypeError, "list of lists of ints"),
    ([0, 1, 2, 3], TypeError, "list of lists of ints"),
    ([[0.0, 1.0], [2.0, 3.0]], TypeError, "list of lists of ints"),
    (3, TypeError, "list of lists of ints"),
]


@with_groups
@pytest.mark.parametrize("groups, error, text", GROUPS, ids=[str(row[0]) for row in GROUPS])
def test_groups(op, groups, error, text, traced):
    with pytest.raises(error, match=text) as raised:
        traced(lambda x: OPS[op](x, ("a", "b"), axis_index_groups=groups), check_vma=False)
    assert f"{op}: axis_index_groups={groups!r}" in str(raised.value)


@pytest.mark.parametrize("op", ["all_gather", "psum_scatter", "all_to_all", "ragged_all_to_all"])
def test_groups_of_different_sizes(op, traced):
    with pytest.raises(ValueError, match=r"must all have one size, got \[1, 3\]"):
        traced(lambda x: OPS[op](x, ("a", "b"), axis_index_groups=[[2], [0, 1, 3]]))


@pytest.mark.parametrize("op", ["psum", "pmean"])
def test_groups_of_a_typed_sum(op, traced):
    groups = [[0], [1]]
    with pytest.raises(NotImplementedError, match="check_vma=False"):
        traced(lambda x: OPS[op](x, "a", axis_index_groups=groups))
    traced(lambda x: OPS[op](x, "a", axis_index_groups=groups), check_vma=False)


def test_groups_of_positional_axes(traced):
    with pytest.raises(ValueError, match="named axes only"):
        traced(lambda x: pk.psum(x, (0, "a"), axis_index_groups=[[0], [1]]), check_vma=False)


DIMENSIONS = [
    ("all_gather", "axis", lambda x, d: pk.all_gather(x, "a", axis=d, tiled=True)),
    (
        "psum_scatter",
        "scatter_dimension",
        lambda x, d: pk.psum_scatter(x, "a", scatter_dimension=d),
    ),
    ("all_to_all", "split_axis", lambda x, d: pk.all_to_all(x, "a", d, 0)),
    ("all_to_all", "concat_axis", lambda x, d: pk.all_to_all(x, "a", 0, d)),
]


@pytest.mark.parametrize("op, name, call", DIMENSIONS, ids=[row[1] for row in DIMENSIONS])
@pytest.mark.parametrize(
    "value, error, text",
    [
        (1, ValueError, "{}=1 is out of bounds for 1 dimensions"),
        (-2, ValueError, "{}=-2 is out of bounds for 1 dimensions"),
        ("0", TypeError, "{} must be an int, got '0'"),
        (0.0, TypeError, "{} must be an int, got 0.0"),
    ],
)
def test_dimensions(op, name, call, value, error, text, traced):
    with pytest.raises(error, match=f"{op}: {text.format(name)}"):
        traced(lambda x: call(x, value))


def test_axis_of_a_scalar(traced):
    with pytest.raises(ValueError, match="axis=0 is out of bounds for 0 dimensions"):
        traced(lambda x: pk.all_gather(x[0], "a", tiled=True))
    with pytest.raises(ValueError, match="axis=1 is out of bounds for 1 dimensions"):
        traced(lambda x: pk.all_gather(x[0], "a", axis=1))


@pytest.mark.parametrize("op", ["all_gather", "psum_scatter", "all_to_all"])
def test_tiled_of_a_wrong_type(op, traced):
    with pytest.raises(TypeError, match=f"{op}: tiled must be True or False, got 'no'"):
        traced(lambda x: OPS[op](x, "a", tiled="no"))


def test_to(traced):
    with pytest.raises(ValueError, match=r"to must be one of \('varying', .*, got 'replicated'"):
        traced(lambda x: pk.all_gather(x, "a", to="replicated"))
    with pytest.raises(NotImplementedError, match="use to='varying'"):
        traced(lambda x: pk.all_gather(x, "a", to="invarying", axis_index_groups=[[0], [1]]))


def test_psum_scatter_of_a_wrong_size(traced):
    with pytest.raises(ValueError, match="must match shard count 2"):
        traced(lambda x: pk.psum_scatter(x, "a"))
    with pytest.raises(ValueError, match="divisible"):
        traced(lambda x: pk.psum_scatter(x[:3], "a", tiled=True))


def test_psum_scatter_over_axes_of_different_states(mesh_of):
    mapped = jax.shard_map(
        lambda x: pk.psum_scatter(x, ("a", "b"), tiled=True),
        mesh=mesh_of(a=2, b=2),
        in_specs=P("a"),
        out_specs=P(("a", "b")),
    )
    with pytest.raises(ValueError, match="invarying"):
        jax.eval_shape(mapped, jnp.zeros(8))


@pytest.mark.parametrize(
    "perm, error, text",
    [
        ("01", TypeError, "list of .source, destination. pairs"),
        ([(0, 1, 1)], TypeError, "list of .source, destination. pairs"),
        ([(0, "1")], TypeError, "list of .source, destination. pairs"),
        ([(0, 2)], ValueError, r"names ranks \[2\]; axis \('a',\) has 0\.\.1"),
        ([(-3, 0)], ValueError, r"names ranks \[-3\]"),
        ([(-1, 0), (1, 1)], ValueError, "names a source twice"),
        ([(0, 1), (0, 0)], ValueError, "names a source twice"),
        ([(0, 1), (1, 1)], ValueError, "names a destination twice"),
    ],
)
def test_perm(perm, error, text, traced):
    with pytest.raises(error, match=text):
        traced(lambda x: pk.ppermute(x, "a", perm))


def test_not_an_array(traced):
    with pytest.raises(TypeError, match="not a valid JAX"):
        traced(lambda x: pk.all_gather("text", "a"))


@every_op
def test_implementation_of_a_wrong_name(op, traced):
    with pytest.raises(ValueError, match=rf"{op}: implementation must be None or one of .*'nccl'"):
        traced(lambda x: OPS[op](x, "a", implementation="nccl"))


def test_ranks_counted_from_the_end(mesh_of, per_rank):
    x = jnp.arange(8.0).reshape(4, 2)
    for module in (pk, lax):
        got = per_rank(mesh_of(x=4), lambda p, m=module: m.ppermute(p, "x", [(-1, 1), (0, -2)]), x)
        np.testing.assert_array_equal(got, [[0, 0], x[3], x[0], [0, 0]])


@every_op
def test_cuda_on_the_cpu(op, mesh_of, per_rank):
    with pytest.raises(NotImplementedError, match=rf"^{op} is .*'cpu', and its kernels need CUDA"):
        per_rank(mesh_of(x=2), lambda x: OPS[op](x, "x", implementation="cuda"), jnp.zeros((2, 2)))


def test_a_mechanism_that_the_reference_does_not_use(mesh_of, per_rank):
    # Bulk copies move no 4 bytes.
    calls = {name: OPS[name] for name in ("all_gather", "ppermute")}
    calls["all_to_all"] = lambda x, axis, **kw: pk.all_to_all(x, axis, 0, 1, tiled=True, **kw)
    for call in calls.values():
        for implementation, refused in ((None, True), ("cuda", True), ("reference", False)):
            options = {"implementation": implementation, "config": pk.Config(mechanism="tma")}

            def run(call=call, options=options):
                return per_rank(
                    mesh_of(x=2), lambda x: call(x, "x", **options), jnp.zeros((2, 2, 1))
                )

            if refused:
                with pytest.raises(ValueError, match="mechanism='tma'"):
                    run()
            else:
                run()


def test_more_sms_than_empty_the_landing_buffer(traced):
    config = pk.Config(mechanism="copy_engine", num_comm_sms=33)
    text = "num_comm_sms=33 with mechanism='copy_engine': at most 32 SMs empty the landing buffer"
    with pytest.raises(ValueError, match=text):
        traced(lambda x: pk.all_gather(x, "a", config=config))
    with pk.use_config(num_comm_sms=33), pytest.raises(ValueError, match=text):
        traced(lambda x: pk.all_gather(x, "a", config=pk.Config(mechanism="copy_engine")))
    with pk.use_config(mechanism="copy_engine", num_comm_sms=33):
        traced(lambda x: pk.psum(x, "a"))  # has no copy engine
    traced(lambda x: pk.all_gather(x, "a", implementation="reference", config=config))


@every_op
@pytest.mark.parametrize("shape", [(2, 0), (1, 3)])
def test_cuda_where_nothing_moves(op, shape, mesh_of, per_rank):
    # No elements, or one rank: there is nothing to run on CUDA, so nothing to refuse.
    size = 2 if 0 in shape else 1
    x = jnp.ones((size, *shape))

    def run(**kwargs):
        if op == "ppermute":
            return per_rank(mesh_of(x=size), lambda x: pk.ppermute(x, "x", [(0, 0)], **kwargs), x)
        if op == "ragged_all_to_all":
            index = jnp.zeros(size, jnp.int32)
            f = lambda x: pk.ragged_all_to_all(x, x, *[index] * 4, axis_name="x", **kwargs)  # noqa: E731
            return per_rank(mesh_of(x=size), f, x)
        return per_rank(mesh_of(x=size), lambda x: OPS[op](x, "x", **kwargs), x)

    np.testing.assert_array_equal(run(implementation="cuda"), run(implementation="reference"))


def test_nothing_arrives_at_a_rank_alone(mesh_of, per_rank):
    got = per_rank(mesh_of(x=1), lambda x: pk.ppermute(x, "x", []), jnp.ones((1, 3)))
    np.testing.assert_array_equal(got, np.zeros((1, 3)))


@pytest.mark.parametrize("tiled, must", [(True, "be divisible by"), (False, "equal")])
def test_all_to_all_of_a_wrong_size(tiled, must, traced):
    text = rf"split_axis=0 of shape \(3,\) has size 3, which must {must} the 2 ranks of axis \('a',"
    with pytest.raises(ValueError, match=text):
        traced(lambda x: pk.all_to_all(x[:3], "a", 0, 0, tiled=tiled))


def test_ppermute_goes_over_names(traced):
    traced(lambda x: pk.ppermute(x, ["a"], [(0, 1)]))
    with pytest.raises(TypeError, match="ppermute: axis_name must be the name of a mesh axis"):
        traced(lambda x: pk.ppermute(x, 0, [(0, 1)]))


def test_the_reason_is_logged_once(mesh_of, per_rank, caplog, monkeypatch):
    monkeypatch.setattr(_selection, "_logged", set())
    with caplog.at_level(logging.INFO, "pk_jax"):
        for columns in (1, 2, 3):
            per_rank(mesh_of(x=2), lambda x: pk.all_gather(x, "x"), jnp.zeros((2, columns)))
        per_rank(
            mesh_of(x=2),
            lambda x: pk.all_gather(x, "x", implementation="reference"),
            jnp.zeros((2, 4)),
        )
    (record,) = [r for r in caplog.records if r.name == "pk_jax"]
    assert record.levelno == logging.INFO
    assert "all_gather takes the reference" in record.message
    assert "'cpu'" in record.message


def test_psum_of_a_constant_is_a_constant(traced):
    def f(x):
        assert pk.psum(1, "a") == 2 and isinstance(pk.psum(1, "a"), (int, np.integer))
        assert pk.psum(2.5, ("a", "b")) == 10.0
        assert pk.psum(1, ("a", "b"), axis_index_groups=[[0, 3], [2, 1]]) == 2
        assert pk.pmean(3.0, "a") == 3.0
        return x

    traced(f)


def test_reductions_over_array_axes(mesh_of, per_rank):
    x = jnp.arange(6.0).reshape(2, 3)
    for axis_name in ((0, "x"), ["x", 0]):
        got = per_rank(mesh_of(x=2), lambda p, a=axis_name: pk.psum(p, a)[None], x, check_vma=False)
        np.testing.assert_array_equal(got, [[15.0], [15.0]])


@pytest.mark.parametrize("available", [True, False])
def test_import_starts_no_backend_and_warns_of_nothing(available):
    block = "" if available else "sys.modules['pk_jax._ffi'] = None;"
    code = (
        f"import sys; {block} import pk_jax; from jax._src import xla_bridge; "
        "assert not xla_bridge.backends_are_initialized(); "
        "from pk_jax import _registry; print(_registry.why_missing())"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    if not available:
        assert "pk_jax._ffi is not there (ModuleNotFoundError" in done.stdout

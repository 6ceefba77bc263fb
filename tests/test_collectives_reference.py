"""The collectives on eight CPU devices: values against NumPy and against jax.lax.

The model of a group is NumPy's stack or concatenate of its ranks' operands; `GROUPINGS` lists which
ranks a call over given axes joins, and in which order, so a wrong rank order shows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import pk_jax as pk
from pk_jax._tuning.cases import ALL_GATHER

# mesh sizes, axis_name, axis_index_groups, the groups as global ranks
GROUPINGS = {
    "one-axis": ({"x": 8}, "x", None, [range(8)]),
    "one-rank": ({"x": 1}, "x", None, [range(1)]),
    "three-ranks": ({"x": 3}, "x", None, [range(3)]),
    "inner": ({"a": 2, "b": 4}, "b", None, [range(4), range(4, 8)]),
    "outer": ({"a": 2, "b": 4}, "a", None, [[0, 4], [1, 5], [2, 6], [3, 7]]),
    "tuple": ({"a": 2, "b": 4}, ("a", "b"), None, [range(8)]),
    "swapped-tuple": ({"a": 2, "b": 4}, ("b", "a"), None, [[0, 4, 1, 5, 2, 6, 3, 7]]),
    "of-three": ({"a": 2, "b": 2, "c": 2}, ("c", "a"), None, [[0, 4, 1, 5], [2, 6, 3, 7]]),
    "size-1-axis": ({"a": 1, "b": 4}, ("a", "b"), None, [range(4)]),
    "over-size-1": ({"a": 1, "b": 4}, "a", None, [[0], [1], [2], [3]]),
    "groups": ({"x": 8}, "x", [[0, 2], [3, 1], [7, 4], [5, 6]], [[0, 2], [3, 1], [7, 4], [5, 6]]),
    "groups-of-1": ({"x": 2}, "x", [[1], [0]], [[1], [0]]),
    "groups-in-inner": (
        {"a": 2, "b": 4},
        "b",
        [[3, 0], [1, 2]],
        [[3, 0], [1, 2], [7, 4], [5, 6]],
    ),
    "groups-in-tuple": (
        {"a": 2, "b": 2},
        ("b", "a"),
        [[0, 1], [3, 2]],
        [[0, 2], [3, 1]],
    ),
}
grouping = pytest.mark.parametrize("case", GROUPINGS, ids=str)

DTYPES = ["bool", "int8", "uint16", "int32", "float16", "bfloat16", "complex64", "float8_e5m2"]
SMALLER_THAN_A_BYTE = ["int4", "uint2", "float4_e2m1fn"]

# shape, axis, tiled
LAYOUTS = [
    ((), 0, False),
    ((5,), 0, False),
    ((5,), 0, True),
    ((5,), -1, False),
    ((3, 4), 1, False),
    ((3, 4), 2, False),
    ((3, 4), 1, True),
    ((3, 4), -1, True),
    ((2, 3, 5), 1, True),
    ((0,), 0, True),
    ((0, 3), 1, True),
    ((0, 3), 0, False),
    ((3, 0), 0, True),
]


def operand(num_ranks, shape, dtype="float32"):
    """A different value in each element of each rank."""
    values = np.arange(num_ranks * int(np.prod(shape))).reshape(num_ranks, *shape)
    return (values % (2 if dtype == "bool" else 113)).astype(jnp.dtype(dtype))


def gathered(x, groups, axis, tiled):
    """What NumPy says every rank gets."""
    results = [None] * len(x)
    for group in groups:
        parts = [np.asarray(x[rank]) for rank in group]
        joined = np.concatenate(parts, axis) if tiled else np.stack(parts, axis)
        for rank in group:
            results[rank] = joined
    return np.stack(results)


@grouping
def test_all_gather_groups(case, mesh_of, per_rank):
    sizes, axis_name, index_groups, groups = GROUPINGS[case]
    mesh = mesh_of(**sizes)
    x = operand(mesh.size, (3, 2))
    for axis, tiled in ((0, True), (1, True), (1, False)):
        kwargs = {"axis_index_groups": index_groups, "axis": axis, "tiled": tiled}
        got = per_rank(mesh, lambda p, k=kwargs: pk.all_gather(p, axis_name, **k), x)
        np.testing.assert_array_equal(got, gathered(x, groups, axis, tiled))
        np.testing.assert_array_equal(
            got, per_rank(mesh, lambda p, k=kwargs: lax.all_gather(p, axis_name, **k), x)
        )


@pytest.mark.parametrize("shape, axis, tiled", LAYOUTS)
def test_all_gather_layouts(shape, axis, tiled, mesh_of, per_rank):
    mesh = mesh_of(x=4)
    x = operand(4, shape)
    got = per_rank(mesh, lambda p: pk.all_gather(p, "x", axis=axis, tiled=tiled), x)
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got, gathered(x, [range(4)], axis, tiled))


@pytest.mark.parametrize("case", ALL_GATHER, ids=lambda case: case.name)
def test_all_gather_cases(case, mesh_of, per_rank):
    mesh = mesh_of(x=2)
    x = operand(2, case.shape, case.dtype)
    got = per_rank(mesh, lambda p: pk.all_gather(p, "x", axis=case.axis, tiled=case.tiled), x)
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got, gathered(x, [range(2)], case.axis, case.tiled))


@pytest.mark.parametrize("dtype", DTYPES + SMALLER_THAN_A_BYTE)
def test_all_gather_dtypes(dtype, mesh_of, per_rank):
    x = operand(4, (6, 2)).astype("int8").astype(jnp.dtype(dtype))
    got = per_rank(mesh_of(x=4), lambda p: pk.all_gather(p, "x", axis=1, tiled=True), x)
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(
        np.asarray(got).astype("complex64"),
        gathered(np.asarray(x), [range(4)], 1, True).astype("complex64"),
    )


@pytest.mark.parametrize("axis, tiled", [(0, True), (0, False), (1, False), (-1, False)])
def test_all_gather_keys(axis, tiled, mesh_of, per_rank):
    keys = jax.random.split(jax.random.key(7), (4, 3))
    got = per_rank(mesh_of(x=4), lambda p: pk.all_gather(p, "x", axis=axis, tiled=tiled), keys)
    words = np.asarray(jax.random.key_data(keys))
    axis = axis if axis >= 0 else 1  # of [3] or [3, 4] keys; the words are one dimension more
    np.testing.assert_array_equal(
        jax.random.key_data(got), gathered(words, [range(4)], axis, tiled)
    )


def test_all_gather_pytree_and_scalars(mesh_of, per_rank):
    x = operand(4, (2,))
    got = per_rank(
        mesh_of(x=4),
        lambda p: pk.all_gather({"a": p, "b": (1.5, None, np.int32(3)), "c": p[0]}, "x"),
        x,
    )
    np.testing.assert_array_equal(got["a"], gathered(x, [range(4)], 0, False))
    np.testing.assert_array_equal(got["b"][0], np.full((4, 4), 1.5, np.float32))
    assert got["b"][1] is None
    assert got["b"][2].dtype == jnp.int32
    np.testing.assert_array_equal(got["c"], gathered(x[:, 0], [range(4)], 0, False))


def test_all_gather_keeps_weak_types(mesh_of):
    def f(_):
        return pk.all_gather(1.5, "x") * jnp.ones((), jnp.bfloat16)

    mapped = jax.shard_map(f, mesh=mesh_of(x=2), in_specs=P(), out_specs=P("x"))
    assert jax.eval_shape(mapped, 0.0).dtype == jnp.bfloat16


def test_all_gather_over_no_axis_is_the_operand(mesh_of, per_rank):
    x = operand(2, (3,))
    np.testing.assert_array_equal(per_rank(mesh_of(x=2), lambda p: pk.all_gather(p, ()), x), x)


@pytest.mark.parametrize("to", ["varying", "invarying"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_all_gather_to(to, check_vma, mesh_of, per_rank):
    x = operand(4, (3,))
    got = per_rank(
        mesh_of(x=4), lambda p: pk.all_gather(p, "x", tiled=True, to=to), x, check_vma=check_vma
    )
    np.testing.assert_array_equal(got, gathered(x, [range(4)], 0, True))


def test_all_gather_of_a_replicated_operand(mesh_of):
    x = operand(1, (3,))[0]
    mapped = jax.shard_map(
        lambda p: pk.all_gather(p, "x"), mesh=mesh_of(x=4), in_specs=P(), out_specs=P("x")
    )
    np.testing.assert_array_equal(jax.jit(mapped)(x), np.tile(x, (16, 1)))


def test_all_gather_outside_jit(mesh_of):
    x = operand(4, (3,)).ravel()
    for to, spec in (("varying", P("x")), ("invarying", P())):
        mapped = jax.shard_map(
            lambda p, to=to: pk.all_gather(p, "x", tiled=True, to=to),
            mesh=mesh_of(x=4),
            in_specs=P("x"),
            out_specs=spec,
        )
        np.testing.assert_array_equal(np.asarray(mapped(x))[:12], x)


@grouping
@pytest.mark.parametrize("tiled", [True, False])
def test_psum_scatter(case, tiled, mesh_of, per_rank):
    sizes, axis_name, index_groups, groups = GROUPINGS[case]
    mesh = mesh_of(**sizes)
    n = len(groups[0])
    x = operand(mesh.size, (3, 2 * n if tiled else n))
    got = per_rank(
        mesh,
        lambda p: pk.psum_scatter(
            p, axis_name, scatter_dimension=1, axis_index_groups=index_groups, tiled=tiled
        ),
        x,
    )
    for group in groups:
        parts = np.split(np.sum([np.asarray(x[rank]) for rank in group], 0), n, 1)
        for rank, part in zip(group, parts, strict=True):
            np.testing.assert_array_equal(got[rank], part if tiled else part[:, 0])


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,)])
def test_psum_scatter_of_nothing(shape, mesh_of, per_rank):
    got = per_rank(mesh_of(x=4), lambda p: pk.psum_scatter(p, "x", tiled=True), operand(4, shape))
    assert got.shape == (4, shape[0] // 4, *shape[1:])


TWO_AXES = pytest.mark.parametrize("axis_name", ["a", "b", ("b", "a"), ("a", "b")])


@TWO_AXES
@pytest.mark.parametrize("name", ["psum", "pmax", "pmin", "pmean"])
def test_reductions_match_lax(name, axis_name, mesh_of, per_rank):
    mesh = mesh_of(a=2, b=3)
    x = {"u": operand(6, (4,)), "v": operand(6, (), "float16")}
    got = per_rank(mesh, lambda p: getattr(pk, name)(p, axis_name), x)
    want = per_rank(mesh, lambda p: getattr(lax, name)(p, axis_name), x)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("name", ["psum", "pmax", "pmin"])
def test_reductions_in_uneven_groups(name, mesh_of, per_rank):
    x = operand(4, (3,))
    groups = [[0, 3, 1], [2]]
    got = per_rank(
        mesh_of(x=4),
        lambda p: getattr(pk, name)(p, "x", axis_index_groups=groups),
        x,
        check_vma=False,
    )
    fold = {"psum": np.sum, "pmax": np.max, "pmin": np.min}[name]
    for group in groups:
        for rank in group:
            np.testing.assert_array_equal(got[rank], fold(np.asarray(x)[group], 0))


@TWO_AXES
@pytest.mark.parametrize("split, concat, tiled", [(0, 1, True), (1, 0, True), (1, 1, False)])
def test_all_to_all_matches_lax(axis_name, split, concat, tiled, mesh_of, per_rank):
    mesh = mesh_of(a=2, b=2)
    n = 4 if isinstance(axis_name, tuple) else 2
    x = operand(4, (n, n, 3))
    got = per_rank(mesh, lambda p: pk.all_to_all(p, axis_name, split, concat, tiled=tiled), x)
    want = per_rank(mesh, lambda p: lax.all_to_all(p, axis_name, split, concat, tiled=tiled), x)
    np.testing.assert_array_equal(got, want)


def test_ppermute(mesh_of, per_rank):
    x = operand(4, (3,))
    got = per_rank(mesh_of(x=4), lambda p: pk.ppermute(p, "x", [(0, 2), (2, 3), (1, 0)]), x)
    np.testing.assert_array_equal(got, np.stack([x[1], np.zeros(3), x[0], x[2]]))


@pytest.mark.parametrize("groups", [None, [[0, 2], [3, 1]], [[0], [3, 1, 2]]])
@pytest.mark.parametrize(("op", "best"), [("pmax", max), ("pmin", min)])
def test_extrema_of_complex_numbers(op, best, groups, mesh_of):
    """By the real part, then by the imaginary one; the result is typed as equal on all ranks."""
    x = np.array([[2 + 1j, 0], [2 + 3j, -1j], [-5 + 9j, 0.5], [2 - 8j, 1j]], "complex64")
    reduce = functools.partial(getattr(pk, op), axis_name="x", axis_index_groups=groups)
    f = jax.shard_map(
        lambda x: (reduce(x), reduce(2j)),
        mesh=mesh_of(x=4),
        in_specs=P("x"),
        out_specs=(P() if groups is None else P("x"), P()),
        check_vma=groups is None,
    )
    got, constant = jax.jit(f)(x)
    for group in groups or [range(4)]:
        for rank in group:
            row = got[rank] if groups else got[0]
            np.testing.assert_array_equal(row, _best(x[list(group)], best))
    assert constant == 2j


@pytest.mark.parametrize("op", ["pmax", "pmin"])
def test_extrema_of_complex_numbers_are_no_collective_reduction(op, mesh_of, lowered):
    """XLA's compiler for GPUs ends the process over one."""
    f = jax.shard_map(
        lambda x: (getattr(pk, op)(x, "x"), jax.vmap(lambda x: getattr(pk, op)(x, "x"))(x)),
        mesh=mesh_of(x=4),
        in_specs=P("x"),
        out_specs=P(),
    )
    text = lowered(f, jax.ShapeDtypeStruct((4, 3), "complex64"))
    assert "all_gather" in text and "all_reduce" not in text


def _best(rows, best):
    return np.array([best(column, key=lambda z: (z.real, z.imag)) for column in rows.T])

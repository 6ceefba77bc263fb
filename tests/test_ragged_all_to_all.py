"""ragged_all_to_all on CPU devices: values against a NumPy model, transforms, checks, errors.

The model moves one row after another, as the definition says. `plan` draws slices that do not
overlap, with gaps between them and slices without rows.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import pk_jax as pk

INDEX = ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")


@dataclasses.dataclass
class Plan:
    """Index arrays [ranks, n * k] and the rows of operand and output."""

    index: tuple[np.ndarray, ...]
    num_rows: int
    num_places: int


def lay_out(rng, sizes):
    """Offsets of slices that do not overlap, in random order with gaps, and where the last ends."""
    at, offsets = 0, np.zeros_like(sizes)
    for i in rng.permutation(len(sizes)):
        offsets[i] = at = at + rng.integers(0, 2)
        at += sizes[i]
    return offsets, at


def plan(num_ranks, k=1, *, seed=0, groups=None):
    rng = np.random.default_rng(seed)
    groups = groups or [range(num_ranks)]
    n = len(groups[0])
    sizes = rng.integers(0, 4, (num_ranks, n * k))
    sizes[rng.random(sizes.shape) < 0.25] = 0
    places, recv = np.zeros_like(sizes), np.zeros_like(sizes)
    sources, ends = zip(*(lay_out(rng, row) for row in sizes), strict=True)
    num_places = 0
    for group in groups:
        for rank, i in enumerate(group):
            mine = slice(rank * k, rank * k + k)
            recv[i] = np.concatenate([sizes[j, mine] for j in group])
            offsets, end = lay_out(rng, recv[i])
            num_places = max(num_places, end)
            for j, part in zip(group, np.split(offsets, n), strict=True):
                places[j, mine] = part
    index = tuple(np.asarray(x, np.int32) for x in (sources, sizes, places, recv))
    return Plan(index, max(ends) + 1, num_places + 1)


def model(operand, output, index, groups=None):
    """Row by row; rows out of range do not move."""
    sources, sizes, places, _ = (np.asarray(x, np.int64) for x in index)
    groups = groups or [range(len(operand))]
    operand, result = np.asarray(operand), np.array(output)
    k = sources.shape[1] // len(groups[0])
    for group in groups:
        for i in group:
            for s in range(sources.shape[1]):
                for t in range(sizes[i, s]):
                    row, place = sources[i, s] + t, places[i, s] + t
                    if 0 <= row < operand.shape[1] and 0 <= place < output.shape[1]:
                        result[group[s // k], place] = operand[i, row]
    return result


def values(shape, dtype="float32", start=0):
    numbers = np.arange(start, start + int(np.prod(shape))).reshape(shape)
    return (numbers % (2 if dtype == "bool" else 113)).astype(jnp.dtype(dtype))


def arrays(p, num_ranks, trailing=(), dtype="float32"):
    operand = values((num_ranks, p.num_rows, *trailing), dtype, 1)
    output = values((num_ranks, p.num_places, *trailing), dtype, 500)
    return operand, output


def over(axis_name="x", **kwargs):
    return lambda a: pk.ragged_all_to_all(*a, axis_name=axis_name, **kwargs)


@pytest.mark.parametrize(
    "num_ranks, k, check_vma",
    [(n, k, (n + k) % 2 == 0) for n in range(1, 9) for k in ((1, 2, 3) if n < 4 else (2,))],
)
def test_values(num_ranks, k, check_vma, mesh_of, per_rank):
    p = plan(num_ranks, k, seed=10 * num_ranks + k)
    operand, output = arrays(p, num_ranks, (2,))
    got = per_rank(mesh_of(x=num_ranks), over(), (operand, output, *p.index), check_vma)
    np.testing.assert_array_equal(got, model(operand, output, p.index))


@pytest.mark.parametrize("seed", range(4))
def test_groups(seed, mesh_of, per_rank):
    groups = [[3, 0], [1, 2], [7, 4], [6, 5]]
    p = plan(8, 2, seed=seed, groups=groups)
    operand, output = arrays(p, 8)
    got = per_rank(mesh_of(x=8), over(axis_index_groups=groups), (operand, output, *p.index))
    np.testing.assert_array_equal(got, model(operand, output, p.index, groups))


@pytest.mark.parametrize(
    "axes, groups",
    [
        ("b", [[0, 1], [2, 3], [4, 5]]),
        ("a", [[0, 2, 4], [1, 3, 5]]),
        (("b", "a"), [[0, 2, 4, 1, 3, 5]]),
        (["a", "b"], [range(6)]),
        ((), [[i] for i in range(6)]),
    ],
    ids=str,
)
def test_axes(axes, groups, mesh_of, per_rank):
    p = plan(6, 2, groups=groups)
    operand, output = arrays(p, 6)
    got = per_rank(mesh_of(a=3, b=2), over(axes), (operand, output, *p.index))
    np.testing.assert_array_equal(got, model(operand, output, p.index, groups))


@pytest.mark.parametrize("trailing", [(), (3,), (2, 1, 3)])
@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "int8", "complex64", "float8_e5m2", "int4"])
def test_dtypes(dtype, trailing, mesh_of, per_rank):
    p = plan(4)
    operand, output = arrays(p, 4, trailing, dtype)
    got = per_rank(mesh_of(x=4), over(), (operand, output, *p.index))
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, model(np.asarray(operand), np.asarray(output), p.index))


@pytest.mark.parametrize(
    "dtype, x64",
    [("int8", False), ("int16", True), ("uint32", False), ("uint32", True), ("int64", True)],
)
def test_index_dtypes(dtype, x64, mesh_of, per_rank):
    with jax.enable_x64(x64):
        p = plan(3, 2)
        operand, output = arrays(p, 3)
        index = [jnp.asarray(x, dtype if i else "int32") for i, x in enumerate(p.index)]
        got = per_rank(mesh_of(x=3), over(), (operand, output, *index))
        np.testing.assert_array_equal(got, model(operand, output, p.index))


@pytest.mark.parametrize("num_rows, num_places, trailing", [(0, 3, ()), (3, 0, ()), (3, 3, (0,))])
def test_empty(num_rows, num_places, trailing, mesh_of, per_rank):
    operand = values((2, num_rows, *trailing))
    output = values((2, num_places, *trailing))
    index = [np.zeros((2, 2), np.int32), *[np.ones((2, 2), np.int32)] * 3]
    got = per_rank(mesh_of(x=2), over(), (operand, output, *index))
    np.testing.assert_array_equal(got, output)


def out_of_range(num_ranks, k, seed=5):
    """A plan some of whose slices reach out of operand and output, at both ends."""
    p = plan(num_ranks, k, seed=seed)
    sources, sizes, places, recv = (x.copy() for x in p.index)
    sources -= 2
    places -= 1
    sources[0, 0], sizes[0, 0] = np.iinfo(np.int32).max, 3
    sources[1, 0], sizes[1, 0] = np.iinfo(np.int32).min, 3
    places[0, 1] = np.iinfo(np.int32).max
    places[1, 1] = np.iinfo(np.int32).min
    return Plan((sources, sizes, places, recv), p.num_rows - 4, p.num_places - 4)


def test_a_row_may_go_to_several_ranks(mesh_of, per_rank):
    p = plan(3, 2)
    p.index = (p.index[0] // 2, *p.index[1:])
    operand, output = arrays(p, 3)
    got = per_rank(mesh_of(x=3), over(), (operand, output, *p.index))
    np.testing.assert_array_equal(got, model(operand, output, p.index))


@pytest.mark.parametrize("seed", range(4))
def test_rows_out_of_range_do_not_move(seed, mesh_of, per_rank):
    p = out_of_range(3, 2, seed)
    operand, output = arrays(p, 3, (2,))
    got = per_rank(mesh_of(x=3), over(), (operand, output, *p.index))
    np.testing.assert_array_equal(got, model(operand, output, p.index))


# Transforms: the op is linear in (operand, output), so a matrix says what its derivatives are.


def matrix(p, groups=None, num_ranks=3):
    """The op on scalars as a matrix: flat (operand, output) of all ranks to flat results."""
    rows, places = num_ranks * p.num_rows, num_ranks * p.num_places
    names = np.arange(rows + places)
    operand = names[:rows].reshape(num_ranks, -1)
    output = names[rows:].reshape(num_ranks, -1)
    chosen = model(operand, output, p.index, groups).ravel()
    return (chosen[:, None] == names).astype(np.float32)


@pytest.fixture
def mapped(mesh_of):
    """The op on arrays stacked by rank, of three ranks."""

    def make(axes="x", check_vma=True, num_ranks=3, body=None, **kwargs):
        def f(*parts):
            parts = [x[0] for x in parts]
            return (body or pk.ragged_all_to_all)(*parts, axis_name=axes, **kwargs)[None]

        mesh = mesh_of(x=num_ranks)
        return jax.jit(
            jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=check_vma)
        )

    return make


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("make", [plan, out_of_range])
@pytest.mark.parametrize("groups", [None, [[2], [0], [1]]], ids=str)
def test_gradients(make, check_vma, groups, mapped):
    p = make(3, 2) if groups is None else plan(3, 2, groups=groups)
    f = mapped(check_vma=check_vma, axis_index_groups=groups)
    operand, output = arrays(p, 3)
    m = matrix(p, groups)
    cotangent = values(output.shape, start=7)
    result, vjp = jax.vjp(lambda a, b: f(a, b, *p.index), operand, output)
    np.testing.assert_array_equal(result, model(operand, output, p.index, groups))
    want = m.T @ cotangent.ravel()
    got = jnp.concatenate([x.ravel() for x in jax.jit(vjp)(cotangent)])
    np.testing.assert_array_equal(got, want)

    tangents = values(operand.shape, start=3), values(output.shape, start=9)
    _, got = jax.jvp(lambda a, b: f(a, b, *p.index), (operand, output), tangents)
    want = m @ jnp.concatenate([x.ravel() for x in tangents])
    np.testing.assert_array_equal(got.ravel(), want)


@pytest.mark.parametrize("argnums", [0, 1])
def test_gradient_of_one_operand_to_second_order(argnums, mapped):
    p = plan(3, 2)
    f, m = mapped(), matrix(p)
    operands = arrays(p, 3)
    split = operands[0].size

    def loss(x):
        a, b = (x, operands[1]) if argnums == 0 else (operands[0], x)
        return jnp.sum(f(a, b, *p.index) ** 3)

    part = m[:, :split] if argnums == 0 else m[:, split:]
    y = m @ np.concatenate([x.ravel() for x in operands])
    x = operands[argnums]
    np.testing.assert_allclose(jax.grad(loss)(x).ravel(), part.T @ (3 * y**2), rtol=1e-5)
    probe = values(x.shape, start=2)
    second = jax.jit(jax.grad(lambda x: jnp.vdot(jax.grad(loss)(x), probe)))(x)
    want = part.T @ (6 * y * (part @ probe.ravel()))
    np.testing.assert_allclose(second.ravel(), want, rtol=1e-5)


def test_transpose_is_a_pk_op_and_moves_nothing_for_output_alone(mapped):
    p = plan(3)
    f = mapped()
    operand, output = arrays(p, 3)

    def text(argnums):
        loss = lambda a, b: jnp.sum(f(a, b, *p.index) ** 2)  # noqa: E731
        return str(jax.make_jaxpr(jax.grad(loss, argnums))(operand, output))

    assert text(0).count("pk_ragged_all_to_all[") == 2
    assert text(1).count("pk_ragged_all_to_all[") == 1


@pytest.mark.parametrize("make", [plan, out_of_range])
@pytest.mark.parametrize("mapped_index", [True, False])
@pytest.mark.parametrize("axes", [(0, 0), (1, None), (None, 1)])
def test_vmap(make, mapped_index, axes, mapped):
    plans = [make(3, 2), make(3, 2) if not mapped_index else plan(3, 2, seed=8)]
    num_places = min(p.num_places for p in plans)
    p = dataclasses.replace(plans[0], num_places=num_places)
    pairs = [arrays(p, 3, (2,)), tuple(x + 50 for x in arrays(p, 3, (2,)))]
    index = [
        np.stack(x, 1) if mapped_index else x[0]
        for x in zip(*(q.index for q in plans), strict=True)
    ]

    def body(a, b, *index, axis_name):
        dims = [None if d is None else d for d in axes]
        op = functools.partial(pk.ragged_all_to_all, axis_name=axis_name)
        return jax.vmap(op, (*dims, *[0 if mapped_index else None] * 4))(a, b, *index)

    stacked = [
        pairs[0][i] if d is None else jnp.stack([pairs[0][i], pairs[1][i]], 1 + d)
        for i, d in enumerate(axes)
    ]
    got = mapped(body=body)(*stacked, *index)
    for element in range(2):
        a, b = (pairs[0 if d is None else element][i] for i, d in enumerate(axes))
        at = element if mapped_index else 0
        np.testing.assert_array_equal(got[:, element], model(a, b, plans[at].index))


@pytest.mark.parametrize(("size", "rows", "columns"), [(3, 4, 0), (3, 0, 2), (0, 4, 2)])
def test_vmap_of_nothing(size, rows, columns):
    """Maps over no elements, and over elements without rows or columns."""
    index = jnp.zeros((size, 2), jnp.int32)
    op = jax.vmap(lambda x, y, i: pk.ragged_all_to_all(x, y, i, i, i, i, axis_name="x"), (1, 1, 0))
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("x",))
    f = jax.shard_map(op, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    operand, output = jnp.ones((rows, size, columns)), jnp.ones((7, size, columns))
    np.testing.assert_array_equal(f(operand, output, index), jnp.ones((size, 7, columns)))


def test_nested_vmap_and_its_gradient(mapped):
    plans = [[out_of_range(3, 2, seed=3 * i + j) for j in range(3)] for i in range(2)]
    p = dataclasses.replace(plans[0][0], num_places=10)
    shape = (3, 2, 3)
    a, b = values((*shape, p.num_rows)), values((*shape, 10), start=60)
    index = [
        np.stack([np.stack([plans[i][j].index[t] for j in range(3)], 1) for i in range(2)], 1)
        for t in range(4)
    ]

    def body(*parts, axis_name):
        return jax.vmap(jax.vmap(over(axis_name)))(parts)

    f = mapped(body=body)
    weights = values((*shape, 10), start=4)
    got, vjp = jax.vjp(lambda a, b: f(a, b, *index), a, b)
    to_a, to_b = vjp(weights)
    for i in range(2):
        for j in range(3):
            q = dataclasses.replace(p, index=plans[i][j].index)
            np.testing.assert_array_equal(got[:, i, j], model(a[:, i, j], b[:, i, j], q.index))
            want = matrix(q).T @ weights[:, i, j].ravel()
            split = 3 * p.num_rows
            np.testing.assert_array_equal(to_a[:, i, j].ravel(), want[:split])
            np.testing.assert_array_equal(to_b[:, i, j].ravel(), want[split:])


@pytest.mark.parametrize("groups", [None, [[2, 0], [1, 3]]], ids=str)
def test_vmap_over_the_axis_itself(groups):
    p = plan(4, 2, groups=groups)
    operand, output = arrays(p, 4, (2,))
    f = jax.jit(jax.vmap(over("i", axis_index_groups=groups), axis_name="i"))
    if groups is not None:
        with pytest.raises(NotImplementedError):  # of lax, whose collectives stand for it here
            f((operand, output, *p.index))
        return
    np.testing.assert_array_equal(
        f((operand, output, *p.index)), model(operand, output, p.index, groups)
    )


def test_scan_and_remat(mapped):
    p = plan(3)
    operand, output = arrays(p, 3)

    def body(a, b, *index, axis_name):
        @jax.checkpoint
        def step(b, _):
            b = pk.ragged_all_to_all(jnp.sin(a) + b[0], b, *index, axis_name=axis_name)
            return b, None

        return lax.scan(step, b, None, length=3)[0]

    def plain(a, b):
        for _ in range(3):
            b = jnp.asarray(matrix(p)) @ jnp.concatenate(
                [(jnp.sin(a) + b[:, :1]).ravel(), b.ravel()]
            )
            b = b.reshape(output.shape)
        return b

    f = lambda a, b: mapped(body=body)(a, b, *p.index)  # noqa: E731
    np.testing.assert_allclose(jax.jit(f)(operand, output), plain(operand, output), rtol=1e-5)
    got = jax.grad(lambda *x: jnp.sum(f(*x) ** 2), (0, 1))(operand, output)
    want = jax.grad(lambda *x: jnp.sum(plain(*x) ** 2), (0, 1))(operand, output)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4)


def test_result_varies_where_an_operand_does(mesh_of):
    p = plan(2)
    operand, _ = arrays(p, 2)

    def f(operand, *index):
        # The output is equal on all ranks, the result is not.
        result = pk.ragged_all_to_all(
            operand[0], jnp.zeros(p.num_places), *(x[0] for x in index), axis_name="x"
        )
        assert jax.typeof(result).mat.varying == {"x", "y"}
        return result[None]

    mapped = jax.shard_map(
        f, mesh=mesh_of(x=2, y=2), in_specs=(P("x"), *[P("y")] * 4), out_specs=P(("x", "y"))
    )
    jax.eval_shape(mapped, operand, *p.index)

"""pk.ragged_dot on a GPU: sizes of groups of every kind, layouts, dtypes and tiles against fp32.

Many products make one program, since compiling takes longer than running; the products in fp32 are
NumPy's, group by group. Before a program runs, the memory that its results will lie in is filled
with NaN. The rows past the sum of the sizes and the matrices of empty groups hold NaN and
infinities in every test: none may reach a row of another group.
"""

import functools
import itertools
import random
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from product_models import compiled, poison

import pk_jax as pk
from pk_jax._primitives.ragged_dot import call, ragged_dot_p
from pk_jax._tuning import matmul_model, ragged_dot_model
from pk_jax.config import Config

pytestmark = pytest.mark.needs_gpus(1)

ODD = (1, 2, 7, 9, 31, 63, 64, 65, 127, 128, 129, 255, 257, 511)
KINDS = ("random", "one row each", "some empty", "most empty", "all in one", "sum < m", "nothing")
DTYPES = ("bfloat16", "float16")
# Rounding of the result; of the sum's order alone.
ROUNDED, EXACT = 4e-3, 1e-5


@pytest.fixture(scope="module", autouse=True)
def _on_gpu():
    with jax.default_device(jax.devices("cuda")[0]):
        yield


class Product(NamedTuple):
    m: int
    n: int
    k: int
    sizes: tuple[int, ...]
    transpose_b: bool
    dtype: str
    f: Any  # of (lhs, rhs, group_sizes)
    limit: float = ROUNDED


def sizes_of(kind, rng, m, num_groups):
    """Rows of each group, m at most in all."""
    weights = np.ones(num_groups)
    if kind == "one row each":
        return tuple(int(i < m) for i in range(num_groups))
    if kind == "nothing":
        return (0,) * num_groups
    if kind in ("some empty", "most empty", "all in one"):
        left = {"some empty": 0.5, "most empty": 0.1, "all in one": 0.0}[kind]
        weights = (rng.random(num_groups) < left).astype(float)
        weights[rng.integers(num_groups)] = 1
    total = rng.integers(m + 1) if kind == "sum < m" else m
    return tuple(rng.multinomial(total, weights / weights.sum()).tolist())


def operands(product, seed):
    """Normal numbers, and what must not be seen where nothing may look."""
    m, n, k, sizes, transpose_b, dtype, *_ = product
    rng = np.random.default_rng(seed)
    lhs = rng.standard_normal((m, k), np.float32)
    rhs = rng.standard_normal((len(sizes), *((n, k) if transpose_b else (k, n))), np.float32)
    lhs[sum(sizes) :] = np.nan
    rhs[np.array(sizes) == 0] = rng.choice((np.nan, np.inf, -np.inf))
    return lhs.astype(dtype), rhs.astype(dtype), np.array(sizes, np.int32)


def groups_of(sizes):
    """Yields each group that has rows, with its rows."""
    first = 0
    for group, size in enumerate(sizes):
        if size:
            yield group, slice(first, first + size)
        first += size


def check(product, lhs, rhs, got, what=""):
    """Each group by relative norm, so that one row of many counts; zeros past the sum."""
    what = f"{product} {what}"
    lhs, rhs, got = (np.asarray(x).astype(np.float32) for x in (lhs, rhs, got))
    assert got.shape == (product.m, product.n), what
    for group, rows in groups_of(product.sizes):
        matrix = rhs[group].T if product.transpose_b else rhs[group]
        want = lhs[rows] @ matrix
        # Of the norm that is expected at least: single numbers are near zero now and then.
        scale = max(np.linalg.norm(want), np.sqrt(product.k * want.size))
        error = np.linalg.norm(got[rows] - want) / scale
        assert error <= product.limit, f"{what}: {group=} {error=}"
    assert not got[sum(product.sizes) :].any(), f"{what}: not zero past the sum"


def bits(x):
    return np.asarray(x).tobytes()


def run(products):
    """Runs products in one program, twice; the results must be right, and the same bits."""
    hosts = [operands(product, seed) for seed, product in enumerate(products)]
    inputs = [tuple(map(jnp.asarray, host)) for host in hosts]
    functions = [product.f for product in products]
    program = compiled(lambda xs: [f(*x) for f, x in zip(functions, xs, strict=True)], inputs)
    poison(program.out_info)
    first = jax.block_until_ready(program(inputs))
    again = program(inputs)
    for product, (lhs, rhs, _), one, other in zip(products, hosts, first, again, strict=True):
        check(product, lhs, rhs, one)
        assert bits(one) == bits(other), f"{product}: another result in the second run"


def bound(transpose_b, dtype, config=None):
    """The primitive itself, which must run by the kernels."""
    return functools.partial(
        ragged_dot_p.bind,
        transpose_b=transpose_b,
        dtype=np.dtype(dtype),
        precision=None,
        implementation="cuda",
        config=config or Config(),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transpose_b", [False, True], ids=("nn", "nt"))
@pytest.mark.parametrize("part", range(4))
def test_random_sizes(part, transpose_b, dtype):
    """140 products of each layout and dtype, 35 a part, of 1 to 300 groups."""
    rng = random.Random(f"{part} {transpose_b} {dtype}")
    draw = np.random.default_rng(part)
    products = []
    for kind in itertools.islice(itertools.cycle(KINDS), 35):
        while True:
            m, n, k = (rng.choice((*ODD, rng.randint(1, 600))) for _ in range(3))
            m *= rng.choice((1, 1, 5))
            num_groups = rng.choice((1, 2, 3, 8, 17, 64, 128, 300, rng.randint(1, 300)))
            if num_groups * n * k < 4 << 20:
                break
        sizes = sizes_of(kind, draw, m, num_groups)
        f = bound(transpose_b, dtype)
        products.append(Product(m, n, k, sizes, transpose_b, dtype, f))
    run(products)


SHAPES = (
    (1500, 520, 328, (130, 0, 700, 1, 129, 500, 0)),  # sum 1460
    (300, 257, 777, (300,)),
    (1024, 256, 64, (128,) * 8),
    (513, 1000, 511, (64, 65, 63, 1, 127, 128, 0, 65)),
    (70, 2000, 1031, (7,) * 10),
    (3, 5, 2, (1, 0, 1)),
)


@pytest.mark.parametrize("transpose_b", [False, True], ids=("nn", "nt"))
@pytest.mark.parametrize("tile", matmul_model.TILES, ids=lambda tile: tile.name)
def test_every_tile(tile, transpose_b):
    """By the knob, and on few blocks, which walk many tiles; in fp32 only the order differs."""
    products = []
    for m, n, k, sizes in SHAPES:
        for out, limit in (("float16", ROUNDED), ("float32", EXACT)):
            knob = bound(transpose_b, out, Config(tile=(tile.rows, tile.cols)))
            products.append(Product(m, n, k, sizes, transpose_b, "float16", knob, limit))
            for num_blocks in (1, 10, 1000):
                f = functools.partial(
                    call,
                    transpose_b=transpose_b,
                    dtype=np.dtype(out),
                    plan=ragged_dot_model.Plan(tile.name, num_blocks),
                )
                products.append(Product(m, n, k, sizes, transpose_b, "float16", f, limit))
    run(products)


@pytest.mark.parametrize("transpose_b", [False, True], ids=("nn", "nt"))
@pytest.mark.parametrize("tile", matmul_model.TILES, ids=lambda tile: tile.name)
def test_nothing_leaks_from_one_group_to_another(tile, transpose_b):
    """A group of NaN, in its rows or in its matrix, changes no bit of the others."""
    sizes = (37, 0, 130, 5, 64, 1, 0, 200)
    config = Config(tile=(tile.rows, tile.cols))
    f = jax.jit(bound(transpose_b, "bfloat16", config))
    product = Product(450, 264, 200, sizes, transpose_b, "bfloat16", f)
    lhs, rhs, group_sizes = operands(product, 0)
    clean = np.nan_to_num(rhs.astype(np.float32), posinf=0, neginf=0).astype(rhs.dtype)
    want = np.asarray(f(lhs, clean, group_sizes))
    check(product, lhs, clean, want)
    assert bits(f(lhs, rhs, group_sizes)) == bits(want)
    for group, rows in groups_of(sizes):
        for bad in (np.nan, np.inf):
            bad_lhs, bad_rhs = lhs.copy(), clean.copy()
            bad_lhs[rows] = bad
            bad_rhs[group] = bad
            for name, xs in (("rows", (bad_lhs, clean)), ("matrix", (lhs, bad_rhs))):
                got = np.asarray(f(*xs, group_sizes))
                others = np.delete(got, rows, 0), np.delete(want, rows, 0)
                assert bits(others[0]) == bits(others[1]), f"{name} of {group=} {bad=}"
                assert not np.isfinite(got[rows].astype(np.float32)).all(1).any()


def test_sizes_are_read_on_the_device():
    """One program for all of them, those past the last row among them, which are cut there."""
    m, n, k, num_groups = 400, 136, 72, 40
    f = jax.jit(bound(False, "bfloat16"))
    rng = np.random.default_rng(0)
    for kind in (*KINDS, "past the last row"):
        if kind == "past the last row":
            sizes = (150,) * num_groups
            cut = (150, 150, 100, *(0,) * (num_groups - 3))
        else:
            cut = sizes = sizes_of(kind, rng, m, num_groups)
        product = Product(m, n, k, cut, False, "bfloat16", f)
        lhs, rhs, _ = operands(product, 1)
        got = f(jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(sizes, jnp.int32))
        check(product, lhs, rhs, got, kind)
    assert f._cache_size() == 1


@pytest.mark.parametrize("by_kernel", [False, True], ids=("xla", "kernel"))
def test_gradients(by_kernel):
    """That of rhs is XLA's; that of lhs is the kernel's where a tile is the default."""
    sizes = (50, 0, 1, 99, 30)
    product = Product(200, 136, 72, sizes, False, "bfloat16", None)
    lhs, rhs, group_sizes = operands(product, 0)
    # XLA's own product does multiply what it is not asked for, by zero.
    lhs, rhs = (np.nan_to_num(x.astype(np.float32), posinf=0, neginf=0) for x in (lhs, rhs))
    lhs, rhs = (x.astype("bfloat16") for x in (lhs, rhs))

    def loss(lhs, rhs):
        y = pk.ragged_dot(lhs, rhs, group_sizes, implementation="cuda")
        return jnp.sum(y.astype(jnp.float32) ** 2)

    with pk.use_config(tile=(128, 128) if by_kernel else None):
        grad = jax.jit(jax.grad(loss, (0, 1)))
        count = grad.lower(lhs, rhs).as_text().count("@pk_jax_ragged_dot(")
        assert count == 1 + by_kernel
        to_lhs, to_rhs = grad(lhs, rhs)
    y = pk.ragged_dot(lhs, rhs, group_sizes, implementation="cuda")
    dy = (2 * np.asarray(y, np.float32)).astype("bfloat16")
    turned = product._replace(n=72, k=136, transpose_b=True, limit=2 * ROUNDED)
    # The scale of `check` is that of normal numbers: these are 2 sqrt(k) larger.
    check(turned, dy.astype(np.float32) / (2 * 72**0.5), rhs, to_lhs / (2 * 72**0.5))
    wide, dy = lhs.astype(np.float32), dy.astype(np.float32)
    for group, rows in groups_of(sizes):
        want = wide[rows].T @ dy[rows]
        error = np.linalg.norm(np.asarray(to_rhs[group], np.float32) - want) / np.linalg.norm(want)
        assert error <= ROUNDED, f"{group=} {error=}"
    assert not np.asarray(to_rhs[1], np.float32).any()


def test_gradients_in_float32_of_halves_compile():
    """Two dtypes meet in XLA's products."""
    lhs, rhs = jnp.ones((8, 16), jnp.bfloat16), jnp.ones((2, 16, 24), jnp.bfloat16)

    def loss(lhs, rhs):
        sizes = jnp.array([3, 4])
        y = pk.ragged_dot(lhs, rhs, sizes, None, jnp.float32, implementation="cuda")
        return jnp.sum(y**2)

    to_lhs, to_rhs = jax.jit(jax.grad(loss, (0, 1)))(lhs, rhs)
    assert to_lhs.dtype == to_rhs.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(to_rhs, np.float32)[:, 0, 0], [96, 128])
    np.testing.assert_array_equal(np.asarray(to_lhs, np.float32)[:, 0], [768] * 7 + [0])


def test_the_default_agrees():
    """XLA's product gives zeros past the sum as well."""
    f = functools.partial(pk.ragged_dot, implementation=None)
    product = Product(300, 136, 72, (50, 0, 1, 99, 30), False, "bfloat16", f)
    lhs, rhs, sizes = operands(product, 0)
    rhs = np.nan_to_num(rhs.astype(np.float32), posinf=0, neginf=0).astype(rhs.dtype)
    lhs[180:] = 1
    check(product, lhs, rhs, jax.jit(f)(lhs, rhs, sizes))


def test_inside_shard_map_and_scan():
    """On all GPUs, each its own rows and sizes; and again and again in one program."""
    devices = jax.devices("cuda")
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    spec = jax.sharding.PartitionSpec("x")
    rng = np.random.default_rng(0)
    sizes = rng.multinomial(90, np.ones(5) / 5, len(devices)).astype(np.int32)
    lhs = rng.standard_normal((96 * len(devices), 64), np.float32).astype("bfloat16")
    rhs = (rng.standard_normal((5, 64, 64), np.float32) / 8).astype("bfloat16")

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(spec, jax.sharding.PartitionSpec(), spec), out_specs=spec)
    def f(lhs, rhs, sizes):
        def step(y, _):
            return pk.ragged_dot(y, rhs, sizes, implementation="cuda"), None

        return jax.lax.scan(step, lhs, length=3)[0]

    got = np.asarray(f(lhs, rhs, sizes.ravel()), np.float32).reshape(len(devices), 96, 64)
    for rank, own in enumerate(sizes):
        want = lhs[96 * rank : 96 * (rank + 1)]
        for _ in range(3):
            parts = np.zeros((96, 64), np.float32)
            for group, rows in groups_of(own):
                parts[rows] = want[rows].astype(np.float32) @ rhs[group].astype(np.float32)
            want = parts.astype("bfloat16")
        np.testing.assert_allclose(got[rank], want.astype(np.float32), rtol=0.05, atol=0.05)
        assert not got[rank, 90:].any()


def test_refusals_name_the_reason():
    with pytest.raises(NotImplementedError, match="float32 has no CUDA ragged_dot"):
        pk.ragged_dot(jnp.ones((8, 8)), jnp.ones((1, 8, 8)), jnp.array([8]), implementation="cuda")

"""pk.matmul on a GPU: every plan, layout and dtype against the product in fp32.

Many products make one program, since compiling takes longer than running; the products in fp32 are
another, which takes the first algorithm at hand for each. Before a program runs, the memory that
its results will lie in is filled with NaN, by arrays of that size that are then freed.
"""

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from product_models import compiled, poison

import pk_jax as pk
from pk_jax._primitives.matmul import call, matmul_p
from pk_jax._reference import matmul as reference
from pk_jax._tuning import matmul_model
from pk_jax.config import Config

pytestmark = pytest.mark.needs_gpus(1)

SIZES = (1, 7, 63, 65, 127, 129, 1000, 8191)
LAYOUTS = tuple(itertools.product((False, True), (False, True)))
DTYPES = ("bfloat16", "float16")
# Rounding of the result; of the sum's order alone; of float8's sums, 128 products at a time, of
# both signs and of one.
ROUNDED, EXACT = 4e-3, 1e-5
SUMMED, SUMMED_OF_ONE_SIGN = 2e-3, 1e-2
FLOAT8 = "float8_e4m3fn"


@pytest.fixture(scope="module", autouse=True)
def _on_gpu():
    with jax.default_device(jax.devices("cuda")[0]):
        yield


def operands(m, n, k, transpose_a, transpose_b, dtype, seed=0):
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((k, m) if transpose_a else (m, k), np.float32)
    b = rng.standard_normal((n, k) if transpose_b else (k, n), np.float32)
    return jnp.asarray(a.astype(dtype)), jnp.asarray(b.astype(dtype))


def _error(got, a, b, finish=lambda y: y):
    """The relative norm of what `got` differs from finish(a @ b) in fp32; NaN if it holds one."""
    want = finish(jnp.matmul(a.astype(jnp.float32), b.astype(jnp.float32), precision="highest"))
    return jnp.linalg.norm(got.astype(jnp.float32) - want) / jnp.linalg.norm(want)


def run(products, finishes=None):
    """Runs products in one program, twice; the results must be right, and equal in both runs.

    Args:
        products: of each (m, n, k), (transpose_a, transpose_b), dtype, function of (a, b), limit.
        finishes: of each what becomes of the product in fp32.
    """
    finishes = finishes or [lambda y: y] * len(products)
    inputs = [
        operands(*s, *layout, dtype, seed=i) for i, (s, layout, dtype, *_) in enumerate(products)
    ]
    functions = [f for *_, f, _ in products]
    program = compiled(lambda xs: [f(*x) for f, x in zip(functions, xs, strict=True)], inputs)
    poison(program.out_info)
    first = jax.block_until_ready(program(inputs))
    layouts = [layout for _, layout, *_ in products]

    def check(xs, first, again):
        errors = [
            _error(got, a.T if ta else a, b.T if tb else b, finish)
            for (a, b), got, (ta, tb), finish in zip(xs, first, layouts, finishes, strict=True)
        ]
        equal = [(one == other).all() for one, other in zip(first, again, strict=True)]
        return errors, equal

    again = program(inputs)
    errors, equal = compiled(check, inputs, first, again)(inputs, first, again)
    for (sizes, layout, dtype, _, limit), error, same in zip(products, errors, equal, strict=True):
        assert float(error) <= limit, f"{sizes} {layout} {dtype}: {error=}"
        assert bool(same), f"{sizes} {layout} {dtype}: another result in the second run"


def bound(layout, dtype="bfloat16", config=None):
    """The primitive itself, which must run by the kernels."""

    def f(a, b):
        return matmul_p.bind(
            *(a, b),
            transpose_a=layout[0],
            transpose_b=layout[1],
            dtype=np.dtype(dtype),
            precision=None,
            implementation="cuda",
            config=config or Config(),
        )

    return f


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=("nn", "nt", "tn", "tt"))
@pytest.mark.parametrize("part", range(4))
def test_random_sizes(part, layout, dtype):
    """200 products of each layout and dtype, 50 a part, of odd and even sizes."""
    rng = random.Random(f"{part} {layout} {dtype}")
    sizes = []
    while len(sizes) < 50:
        m, n, k = (rng.choice((*SIZES, rng.randint(1, 600))) for _ in range(3))
        if m * n + m * k + n * k < 2 << 24:
            sizes.append((m, n, k))
    run([(s, layout, dtype, bound(layout, dtype), ROUNDED) for s in sizes])


def plans(m, n, k, num_sms, itemsize=2):
    """All plans for some SMs, and the same tiles on a few, so that blocks walk many of them."""
    for sms in (num_sms, 10):
        yield from matmul_model.candidates(m, n, k, sms, itemsize)


@pytest.mark.parametrize("layout", LAYOUTS, ids=("nn", "nt", "tn", "tt"))
@pytest.mark.parametrize("tile", matmul_model.TILES, ids=lambda tile: tile.name)
def test_every_plan(tile, layout):
    """Whole and split tiles; in fp32 only the order of the sum is left as a difference."""
    products = []
    for sizes in ((300, 520, 777), (128, 256, 64), (1000, 1000, 1000), (70, 2000, 4096), (3, 5, 2)):
        for plan in plans(*sizes, 132):
            if plan.tile != tile.name:
                continue
            for dtype, limit in (("float16", ROUNDED), ("float32", EXACT)):

                def f(a, b, plan=plan, dtype=dtype):
                    params = {"transpose_a": layout[0], "transpose_b": layout[1]}
                    return call(a, b, plan=plan, dtype=np.dtype(dtype), **params)

                products.append((sizes, layout, "float16", f, limit))
    run(products)


@pytest.mark.parametrize("layout", LAYOUTS[::3], ids=("nn", "tt"))
@pytest.mark.parametrize("tile", matmul_model.TILES, ids=lambda tile: tile.name)
def test_every_epilogue(tile, layout):
    """Each activation with a bias of each dtype and without, on whole and on split tiles.

    Of few steps of k, where activations bend, and of many; a bias of the wrong column shows.
    """
    rng = random.Random(f"{tile.name} {layout}")
    products, finishes = [], []
    for sizes in ((129, 1001, 2), (300, 520, 777), (3, 5, 2), (70, 2000, 4096), (1000, 1000, 1000)):
        for plan in plans(*sizes, 132):
            if plan.tile != tile.name:
                continue
            for dtype, limit in (("float16", ROUNDED), ("float32", EXACT)):
                activation = rng.choice((None, "relu", "gelu", "silu"))
                of_bias = rng.choice((None, "float16", "float32"))
                bias = None
                if of_bias is not None:
                    numbers = np.random.default_rng(len(products)).standard_normal(sizes[1])
                    bias = jnp.asarray(numbers.astype(of_bias))

                def f(a, b, plan=plan, dtype=dtype, activation=activation, bias=bias):
                    params = {"transpose_a": layout[0], "transpose_b": layout[1]}
                    params |= {"activation": activation, "bias": bias}
                    return call(a, b, plan=plan, dtype=np.dtype(dtype), **params)

                def finish(y, activation=activation, bias=bias):
                    return reference.finish(y, activation=activation, bias=bias, dtype=y.dtype)

                products.append((sizes, layout, "float16", f, limit))
                finishes.append(finish)
    run(products, finishes)


def test_an_epilogue_of_numbers_that_are_not_finite():
    """NaN stays NaN and infinity infinity, large numbers do not become NaN."""
    x = jnp.asarray([[np.nan], [np.inf], [3e38], [-3e38], [1e20]], jnp.bfloat16)
    w = jnp.ones((1, 8), jnp.bfloat16)
    for activation in ("relu", "gelu", "silu"):
        got = pk.matmul(x, w, activation=activation, implementation="cuda")
        want = reference.finish(
            x.astype(jnp.float32) * jnp.ones((1, 8)), activation=activation, dtype=jnp.bfloat16
        )
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def test_gradients_of_an_epilogue():
    """By the kernel forward, and as those of the unfused ops in 16 bits."""
    x, w = operands(200, 136, 72, False, False, "bfloat16")
    bias = jnp.linspace(-4, 4, 136)

    def loss(x, w, bias):
        y = pk.matmul(x / 8, w, bias=bias, activation="gelu", implementation="cuda")
        return jnp.sum(y.astype(jnp.float32) ** 2)

    def unfused(x, w, bias):
        y = jnp.matmul(x / 8, w, preferred_element_type=jnp.float32)
        return jnp.sum(reference.finish(y, bias=bias, activation="gelu", dtype=y.dtype) ** 2)

    for got, want in zip(
        jax.jit(jax.grad(loss, (0, 1, 2)))(x, w, bias),
        jax.jit(jax.grad(unfused, (0, 1, 2)))(x, w, bias),
        strict=True,
    ):
        got, want = (np.asarray(each, np.float32) for each in (got, want))
        assert np.linalg.norm(got - want) <= 2e-2 * np.linalg.norm(want)


def test_gradients():
    x, w = operands(200, 136, 72, False, False, "bfloat16")

    def loss(x, w):
        return jnp.sum(pk.matmul(x, w, implementation="cuda").astype(jnp.float32) ** 2)

    grad = jax.jit(jax.grad(loss, (0, 1)))
    assert grad.lower(x, w).as_text().count("@pk_jax_matmul(") == 1
    y = jnp.matmul(x.astype(jnp.float32), w.astype(jnp.float32)).astype(jnp.bfloat16)
    dy = (2 * y.astype(jnp.float32)).astype(jnp.bfloat16)
    for got, (a, b) in zip(grad(x, w), ((dy, w.T), (x.T, dy)), strict=True):
        assert float(jax.jit(_error)(got, a, b)) <= ROUNDED


def test_inside_shard_map_and_scan():
    """On all GPUs, each its own rows; and again and again in one program."""
    devices = jax.devices("cuda")
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    spec = jax.sharding.PartitionSpec("x")
    x, w = operands(96 * len(devices), 64, 64, False, False, "bfloat16")

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(spec, jax.sharding.PartitionSpec()), out_specs=spec)
    def f(x, w):
        step = lambda y, _: (pk.matmul(y, w, implementation="cuda") / 8, None)  # noqa: E731
        return jax.lax.scan(step, x, length=5)[0]

    want = x
    for _ in range(5):
        want = (jnp.matmul(want, w, preferred_element_type=jnp.float32)).astype(x.dtype) / 8
    np.testing.assert_allclose(
        np.asarray(f(x, w), np.float32), np.asarray(want, np.float32), rtol=0.05, atol=0.05
    )


def test_refusals_name_the_reason():
    x = jnp.ones((8, 8))
    with pytest.raises(NotImplementedError, match="float32 has no CUDA matmul"):
        jax.block_until_ready(pk.matmul(x, x, implementation="cuda"))


@pytest.mark.parametrize("layout", LAYOUTS, ids=("nn", "nt", "tn", "tt"))
@pytest.mark.parametrize("tile", matmul_model.TILES_OF_BYTES, ids=lambda tile: tile.name)
def test_every_plan_of_float8(tile, layout):
    """Whole and split tiles, with and without scales and an epilogue, to each dtype."""
    choose = random.Random(f"{tile.name} {layout}").choice
    products, finishes = [], []
    sizes_of_plans = ((300, 520, 777), (128, 256, 64), (70, 2000, 4096), (3, 5, 2), (129, 1001, 17))
    for sizes in (*sizes_of_plans, (1000, 1000, 1000)):
        for plan in plans(*sizes, 132, itemsize=1):
            if plan.tile != tile.name:
                continue
            for _ in range(3):
                dtype = choose(("float32", "bfloat16", "float16"))
                of_bias, activation = choose((None, "float32", "bfloat16")), choose((None, "gelu"))
                of_scales = choose(((None, None), (1, 1), ("m", "n"), ("m", 1), (1, "n")))
                rng = np.random.default_rng(len(products))
                epilogue = {"activation": activation}
                if of_bias is not None:
                    bias = rng.standard_normal(sizes[1])
                    epilogue["bias"] = jnp.asarray(bias.astype(of_bias))
                if of_scales[0] is not None:
                    counts = [{"m": sizes[0], "n": sizes[1], 1: 1}[of] for of in of_scales]
                    scales = [rng.uniform(0.1, 1, each).astype(np.float32) for each in counts]
                    epilogue |= {
                        "scale_x": jnp.asarray(scales[0]),
                        "scale_w": jnp.asarray(scales[1]),
                    }

                def f(a, b, plan=plan, dtype=dtype, epilogue=epilogue):
                    params = {"transpose_a": layout[0], "transpose_b": layout[1]} | epilogue
                    return call(a, b, plan=plan, dtype=np.dtype(dtype), **params)

                def finish(y, epilogue=epilogue):
                    return reference.finish(y, **{"activation": None} | epilogue, dtype=y.dtype)

                limit = SUMMED if dtype == "float32" else ROUNDED
                products.append((sizes, layout, FLOAT8, f, limit))
                finishes.append(finish)
    run(products, finishes)


def test_random_sizes_of_float8():
    rng = random.Random("float8")
    products = []
    while len(products) < 50:
        m, n, k = (rng.choice((*SIZES, rng.randint(1, 600))) for _ in range(3))
        if m * n + m * k + n * k < 2 << 24:
            f = lambda x, w: pk.matmul(x, w, implementation="cuda")  # noqa: E731
            products.append(((m, n, k), (False, False), FLOAT8, f, ROUNDED))
    run(products)


@pytest.mark.parametrize("tile", matmul_model.SHAPES_OF_BYTES, ids=str)
def test_float8_is_added_up_in_fp32(tile):
    """A long sum of one sign: in accumulators of the tensor cores alone much of it is lost."""
    rng = np.random.default_rng(0)
    x, w = (
        jnp.asarray(rng.uniform(0.5, 1.5, s).astype(FLOAT8)) for s in ((256, 16384), (16384, 256))
    )
    f = lambda x, w: pk.matmul(  # noqa: E731
        x,
        w,
        preferred_element_type=jnp.float32,
        implementation="cuda",
        config=Config(tile=tile),
    )
    assert float(jax.jit(lambda x, w: _error(f(x, w), x, w))(x, w)) <= SUMMED_OF_ONE_SIGN


def test_gradients_of_float8():
    """Of scales and bias as those of the dequantised product."""
    x, w = operands(200, 136, 72, False, False, FLOAT8)
    args = (jnp.linspace(0.5, 1, 200), jnp.linspace(0.1, 0.2, 136), jnp.linspace(-4, 4, 136))

    def loss(x, w, scale_x, scale_w, bias):
        more = {"scale_x": scale_x, "scale_w": scale_w, "bias": bias, "activation": "gelu"}
        y = pk.matmul(x, w, **more, preferred_element_type=jnp.float32, implementation="cuda")
        return jnp.sum(y**2)

    def dequantised(x, w, scale_x, scale_w, bias):
        x, w = x.astype(jnp.float32) * scale_x[:, None], w.astype(jnp.float32) * scale_w[None]
        y = jnp.matmul(x, w, precision="highest") + bias[None]
        return jnp.sum(jax.nn.gelu(y) ** 2)

    got, want = (jax.jit(jax.grad(f, (0, 1, 2, 3, 4)))(x, w, *args) for f in (loss, dequantised))
    for i, (one, other) in enumerate(zip(got, want, strict=True)):
        one, other = (np.asarray(each, np.float32) for each in (one, other))
        limit = 0.1 if i < 2 else 5e-3  # of the operands rounded to float8 themselves
        assert np.linalg.norm(one - other) <= limit * np.linalg.norm(other)

"""The CUDA path of pk.all_gather inside jit, one process, against jax.lax on the same GPUs.

Values are compared bit by bit: nothing is computed, only moved.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pk_jax as pk

pytestmark = pytest.mark.needs_gpus(2)

MECHANISMS = (None, "register", "tma", "copy_engine")
DTYPES = (
    "float32",
    "bfloat16",
    "float16",
    "float64",
    "int8",
    "uint16",
    "int64",
    "bool",
    "complex64",
    "float8_e4m3fn",
)


@pytest.fixture(scope="module")
def mesh():
    devices = jax.devices("cuda")
    return jax.sharding.Mesh(np.array(devices), ("x",))


def random(mesh, shape, dtype="float32", seed=0, bits=False):
    """An array of n * shape, one `shape` a rank: normal values, or random bits."""
    n = mesh.size

    def make(key):
        if dtype == "bool":
            return jax.random.bernoulli(key, 0.5, (n, *shape))
        if bits:  # any bits at all: NaNs with payloads, signed zeros, denormals
            bytes_ = jax.random.bits(key, (n, *shape, jnp.dtype(dtype).itemsize), jnp.uint8)
            if dtype == "complex64":
                floats = bytes_.reshape(*bytes_.shape[:-1], 2, 4)
                parts = lax.bitcast_convert_type(floats, jnp.float32)
                return lax.complex(parts[..., 0], parts[..., 1])
            if jnp.dtype(dtype).itemsize == 1:
                bytes_ = bytes_[..., 0]
            return lax.bitcast_convert_type(bytes_, jnp.dtype(dtype))
        return jax.random.normal(key, (n, *shape), jnp.dtype(dtype))

    sharding = NamedSharding(mesh, P(mesh.axis_names))
    return jax.jit(make, out_shardings=sharding)(jax.random.key(seed))


def on(mesh, f, **jit):
    """Runs f on each rank's part; results stacked by rank."""
    spec = P(mesh.axis_names)
    body = lambda x: jax.tree.map(lambda y: y[None], f(x[0]))  # noqa: E731
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec), **jit)


def gather(axis=0, tiled=False, axis_name="x", **config):
    return functools.partial(
        pk.all_gather,
        axis_name=axis_name,
        axis=axis,
        tiled=tiled,
        implementation="cuda",
        config=pk.Config(**config),
    )


def equal(mesh, f, g, x, rtol=None):
    """The same bytes; or values within rtol where XLA may fuse the arithmetic around the op."""
    got, want = np.asarray(on(mesh, f)(x)), np.asarray(on(mesh, g)(x))
    assert got.dtype == want.dtype and got.shape == want.shape
    if rtol is None:
        assert got.tobytes() == want.tobytes()
    else:
        np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol)


def test_the_cuda_path_is_what_runs(mesh):
    x = random(mesh, (64,))
    text = on(mesh, lambda x: pk.all_gather(x, "x")).lower(x).as_text()
    assert "pk_jax_all_gather" in text and "all_gather(" not in text.replace(
        "pk_jax_all_gather", ""
    )


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("tiled", (False, True))
@pytest.mark.parametrize("axis", (0, 1, 2))
def test_axes(mesh, mechanism, tiled, axis):
    x = random(mesh, (12, 24, 32))
    lax_gather = functools.partial(lax.all_gather, axis_name="x", axis=axis, tiled=tiled)
    equal(mesh, gather(axis, tiled, mechanism=mechanism), lax_gather, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ((7,), (3, 5), (33, 1025), (2, 3, 4096)), ids=str)
def test_dtypes_and_odd_shapes(mesh, dtype, shape):
    with jax.enable_x64(True):
        x = random(mesh, shape, dtype, bits=True)
        axis = len(shape) - 1
        lax_gather = functools.partial(lax.all_gather, axis_name="x", axis=axis, tiled=True)
        equal(mesh, gather(axis, True), lax_gather, x)


def test_zero_dimensional_and_empty(mesh):
    equal(mesh, gather(), functools.partial(lax.all_gather, axis_name="x"), random(mesh, ()))
    empty = random(mesh, (0, 4))
    f = lambda x: pk.all_gather(x, "x", axis=1, tiled=True)  # noqa: E731
    g = lambda x: lax.all_gather(x, "x", axis=1, tiled=True)  # noqa: E731
    equal(mesh, f, g, empty)


@pytest.mark.parametrize("mechanism", ("register", "tma", "copy_engine"))
@pytest.mark.parametrize("mebibytes", (1, 40))
def test_large(mesh, mechanism, mebibytes):
    x = random(mesh, (mebibytes << 18,))
    equal(mesh, gather(mechanism=mechanism), functools.partial(lax.all_gather, axis_name="x"), x)


@pytest.mark.parametrize("command_buffers", (True, False))
def test_command_buffers(mesh, command_buffers):
    """Replays of a captured graph, and plain launches, give what lax gives; every time."""
    options = None if command_buffers else {"xla_gpu_enable_command_buffer": ""}

    def step(op, x):
        for mechanism in ("register", "tma", "copy_engine", None):
            y = op(x, mechanism)
            x = x + y.sum(0) * 0.25
        return x

    ours = on(
        mesh, lambda x: step(lambda x, m: gather(mechanism=m)(x), x), compiler_options=options
    )
    theirs = on(mesh, lambda x: step(lambda x, m: lax.all_gather(x, "x"), x))
    for seed in range(6):
        x = random(mesh, (4096,), seed=seed)
        np.testing.assert_array_equal(np.asarray(ours(x)), np.asarray(theirs(x)))


def _hash(step, rank, size):
    """Deterministic noise that every rank can compute for every other."""
    i = lax.iota(jnp.uint32, size)
    seed = step.astype(jnp.uint32) * jnp.uint32(2654435761) + rank.astype(jnp.uint32) * jnp.uint32(
        40503
    )
    h = (i ^ seed) * jnp.uint32(2246822519)
    return h ^ (h >> 15)


def test_ten_thousand_under_scan_with_two_executables_in_flight(mesh):
    """Random sizes, all mechanisms, values of every call checked on the device."""
    n = mesh.size
    rng = np.random.default_rng(0)
    sizes = [int(2 ** rng.uniform(2, 18)) for _ in range(20)]
    mechanisms = ("register", "tma", "register", "copy_engine")

    def program(size, mechanism, steps):
        size = (size + 3) // 4 * 4  # whole 16 bytes for tma

        def one(errors, step):
            rank = lax.axis_index("x")
            y = gather(mechanism=mechanism)(_hash(step, rank, size))
            want = jax.vmap(lambda r: _hash(step, r, size))(jnp.arange(n))
            return errors + (y != want).sum(), None

        def run(first):
            steps_ = first + jnp.arange(steps)
            start = lax.pcast(jnp.int32(0), "x", to="varying")
            return lax.scan(one, start, steps_)[0]

        return on(mesh, run)

    steps = 10_000 // len(sizes)
    programs = [program(size, mechanisms[i % 4], steps) for i, size in enumerate(sizes)]
    first = jax.device_put(jnp.zeros(n, jnp.int32), NamedSharding(mesh, P("x")))
    # Enqueued without waiting: one executable starts while another runs.
    results = [
        f(first + k)
        for pair in zip(programs[::2], programs[1::2], strict=True)
        for k in range(1)
        for f in pair
    ]
    errors = np.array([np.asarray(r) for r in results])
    np.testing.assert_array_equal(errors, np.zeros_like(errors))


def test_gradient_and_second_order(mesh):
    x = random(mesh, (8, 16))

    def loss(op, x):
        return (op(x) ** 3).sum()

    ours = lambda x: jax.grad(lambda x: loss(lambda x: pk.all_gather(x, "x"), x))(x)  # noqa: E731
    theirs = lambda x: jax.grad(lambda x: loss(lambda x: lax.all_gather(x, "x"), x))(x)  # noqa: E731
    equal(mesh, ours, theirs, x, rtol=1e-5)
    twice = lambda g: lambda x: jax.grad(lambda x: (g(x) ** 2).sum())(x)  # noqa: E731
    equal(mesh, twice(ours), twice(theirs), x, rtol=1e-5)


def test_vmap_scan_remat(mesh):
    x = random(mesh, (6, 8))

    def f(op, x):
        def body(c, row):
            return c + jax.checkpoint(lambda r: jnp.sin(op(r)).sum(0))(row), None

        start = lax.pcast(jnp.zeros(8), "x", to="varying")
        return lax.scan(body, start, x)[0] + jax.vmap(op)(x).sum((0, 1))

    for op_of in (lambda f: f, jax.grad):
        wrap = (
            (lambda g: g) if op_of is not jax.grad else (lambda g: jax.grad(lambda x: g(x).sum()))
        )
        ours = wrap(lambda x: f(lambda y: pk.all_gather(y, "x"), x))
        theirs = wrap(lambda x: f(lambda y: lax.all_gather(y, "x"), x))
        equal(mesh, ours, theirs, x, rtol=1e-5)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_donated_operand(mesh, mechanism):
    """The operand's buffer becomes the result's, while peers may still be reading or writing."""

    def step(op, x):
        for _ in range(3):
            x = op(x).sum(0) * 0.5
        return x

    ours = on(mesh, lambda x: step(gather(mechanism=mechanism), x), donate_argnums=0)
    theirs = on(mesh, lambda x: step(lambda x: lax.all_gather(x, "x"), x))
    for seed in range(4):
        want = np.asarray(theirs(random(mesh, (50_000,), seed=seed)))
        np.testing.assert_array_equal(np.asarray(ours(random(mesh, (50_000,), seed=seed))), want)


def test_landing_slots_go_round_under_scan(mesh):
    """Many chunks a call, many calls: the copy engine's ring wraps inside and between calls."""
    x = random(mesh, (3 << 20,))

    def loop(op, x):
        return lax.scan(lambda c, _: (op(c).sum(0) * 0.5, None), x, None, length=20)[0]

    ours = on(mesh, lambda x: loop(gather(mechanism="copy_engine"), x))
    theirs = on(mesh, lambda x: loop(lambda x: lax.all_gather(x, "x"), x))
    np.testing.assert_array_equal(np.asarray(ours(x)), np.asarray(theirs(x)))


def test_two_meshes_and_groups_side_by_side(mesh):
    """Communicators over either axis of a 2-D mesh, over both in each order, and over groups."""
    devices = np.array(jax.devices("cuda"))
    grid = jax.sharding.Mesh(devices.reshape(2, -1), ("a", "b"))
    x = random(grid, (32,))
    for names in ("a", "b", ("a", "b"), ("b", "a")):
        f = lambda x, names=names: pk.all_gather(x, names, implementation=None)  # noqa: E731
        equal(grid, f, lambda x, names=names: lax.all_gather(x, names), x)
    y = random(mesh, (32,))
    ranks = list(range(mesh.size))
    for groups in ([ranks[::-1]], [[i] for i in ranks]):
        f = functools.partial(pk.all_gather, axis_name="x", axis_index_groups=groups)
        g = functools.partial(lax.all_gather, axis_name="x", axis_index_groups=groups)
        equal(mesh, f, g, y)


def test_permuted_mesh(mesh):
    """Rank order follows the mesh, not the device numbers."""
    flipped = jax.sharding.Mesh(np.array(jax.devices("cuda")[::-1]), ("x",))
    x = random(flipped, (1000,))
    for mechanism in MECHANISMS:
        equal(
            flipped,
            gather(mechanism=mechanism),
            functools.partial(lax.all_gather, axis_name="x"),
            x,
        )


def test_beside_nccl(mesh):
    """Runs pk ops and XLA's own collectives in one program, with the latency hiding scheduler."""

    def step(op, x):
        for _ in range(4):
            total = lax.psum(x, "x")
            y = op(x)
            x = x * 0.5 + total * 0.25 + y.sum(0) * 0.125
        return x

    options = {"xla_gpu_enable_latency_hiding_scheduler": True}
    x = random(mesh, (1 << 18,))
    for mechanism in MECHANISMS:
        ours = on(
            mesh, lambda x, m=mechanism: step(gather(mechanism=m), x), compiler_options=options
        )
        theirs = on(
            mesh, lambda x: step(lambda x: lax.all_gather(x, "x"), x), compiler_options=options
        )
        for _ in range(3):
            np.testing.assert_array_equal(np.asarray(ours(x)), np.asarray(theirs(x)))


def test_reruns_are_bit_equal(mesh):
    x = random(mesh, (3, 1001))
    f = on(mesh, gather(1, True))
    first = np.asarray(f(x))
    for _ in range(5):
        np.testing.assert_array_equal(first, np.asarray(f(x)))

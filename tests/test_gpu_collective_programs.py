"""The CUDA collectives among each other and beside XLA's own, in one process.

As in test_gpu_collectives.py, every test also runs on CPU devices through the reference.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

sys.path.insert(0, str(Path(__file__).resolve().parent))

import op_chains
import rank_models as models
from op_chains import chain, count_errors
from rank_models import forced, on, put, same_bits

PLATFORMS = (pytest.param("cuda", marks=pytest.mark.needs_gpus(2)), "cpu")
WAYS = ({"ll"}, {"register", "simple"}, {"tma"}, {"two_shot"}, {"copy_engine"})


class Setting:
    """Where a test runs: a mesh, and the ops that are tested there."""

    def __init__(self, platform):
        devices = jax.devices(platform)
        self.gpus = platform == "cuda"
        self.mesh = jax.sharding.Mesh(np.array(devices if self.gpus else devices[:3]), ("x",))
        self.n = self.mesh.size
        self.ops = op_chains.ours("cuda" if self.gpus else None)

    def operand(self, seed=0, scale=1):
        """[4 n, 6 n] a rank, or larger."""
        rng = np.random.default_rng(seed)
        shape = (self.n, 4 * self.n, 6 * self.n * scale)
        return put(self.mesh, models.bits(rng, shape, "int32"))

    def options(self, **options):
        """Compiler options that only GPUs have."""
        return {"compiler_options": options} if self.gpus else {}


@pytest.fixture(scope="module", params=PLATFORMS)
def setting(request):
    return Setting(request.param)


@pytest.mark.parametrize("command_buffers", (True, False))
def test_command_buffers(setting, command_buffers):
    """Replays of a captured graph, and plain launches, give what lax gives; every time."""
    options = {} if command_buffers else {"xla_gpu_enable_command_buffer": ""}
    ours = on(
        setting.mesh,
        lambda small, large: (chain(setting.ops, small, 3), chain(setting.ops, large, 1)),
        **setting.options(**options),
    )
    theirs = on(
        setting.mesh,
        lambda small, large: (chain(op_chains.theirs, small, 3), chain(op_chains.theirs, large, 1)),
    )
    for seed in range(5):
        operands = setting.operand(seed), setting.operand(seed + 5, 4001)
        with forced(*WAYS):
            got = ours(*operands)
        for result, want in zip(got, theirs(*operands), strict=True):
            same_bits(result, np.asarray(want))


def test_ten_thousand_calls_under_scan_with_two_executables_in_flight(setting):
    """All ops in turn, random sizes, all ways; values of every call checked on the device."""
    rng = np.random.default_rng(0)
    sizes = [(int(2 ** rng.uniform(0, 8)), int(2 ** rng.uniform(0, 9))) for _ in range(8)]
    sizes = sizes if setting.gpus else sizes[:2]
    steps = 160 if setting.gpus else 3
    programs = [
        on(setting.mesh, lambda s, size=size: count_errors(setting.ops, s, *size)) for size in sizes
    ]
    each = np.broadcast_to(np.arange(steps, dtype=np.int32), (setting.n, steps))
    results = []
    for first in (0, 1000):
        operand = put(setting.mesh, each + np.int32(first))
        for i, f in enumerate(programs):
            with forced(*WAYS[i % 5 :], *WAYS[: i % 5]):
                results.append(f(operand))  # not waited for: the next starts beside it
    errors = np.array([np.asarray(result) for result in results])
    np.testing.assert_array_equal(errors, np.zeros_like(errors))


def test_donated_operand(setting):
    """The operand's buffer becomes a result's, while peers may still be reading or writing."""
    ours = on(setting.mesh, lambda x: chain(setting.ops, x, 2), donate_argnums=0)
    theirs = on(setting.mesh, lambda x: chain(op_chains.theirs, x, 2))
    for seed in range(4):
        want = np.asarray(theirs(setting.operand(seed, 1000)))
        with forced(*WAYS[seed:], *WAYS[:seed]):
            same_bits(ours(setting.operand(seed, 1000)), want)


@pytest.mark.parametrize("latency_hiding", (True, False))
@pytest.mark.parametrize("theirs_first", (True, False))
def test_beside_xla_s_collectives(setting, theirs_first, latency_hiding):
    """Kernels and NCCL in one program, in both orders, some independent of each other."""

    def mixed(op, x):
        for _ in range(2):
            gathered = lax.all_gather(x, "x") if theirs_first else None
            first = chain(op, x, 1)
            if gathered is None:
                gathered = lax.all_gather(x ^ 9, "x")
            independent = lax.psum(x * 7, "x")
            x = first ^ gathered.sum(0) ^ independent ^ lax.ppermute(first, "x", [(0, 0)])
        return x

    options = setting.options(xla_gpu_enable_latency_hiding_scheduler=latency_hiding)
    ours = on(setting.mesh, lambda x: mixed(setting.ops, x), **options)
    theirs = on(setting.mesh, lambda x: mixed(op_chains.theirs, x), **options)
    x = setting.operand(scale=2000)
    want = np.asarray(theirs(x))
    for _ in range(3):
        same_bits(ours(x), want)


def test_gradients(setting):
    """First and second order through all differentiable ops, the same as lax's."""
    n, rng = setting.n, np.random.default_rng(1)
    x = rng.integers(-2, 3, (n, 2 * n, 3 * n)).astype(np.float32)

    def loss(op, x):
        swapped = op("all_to_all")(x, "x", 0, 1, tiled=True)
        turned = op("all_to_all")(x.reshape(n, 2, -1), "x", 0, 0)
        moved = op("ppermute")(x, "x", [(i, i + 1) for i in range(n - 1)])
        total, share = op("psum")(x, "x"), op("psum_scatter")(x * x, "x", tiled=True)
        ragged = op("ragged_all_to_all")(x, 0 * x, *op_chains.even_slices(x), axis_name="x")
        results = (swapped, turned, moved, total, share, ragged, op("all_gather")(x, "x"))
        weights = lax.axis_index("x").astype(jnp.float32) + 1
        return sum(jnp.sum(y * y * y) * weights for y in results)

    def derivatives(op):
        first = jax.grad(lambda x: loss(op, x))
        second = jax.grad(lambda x: jnp.sum(first(x) ** 2))
        return lambda x: (first(x), second(x))

    got = on(setting.mesh, derivatives(setting.ops))(put(setting.mesh, x))
    want = on(setting.mesh, derivatives(op_chains.theirs))(put(setting.mesh, x))
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-3)


def test_vmap_and_remat(setting):
    """Batched calls, and calls made again in the backward pass."""
    n, rng = setting.n, np.random.default_rng(2)
    x = rng.integers(-2, 3, (n, 3, 2 * n, n)).astype(np.float32)

    def f(op, x):
        inner = jax.checkpoint(
            lambda x: op("psum_scatter")(op("psum")(x, "x") * x, "x", tiled=True)
        )
        batched = jax.vmap(lambda x: op("all_to_all")(x, "x", 0, 1, tiled=True), 1, 2)
        y = jax.vmap(inner)(x)
        return jnp.sum(y * y) + jnp.sum(batched(x.swapaxes(0, 1)) ** 3)

    got, want = (
        on(setting.mesh, jax.grad(lambda x, op=op: f(op, x)))(put(setting.mesh, x))
        for op in (setting.ops, op_chains.theirs)
    )
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-3)


def test_reruns_are_bit_equal(setting):
    """Sums of floats too, by whatever protocol and however the ranks are timed."""
    rng = np.random.default_rng(3)
    xs = [models.normal(rng, (setting.n, *shape), "float32") for shape in ((33,), (3, 50_001))]

    def f(*xs):
        results = [setting.ops("psum")(x, "x") for x in xs for _ in range(3)]
        gathered = [jnp.stack([x] * setting.n) for x in xs]
        return results + [setting.ops("psum_scatter")(x, "x") for x in gathered for _ in range(2)]

    operands = [put(setting.mesh, x) for x in xs]
    run = on(setting.mesh, f)
    with forced({"ll"}, {"one_shot", "simple"}, {"two_shot"}):
        first = [np.asarray(y) for y in run(*operands)]
    for _ in range(5):
        for y, want in zip(run(*operands), first, strict=True):
            same_bits(y, want)
    # And by each protocol the same.
    if setting.gpus:
        for y in first[1:3]:
            same_bits(y, first[0])

"""The CUDA paths of the collectives in one process, against NumPy, bit for bit.

all_gather has tests of its own. Every test here also runs on CPU devices, through the reference,
where what only kernels promise (the order of sums) is not asked for; so the tests themselves are
tested without GPUs. A program holds many calls, since compiling is what takes time.
"""

import functools
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh

import pk_jax as pk

sys.path.insert(0, str(Path(__file__).resolve().parent))

import rank_models as models
from rank_models import forced, on, put, same_bits, same_values

PLATFORMS = (pytest.param("cuda", marks=pytest.mark.needs_gpus(2)), "cpu")
FLOATS = ("float32", "bfloat16", "float16", "float64")
INTEGERS = ("int8", "uint16", "int32", "uint32", "int64")
REDUCTIONS = {"pmax": models.largest, "pmin": models.smallest, "psum": models.total}
PROTOCOLS = ({"ll"}, {"one_shot", "simple"}, {"two_shot"})
MOVERS = ({"ll"}, {"register", "simple"}, {"tma"})


class Setting:
    """Where a test runs: a mesh, and the ops with the implementation that is tested there."""

    def __init__(self, platform):
        devices = jax.devices(platform)
        self.gpus = platform == "cuda"
        self.devices = np.array(devices if self.gpus else devices[:4])
        self.mesh = Mesh(self.devices, ("x",))
        self.n = self.mesh.size
        self.implementation = "cuda" if self.gpus else None

    def op(self, name, implementation="tested", **kwargs):
        if implementation == "tested":
            implementation = self.implementation
        return functools.partial(getattr(pk, name), implementation=implementation, **kwargs)

    def poison(self):
        """Leaves NaNs in memory that is free: a result nobody wrote shows."""
        junk = [put(self.mesh, np.full((self.n, 1 << 18), np.nan, np.float32)) for _ in range(8)]
        jax.block_until_ready(junk)

    def same_moved(self, got, want, name=""):
        """All bits; on CPU XLA quiets the NaNs of narrow floats when it moves them."""
        (same_bits if self.gpus else same_values)(got, want, name)

    def same_sum(self, got, want, name=""):
        """A sum, in rank order where kernels made it."""
        if self.gpus or want.dtype.kind in "iub":
            same_bits(got, want, name)
        else:
            eps = float(jnp.finfo(want.dtype).eps)
            scale = float(np.abs(want.astype(np.complex128)).max(initial=1.0))
            error = np.abs(np.asarray(got).astype(np.complex128) - want.astype(np.complex128))
            assert np.all(error <= 2 * self.n * eps * scale), name


@pytest.fixture(scope="module", params=PLATFORMS)
def setting(request):
    return Setting(request.param)


def test_the_kernels_are_what_runs(setting):
    x = put(setting.mesh, np.zeros((setting.n, 4 * setting.n, 8), np.float32))

    def f(x):
        ring = [(i, (i + 1) % setting.n) for i in range(setting.n)]
        indices = [jnp.zeros(setting.n, jnp.int32)] * 4
        return (
            *(getattr(pk, name)(x, "x") for name in REDUCTIONS),
            pk.psum_scatter(x, "x", tiled=True),
            pk.all_to_all(x, "x", 0, 1, tiled=True),
            pk.ppermute(x, "x", ring),
            pk.ragged_all_to_all(x, x, *indices, axis_name="x"),
        )

    text = on(setting.mesh, f).lower(x).as_text()
    ours = ("psum", "psum_scatter", "all_to_all", "ppermute", "ragged_all_to_all")
    assert all((f"@pk_jax_{op}(" in text) == setting.gpus for op in ours)
    theirs = ("all_reduce", "reduce_scatter", "all_to_all", "collective_permute")
    assert any(f"stablehlo.{op}" in text for op in theirs) != setting.gpus


@pytest.mark.parametrize("dtype", (*FLOATS, *INTEGERS, "complex64", "complex128"))
def test_sums(setting, dtype):
    """Odd shapes by every protocol: floats in rank order and rounded once, integers wrap."""
    n, rng = setting.n, np.random.default_rng(0)
    shapes = ((), (1,), (7,), (n, 33), (3, 5 * n, 41), (2, 3, 4096 * n))
    xs = [models.normal(rng, (n, *shape), dtype) for shape in shapes]

    def f(*xs):
        reduced = [[setting.op("psum")(x, "x") for _ in PROTOCOLS] for x in xs]
        scatter = setting.op("psum_scatter")
        parts = []
        for _ in MOVERS[:2]:
            parts += [
                scatter(xs[3], "x"),
                scatter(xs[3], "x", tiled=True),
                scatter(xs[4], "x", scatter_dimension=1, tiled=True),
                scatter(xs[5], "x", scatter_dimension=-1, tiled=True),
            ]
        return reduced, parts

    with jax.enable_x64(True), forced(*PROTOCOLS):
        setting.poison()
        reduced, parts = on(setting.mesh, f)(*(put(setting.mesh, x) for x in xs))
    for x, results in zip(xs, reduced, strict=True):
        for way, got in zip(PROTOCOLS, results, strict=True):
            want = models.everywhere(models.total, x)
            setting.same_sum(got, want, f"psum {x.shape} {way}")
    layouts = ((3, 0, False), (3, 0, True), (4, 1, True), (5, 2, True)) * 2
    for got, (i, dimension, tiled) in zip(parts, layouts, strict=True):
        want = models.scattered(xs[i], dimension, tiled)
        setting.same_sum(got, want, f"psum_scatter {xs[i].shape} {dimension} {tiled}")


@pytest.mark.parametrize("dtype", (*FLOATS, *INTEGERS, "bool"))
def test_largest_and_smallest(setting, dtype):
    """By every protocol, with NaNs, infinities and zeros of both signs."""
    n, rng = setting.n, np.random.default_rng(1)
    xs = [models.normal(rng, (n, *shape), dtype) for shape in ((), (5,), (3, 77), (9000,))]
    if dtype in FLOATS:
        for special in (np.nan, np.inf, -np.inf, 0.0, -0.0):
            xs = [np.where(rng.random(x.shape) < 0.1, special, x).astype(x.dtype) for x in xs]

    def f(*xs):
        ops = ("pmax", "pmin")
        return {op: [[setting.op(op)(x, "x") for _ in PROTOCOLS] for x in xs] for op in ops}

    with jax.enable_x64(True), forced(*PROTOCOLS):
        results = on(setting.mesh, f)(*(put(setting.mesh, x) for x in xs))
    for op, by_operand in results.items():
        for x, by_protocol in zip(xs, by_operand, strict=True):
            want = models.everywhere(REDUCTIONS[op], x)
            for way, got in zip(PROTOCOLS, by_protocol, strict=True):
                if not setting.gpus:  # a NaN of one rank may get lost there
                    got = np.where(want != want, want, got)
                same_values(got, want, f"{op} {x.shape} {way}")


@pytest.mark.parametrize("inner", (8, 5))
def test_all_to_all_of_every_pair_of_dimensions(setting, inner):
    n, rng = setting.n, np.random.default_rng(2)
    tiled = models.bits(rng, (n, 2 * n, 3 * n, inner * n), "float32")
    stacked = models.bits(rng, (n, n, n, n, inner), "float32")
    pairs = [(split, concat) for split in range(3) for concat in range(3)]

    def f(tiled, stacked):
        op = setting.op("all_to_all")
        return [
            [op(x, "x", split, concat, tiled=x is tiled) for _ in MOVERS]
            for split, concat in pairs
            for x in (tiled, stacked)
        ]

    with forced(*MOVERS):
        setting.poison()
        results = on(setting.mesh, f)(put(setting.mesh, tiled), put(setting.mesh, stacked))
    calls = [(pair, x) for pair in pairs for x in (tiled, stacked)]
    for got, ((split, concat), x) in zip(results, calls, strict=True):
        want = models.exchanged(x, split, concat, x is tiled)
        for way, result in zip(MOVERS, got, strict=True):
            same_bits(result, want, f"{split} {concat} {'tiled' if x is tiled else ''} {way}")


def test_moves_of_all_dtypes(setting):
    """All bits of all dtypes: whole bytes are moved, whatever they mean."""
    n, rng = setting.n, np.random.default_rng(3)
    dtypes = (*FLOATS, *INTEGERS, "bool", "complex64", "float8_e4m3fn")
    perm = [(i, (i + 1) % n) for i in range(n)]
    xs = [models.bits(rng, (n, 3, 5 * n, 7), dtype) for dtype in dtypes]

    def f(*xs):
        exchange, permute = setting.op("all_to_all"), setting.op("ppermute")
        return [
            [(exchange(x, "x", 1, 0, tiled=True), permute(x, "x", perm)) for _ in MOVERS]
            for x in xs
        ]

    with jax.enable_x64(True), forced(*MOVERS):
        results = on(setting.mesh, f)(*(put(setting.mesh, x) for x in xs))
    for x, by_way in zip(xs, results, strict=True):
        for way, (exchanged, permuted) in zip(MOVERS, by_way, strict=True):
            setting.same_moved(
                exchanged, models.exchanged(x, 1, 0, True), f"all_to_all {x.dtype} {way}"
            )
            setting.same_moved(permuted, models.permuted(x, perm), f"ppermute {x.dtype} {way}")


def test_any_permutation(setting):
    """Ranks that nobody sends to get zeros, whatever was in their memory before."""
    n, rng = setting.n, np.random.default_rng(4)
    ranks = list(range(n))
    perms = [
        [],
        [(i, i) for i in ranks],
        [(i, n - 1 - i) for i in ranks],
        [(0, n - 1)],
        [(n - 1, 0)],
        [(0, 0)],
        [(i, i + 1) for i in ranks[:-1]],
        [(i + 1, i) for i in ranks[:-1]],
    ]
    xs = [models.bits(rng, (n, *shape), "int32") for shape in ((), (5,), (4, 1000), (300_000,))]

    def f(*xs):
        op = setting.op("ppermute")
        # The operand's last use: its memory is free for a result.
        return [
            [[op(x + i, "x", perm) for _ in MOVERS] for i, perm in enumerate(perms)] for x in xs
        ]

    with forced(*MOVERS):
        setting.poison()
        results = on(setting.mesh, f)(*(put(setting.mesh, x) for x in xs))
    for x, by_perm in zip(xs, results, strict=True):
        for i, (perm, by_way) in enumerate(zip(perms, by_perm, strict=True)):
            for way, got in zip(MOVERS, by_way, strict=True):
                same_bits(got, models.permuted(x + np.int32(i), perm), f"{x.shape} {perm} {way}")


@pytest.mark.parametrize("index", ("int32", "int64"))
def test_ragged_all_to_all(setting, index):
    """Slices of all sizes, several a rank; rows that nothing moves to keep what they had."""
    n, rng = setting.n, np.random.default_rng(5)
    operands = []
    for updates, rows, room, features, dtype in (
        (1, 16, 64, (), "float32"),
        (2, 100, 300, (7,), "bfloat16"),
        (5, 33, 1000, (2, 3), "int8"),
        (3, 2048, 4096, (64,), "float32"),
        (1, 1, 1, (5,), "uint16"),
    ):
        x = models.bits(rng, (n, rows, *features), dtype)
        output = models.bits(rng, (n, room, *features), dtype)
        operands.append([x, output, *models.slices(rng, n, updates, rows, room, index)])

    def f(*xs):
        op = setting.op("ragged_all_to_all", axis_name="x")
        return [op(*xs[i : i + 6]) for i in range(0, len(xs), 6)]

    with jax.enable_x64(index == "int64"):
        flat = [put(setting.mesh, x) for case in operands for x in case]
        results = on(setting.mesh, f)(*flat)
    for got, case in zip(results, operands, strict=True):
        setting.same_moved(got, models.moved(*case), f"{case[0].shape}")


def test_sizes_around_the_limits_of_the_protocols(setting):
    """What the cost model chooses, where its choice changes: around ll's limit, and far beyond."""
    n, rng = setting.n, np.random.default_rng(6)
    limit = max(128 << 10, (1 << 20) // n) if setting.gpus else 4 << 10
    words = [limit // 4 + extra for extra in (-1, 0, 1)] + [limit, 4 * limit]
    xs = [models.bits(rng, (n, count), "int32") for count in words]
    # A part for each peer of about the limit.
    wide = [models.bits(rng, (n, n, count), "int32") for count in words[:4]]

    def f(*xs):
        narrow, wide = xs[: len(words)], xs[len(words) :]
        psum, permute = setting.op("psum"), setting.op("ppermute")
        return (
            [(psum(x, "x"), permute(x, "x", [(0, n - 1)])) for x in narrow],
            [
                (
                    setting.op("psum_scatter")(x, "x"),
                    setting.op("all_to_all")(x, "x", 0, 0),
                    setting.op("all_to_all")(x, "x", 0, 1),
                )
                for x in wide
            ],
        )

    reduced, parts = on(setting.mesh, f)(*(put(setting.mesh, x) for x in (*xs, *wide)))
    for x, (summed, permuted) in zip(xs, reduced, strict=True):
        same_bits(summed, models.everywhere(models.total, x), f"psum {x.shape}")
        same_bits(permuted, models.permuted(x, [(0, n - 1)]), f"ppermute {x.shape}")
    for x, (scattered, swapped, turned) in zip(wide, parts, strict=True):
        same_bits(scattered, models.scattered(x, 0, False), f"psum_scatter {x.shape}")
        same_bits(swapped, models.exchanged(x, 0, 0, False), f"all_to_all {x.shape}")
        same_bits(turned, models.exchanged(x, 0, 1, False), f"all_to_all 0 1 {x.shape}")


def test_groups_and_axes(setting):
    """Communicators over either axis of a 2-D mesh, over both in each order, and over groups."""
    devices, n = setting.devices, setting.n
    grid = Mesh(devices.reshape(2, -1), ("a", "b"))
    flipped = Mesh(devices[::-1], ("x",))
    x = models.bits(np.random.default_rng(7), (n, 4 * n, 6), "int32")

    def ops(module, names, groups=None):
        if module is pk:
            module = functools.partial(setting.op, implementation=None)
        else:
            module = functools.partial(getattr, lax)
        kwargs = {"axis_index_groups": groups}

        def f(x):
            return (
                module("psum")(x, names, **kwargs),
                module("pmax")(x, names, **kwargs),
                module("psum_scatter")(x, names, tiled=True, **kwargs),
                module("all_to_all")(x, names, 0, 1, tiled=True, **kwargs),
            )

        return f

    calls = [(grid, names, None) for names in ("a", "b", ("a", "b"), ("b", "a"))]
    calls += [(flipped, "x", None)]
    ranks = list(range(n))
    calls += [(setting.mesh, "x", [ranks[::-1]]), (setting.mesh, "x", [[i] for i in ranks])]
    for mesh, names, groups in calls:
        got, want = (
            on(mesh, ops(module, names, groups), check_vma=False)(put(mesh, x))
            for module in (pk, lax)
        )
        for ours, theirs in zip(got, want, strict=True):
            same_bits(ours, np.asarray(theirs), f"{mesh.axis_names} {names} {groups}")


@pytest.mark.parametrize(("op", "best"), [("pmax", max), ("pmin", min)])
def test_extrema_of_complex_numbers(op, best, setting):
    """Through a gather: XLA's own reduction of them ends the process in its compiler for GPUs."""
    x = np.random.default_rng(5).integers(-2, 3, (setting.n, 50, 2)).astype(np.float32)
    x = x[..., 0] + 1j * x[..., 1]
    got = on(setting.mesh, lambda x: getattr(pk, op)(x, "x"))(put(setting.mesh, x))
    want = [best(column, key=lambda z: (z.real, z.imag)) for column in x.T]
    for row in np.asarray(got).reshape(setting.n, 50):
        np.testing.assert_array_equal(row, want)


@pytest.mark.parametrize("checks", ("1", "0"))
def test_slices_out_of_range(setting, checks):
    """An error that names rank and row with PK_JAX_CHECKS=1; else no memory but the result's."""
    program = """
        import jax, jax.numpy as jnp, numpy as np, sys
        sys.path.insert(0, sys.argv[1])
        import pk_jax as pk
        from rank_models import on, put
        devices = jax.devices(sys.argv[2])[:2]
        mesh = jax.sharding.Mesh(np.array(devices), ("x",))
        x = np.arange(16, dtype=np.int32).reshape(2, 8)
        indices = [
            np.array(rows, np.int32)
            for rows in ([[0, 0], [0, 6]], [[1, 1], [1, 5]], [[0, 0], [1, 1]], [[1, 1], [1, 5]])
        ]
        f = on(mesh, lambda *xs: pk.ragged_all_to_all(*xs, axis_name="x"))
        guards = [put(mesh, np.full((2, 8), 7, np.int32)) for _ in range(4)]
        try:
            out = f(*(put(mesh, a) for a in (x, -x, *indices)))
            print("first row:", np.asarray(out)[:, 0])
        except jax.errors.JaxRuntimeError as error:
            print("raised:", error, pk.last_error())
        else:
            assert all((np.asarray(guard) == 7).all() for guard in guards)
            print("guards: whole")
    """
    run = subprocess.run(
        [
            *(sys.executable, "-c", textwrap.dedent(program)),
            *(str(Path(__file__).parent), "cuda" if setting.gpus else "cpu"),
        ],
        env={
            **os.environ,
            "PK_JAX_CHECKS": checks,
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    if checks == "1":
        assert "raised:" in run.stdout, run.stdout + run.stderr
        message = run.stdout.partition("raised:")[2]
        assert "ragged_all_to_all" in message and "row" in message and "rank 1" in message, message
    else:
        assert "first row: [0 0]" in run.stdout and "guards: whole" in run.stdout, run.stdout

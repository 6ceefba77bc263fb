"""Programs with several products and collectives in them, for tests in one process and in several.

Each is written once, for the ops of pk or for what they are in jax.lax. Operands are -1, 0 and 1,
most of them 0, so that all sums that cross ranks are exact and results are equal bit by bit.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pk_jax as pk

STEPS = 40
OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


class Lax:
    """pk's ops, of jax.lax."""

    @staticmethod
    def all_gather_matmul(x, w, axis_name):
        rows = lax.all_gather(x, axis_name, tiled=True)
        return tuple(rows @ each for each in w) if isinstance(w, tuple) else rows @ w

    @staticmethod
    def matmul_reduce_scatter(x, w, axis_name):
        return lax.psum_scatter(x @ w, axis_name, tiled=True)

    @staticmethod
    def matmul_all_reduce(x, w, axis_name):
        return lax.psum(x @ w, axis_name)


class Program(NamedTuple):
    """What a program does, over the axes "a" and "b" of a mesh.

    Attributes:
        f: (ops, x, w, v) -> its results, of each rank's parts.
        calls: of fused kernels that it holds, where one of the axes has several ranks.
    """

    f: Callable[..., Any]
    calls: int


AXES = ("a", "b")
ROWS, COLUMNS = P(AXES), P(None, AXES)


def small(x):
    return jnp.clip(x, -4, 4)


def layer(ops, x, w, v):
    """The two ops of a layer, with two weights on the way in."""
    up, gate = ops.all_gather_matmul(x, (w, -w[::-1]), AXES)
    return ops.matmul_reduce_scatter(small(up + gate), v, AXES)


def gradients(ops, x, w, v):
    y, pull = jax.vjp(lambda *args: layer(ops, *args), x, w, v)
    return y, *pull(jnp.sign(y))


def gradients_of_a_whole_sum(ops, x, w, v):
    h = lax.all_gather(x, AXES, tiled=True) @ w
    y, pull = jax.vjp(lambda h, v: ops.matmul_all_reduce(small(h), v, AXES), h, v)
    return y, *pull(jnp.sign(y))


def scan(ops, x, w, v):
    """A layer in each step, whose results are the next one's operands."""

    def step(x, turn):
        rolled = jnp.roll(x, turn, axis=1)
        return jnp.sign(layer(ops, rolled, w, v) + x), None

    return lax.scan(step, x, jnp.arange(STEPS))[0]


def two_axes(ops, x, w, v):
    """Ops that need nothing of each other, over each axis and over both."""
    over_a = ops.all_gather_matmul(x, w, "a")
    over_both = ops.matmul_reduce_scatter(small(lax.all_gather(x, AXES, tiled=True) @ w), v, AXES)
    over_b = ops.all_gather_matmul(-x, w, "b")
    return over_a, over_b, over_both, ops.matmul_all_reduce(x, v[:, : x.shape[1]].T[:, :8], AXES)


def nccl_first(ops, x, w, v):
    """XLA's own collectives, one that the ops do not need and one that they do, before them."""
    other = lax.psum(w, AXES)
    turned = lax.ppermute(x, AXES, [(i, i ^ 1) for i in range(lax.axis_size(AXES))])
    return layer(ops, turned, w, v), other


def nccl_last(ops, x, w, v):
    """The same after the ops."""
    y = layer(ops, x, w, v)
    turned = lax.ppermute(y, AXES, [(i, i ^ 1) for i in range(lax.axis_size(AXES))])
    return turned, lax.psum(w, AXES), ops.all_gather_matmul(jnp.sign(turned), w, AXES)


# Without graphs calls are not replayed in one order, but launched one by one.
NO_GRAPH = {"xla_gpu_enable_command_buffer": ""}
WITHOUT_GRAPHS = ("gradients", "scan", "nccl_last")

PROGRAMS = {
    f.__name__: Program(f, calls)
    for f, calls in (
        (layer, 2),
        (gradients, 4),
        (gradients_of_a_whole_sum, 1),
        (scan, 2),
        (two_axes, 3),
        (nccl_first, 2),
        (nccl_last, 3),
    )
}


def operands(mesh: Mesh, rows: int, k: int, hidden: int) -> list[jax.Array]:
    """X by rows, w by columns and v by rows, each process with its own parts of the same arrays."""
    rng, n = np.random.default_rng(0), mesh.size
    found = []
    shapes = ((n * rows, k), (k, n * hidden), (n * hidden, k))
    for shape, spec in zip(shapes, (ROWS, COLUMNS, ROWS), strict=True):
        numbers = rng.integers(-1, 2, shape) * (rng.random(shape) < 0.375)
        whole = numbers.astype(jnp.bfloat16)
        found.append(
            jax.make_array_from_callback(
                shape, NamedSharding(mesh, spec), lambda index, whole=whole: whole[index]
            )
        )
    return found


def run(
    mesh: Mesh, program: Program, ops: Any, args: list[jax.Array], options: Any = None
) -> tuple[str, list[np.ndarray]]:
    """The lowered text, and this process's parts of all results, after three runs that agree."""

    def stacked(*parts: Any) -> Any:
        return jax.tree.map(lambda y: y[None], program.f(ops, *parts))

    f = jax.jit(
        jax.shard_map(
            stacked,
            mesh=mesh,
            in_specs=(ROWS, COLUMNS, ROWS),
            out_specs=P(AXES),
            check_vma=False,
        ),
        compiler_options=options,
    )
    text = f.lower(*args).as_text()
    runs = [
        [
            np.asarray(shard.data)
            for leaf in jax.tree.leaves(f(*args))
            for shard in sorted(leaf.addressable_shards, key=lambda shard: shard.device.id)
        ]
        for _ in range(3)  # on GPUs uncaptured, captured, replayed
    ]
    for again in runs[1:]:
        for one, other in zip(runs[0], again, strict=True):
            np.testing.assert_array_equal(one, other)
    return text, runs[0]


def check(mesh: Mesh, name: str, sizes: tuple[int, int, int], options: Any = None) -> None:
    """Compares a program of pk's ops, fused where they can be, with that of jax.lax."""
    on_gpus = mesh.devices.flat[0].platform == "gpu"
    if on_gpus:  # many programs of small products: the first algorithm will do
        options = {"xla_gpu_autotune_level": 0} | (options or {})
    program, args = PROGRAMS[name], operands(mesh, *sizes)
    with pk.use_config(schedule="intra_sm"):
        text, got = run(mesh, program, pk, args, options)
    _, expected = run(mesh, program, Lax, args, options)
    for i, (one, right) in enumerate(zip(got, expected, strict=True)):
        assert (one.shape, one.dtype) == (right.shape, right.dtype)
        np.testing.assert_array_equal(
            one.astype("f4"), right.astype("f4"), err_msg=f"{name}, result {i}"
        )
    if on_gpus:
        calls = sum(text.count(f"@pk_jax_{op}(") for op in OPS)
        more = name == "two_axes" and min(mesh.devices.shape) > 1
        assert calls == program.calls + more, f"{name}: {calls} fused calls in {text}"

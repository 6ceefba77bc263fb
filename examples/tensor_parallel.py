"""A tensor-parallel transformer, with pk_jax's products and with jax.lax's, compared and timed.

Between layers each device holds its rows of the activations, some positions of every sequence; in a
layer it holds its heads and its hidden units. So a layer gathers rows before its first products and
sums what comes out of its last one, twice:

    rows ── all_gather_matmul ──> q, k, v of own heads ── attention ─ matmul_reduce_scatter ──> rows
    rows ── all_gather_matmul ──> own hidden units ── silu, times ─── matmul_reduce_scatter ──> rows

The layers are written against a module of products, `ops`: pk_jax is one, and `InLax` below is what
one writes without it. Results and gradients have to agree. On GPUs both are timed then, in turn.

    python examples/tensor_parallel.py                  # all GPUs, or else 8 virtual CPU devices
    python examples/tensor_parallel.py --cpu --devices 4 --seq 64
"""

import argparse
import dataclasses
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pk_jax as pk
from pk_jax._bench import timing


@dataclasses.dataclass(frozen=True)
class Setup:
    layers: int
    batch: int
    seq: int
    heads: int
    width: int
    hidden: int
    dtype: str

    @property
    def flops(self):
        """Of a forward pass, on all devices."""
        tokens = self.batch * self.seq
        products = 2 * tokens * self.width * (4 * self.width + 3 * self.hidden)
        attention = 2 * tokens * self.seq * self.width  # two products, of which half is masked
        return self.layers * (products + attention)


ON_CPU = Setup(layers=2, batch=2, seq=64, heads=8, width=64, hidden=160, dtype="float32")
ON_GPU = Setup(layers=2, batch=4, seq=2048, heads=32, width=4096, hidden=14336, dtype="bfloat16")

ROWS = P(None, "tp")  # [batch, seq, width]
COLUMNS, DOWN = P(None, "tp"), P("tp", None)
SPECS = dict.fromkeys(("q", "k", "v", "gate", "up"), COLUMNS) | {"out": DOWN, "down": DOWN}


class InLax:
    """The two products of pk_jax that a layer takes, in jax.lax."""

    @staticmethod
    def all_gather_matmul(x, w, axis_name, *, axis):
        rows = lax.all_gather(x, axis_name, axis=axis, tiled=True)
        return tuple(rows @ each for each in w)

    @staticmethod
    def matmul_reduce_scatter(x, w, axis_name, *, scatter_dimension):
        return lax.psum_scatter(x @ w, axis_name, scatter_dimension=scatter_dimension, tiled=True)


def normalise(x):
    y = x.astype(jnp.float32)
    return (y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def layer(ops, head_width, x, w):
    """One layer. x [batch, seq / n, width] holds this device's rows."""

    def heads(y):
        return y.reshape(*y.shape[:2], -1, head_width)

    q, k, v = ops.all_gather_matmul(normalise(x), (w["q"], w["k"], w["v"]), "tp", axis=1)
    seen = jax.nn.dot_product_attention(heads(q), heads(k), heads(v), is_causal=True)
    x += ops.matmul_reduce_scatter(seen.reshape(q.shape), w["out"], "tp", scatter_dimension=1)

    gate, up = ops.all_gather_matmul(normalise(x), (w["gate"], w["up"]), "tp", axis=1)
    return x + ops.matmul_reduce_scatter(
        jax.nn.silu(gate) * up, w["down"], "tp", scatter_dimension=1
    )


def forward(ops, setup, x, weights):
    for w in weights:
        x = layer(ops, setup.width // setup.heads, x, w)
    return x


def backward(ops, setup, x, weights):
    """The gradients of the mean square of the result, of each device's rows and weights."""

    def loss(x, weights):
        y = forward(ops, setup, x, weights).astype(jnp.float32)
        return lax.pmean(jnp.mean(y * y), "tp")

    return jax.grad(loss, (0, 1))(x, weights)


def programs(ops, setup, mesh):
    """The forward and the backward pass, as jitted functions of x and the weights."""
    specs = (ROWS, [SPECS] * setup.layers)

    def on_mesh(fn, out_specs):
        mapped = jax.shard_map(
            partial(fn, ops, setup), mesh=mesh, in_specs=specs, out_specs=out_specs
        )
        return jax.jit(mapped)

    return {"forward": on_mesh(forward, ROWS), "backward": on_mesh(backward, specs)}


def make_operands(setup, mesh, seed=0):
    """The activations and the weights, made where they lie."""
    shapes = dict.fromkeys(("q", "k", "v", "out"), (setup.width, setup.width))
    shapes |= dict.fromkeys(("gate", "up"), (setup.width, setup.hidden))
    shapes["down"] = (setup.hidden, setup.width)

    def make(key):
        keys = iter(jax.random.split(key, 1 + setup.layers * len(shapes)))
        x = jax.random.normal(next(keys), (setup.batch, setup.seq, setup.width))
        weights = [
            {n: jax.random.normal(next(keys), s) / np.sqrt(s[0]) for n, s in shapes.items()}
            for _ in range(setup.layers)
        ]
        return jax.tree.map(lambda y: y.astype(setup.dtype), (x, weights))

    shardings = jax.tree.map(partial(NamedSharding, mesh), (ROWS, [SPECS] * setup.layers))
    return jax.jit(make, out_shardings=shardings)(jax.random.key(seed))


def largest_difference(got, want):
    """Of any array, as the norm of what two differ by over the norm of the second."""

    def difference(a, b):
        a, b = (np.asarray(y).astype(np.float32) for y in (a, b))
        return float(np.linalg.norm(a - b) / np.linalg.norm(b))

    return max(jax.tree.leaves(jax.tree.map(difference, got, want)))


# About ten times what another order of the same sums was seen to change.
ROUNDING = {"float32": 1e-5, "bfloat16": 5e-2}


def compare(ours, theirs, operands, dtype):
    """Whether the passes agree, with a sentence for each."""
    same, sentences = True, []
    for name in ours:
        found = largest_difference(ours[name](*operands), theirs[name](*operands))
        within = found <= ROUNDING[dtype]  # a NaN is not
        same &= within
        sentences.append(f"{name} {found:.1e} ({'within' if within else 'BEYOND'} rounding)")
    return same, "; ".join(sentences)


def speed(ours, theirs, operands, setup, num_devices):
    """Milliseconds of both, and the rate of ours: a sentence for each pass."""
    for name, factor in (("forward", 1), ("backward", 3)):  # gradients of both factors
        flops = factor * setup.flops / num_devices
        expected_us = flops / 500e6
        runs = {
            which: timing.Program(fns[name], operands, 1, expected_us)
            for which, fns in (("pk_jax", ours), ("jax.lax", theirs))
        }
        found = timing.time_programs(runs, sample_ms=100)
        pk_us, lax_us = found["pk_jax"].median, found["jax.lax"].median
        yield (
            f"{name}: pk_jax {pk_us / 1e3:.2f} ms ({flops / pk_us / 1e6:.0f} TFLOP/s a device), "
            f"jax.lax {lax_us / 1e3:.2f} ms: {lax_us / pk_us:.3f}x"
        )


def parse_arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, help="default: all, or 8 virtual CPU devices")
    parser.add_argument("--cpu", action="store_true", help="virtual CPU devices even if GPUs exist")
    for field in dataclasses.fields(Setup):
        parser.add_argument(f"--{field.name}", type=str if field.name == "dtype" else int)
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_arguments(argv)
    jax.config.update("jax_num_cpu_devices", args.devices or 8)
    if args.cpu:
        jax.config.update("jax_platforms", "cpu")
    devices = jax.devices()[: args.devices]
    on_cpu = devices[0].platform == "cpu"
    given = {k: v for k, v in vars(args).items() if k not in ("devices", "cpu") and v is not None}
    setup = dataclasses.replace(ON_CPU if on_cpu else ON_GPU, **given)
    count = len(devices)
    for name in ("seq", "heads", "hidden"):
        if getattr(setup, name) % count:
            sys.exit(f"--{name} {getattr(setup, name)} is not divisible by {count} devices")
    mesh = jax.make_mesh((count,), ("tp",), axis_types=(AxisType.Auto,), devices=devices)
    print(f"mesh       {count} x {devices[0].device_kind}")
    print(f"setup      {', '.join(f'{k} {v}' for k, v in vars(setup).items())}")
    operands = make_operands(setup, mesh)
    ours, theirs = (programs(ops, setup, mesh) for ops in (pk, InLax))
    same, sentence = compare(ours, theirs, operands, setup.dtype)
    print(f"agreement  {sentence}")
    if same and not on_cpu:
        for sentence in speed(ours, theirs, operands, setup, count):
            print(f"speed      {sentence}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())

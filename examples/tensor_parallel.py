"""Transformer blocks under tensor parallelism, with pk_jax and with jax.lax, compared and timed.

Between the halves of a block each device holds its rows of the activations, some positions of every
sequence; inside them it holds its heads, or its hidden units. So each half gathers rows before its
first product and sums over devices what comes out of its last one:

    rows ─ RMS norm ─ column_parallel_dense ─ attention of own heads ─ row_parallel_dense ─ +
    rows ─ RMS norm ─ column_parallel_dense ─── silu(gate) * up ────── row_parallel_dense ─ +

The blocks are written against those two layers: `InPk` has pk_jax's, `InLax` what one writes
without it. Losses and gradients have to agree; on GPUs both are timed then, in turn.

    python examples/tensor_parallel.py                   # all GPUs, or else 8 virtual CPU devices
    python examples/tensor_parallel.py --model 8b-slice --devices 2
    python examples/tensor_parallel.py --cpu --devices 4 --seq 128
"""

import argparse
import dataclasses
import math
import statistics
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pk_jax as pk


@dataclasses.dataclass(frozen=True)
class Setup:
    """Heads and hidden units are those of one device, so that more devices make a larger model."""

    batch: int
    seq: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    dtype: str
    layers: int = 2
    attention: str | None = None  # of jax.nn.dot_product_attention: "cudnn" or "xla"

    @property
    def flops(self):
        """Of a forward pass, a device."""
        columns = (2 * self.heads + 2 * self.kv_heads) * self.head_width + 3 * self.hidden
        products = 2 * self.batch * self.seq * self.width * columns
        # Two products, of which half is masked.
        attention = 2 * self.batch * self.seq**2 * self.heads * self.head_width
        return self.layers * (products + attention)


LLAMA = {"batch": 4, "seq": 2048, "kv_heads": 1, "head_width": 128, "dtype": "bfloat16"}
MODELS = {
    "small": Setup(
        batch=2, seq=64, width=64, heads=2, kv_heads=1, head_width=16, hidden=24, dtype="float32"
    ),
    # What each of eight GPUs has of a model.
    "8b-slice": Setup(width=4096, heads=4, hidden=14336 // 8, **LLAMA),
    "70b-slice": Setup(width=8192, heads=8, hidden=28672 // 8, **LLAMA),
}

ROWS = P(None, "tp")  # [batch, seq, width]
# Side by side in "qkv" lie the columns of a device's queries, keys and values, then the next one's;
# "gate_up" likewise, so that one product takes all of them.
LAYER = {"qkv": P(None, "tp"), "out": P("tp"), "gate_up": P(None, "tp"), "down": P("tp")}


class InPk:
    """What the blocks need of a library."""

    column_parallel_dense = staticmethod(pk.tp.column_parallel_dense)
    row_parallel_dense = staticmethod(pk.tp.row_parallel_dense)
    psum = staticmethod(pk.psum)


class InLax:
    """The same in jax.lax."""

    @staticmethod
    def column_parallel_dense(x, w, axis_name, *, bias=None, sequence_dimension):
        y = lax.all_gather(x, axis_name, axis=sequence_dimension, tiled=True) @ w
        return y if bias is None else y + bias

    @staticmethod
    def row_parallel_dense(x, w, axis_name, *, bias=None, sequence_dimension):
        dimension = {"scatter_dimension": sequence_dimension}
        y = lax.psum_scatter(x @ w, axis_name, **dimension, tiled=True)
        return y if bias is None else y + bias

    psum = staticmethod(lax.psum)


def rms_norm(x, scale):
    y = x.astype(jnp.float32)
    y *= lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)
    return y.astype(x.dtype) * scale


def attention(ops, setup, x, w):
    qkv = ops.column_parallel_dense(x, w["qkv"], "tp", sequence_dimension=1)
    heads = qkv.reshape(*qkv.shape[:2], -1, setup.head_width)
    q, k, v = jnp.split(heads, (setup.heads, setup.heads + setup.kv_heads), axis=2)
    seen = jax.nn.dot_product_attention(
        q, k, v, is_causal=True, implementation=setup.attention
    ).reshape(*qkv.shape[:2], -1)
    return ops.row_parallel_dense(seen, w["out"], "tp", sequence_dimension=1)


def swiglu(ops, x, w):
    both = ops.column_parallel_dense(x, w["gate_up"], "tp", sequence_dimension=1)
    gate, up = jnp.split(both, 2, axis=-1)
    return ops.row_parallel_dense(jax.nn.silu(gate) * up, w["down"], "tp", sequence_dimension=1)


def forward(ops, setup, x, params):
    """The blocks, on each device's rows: x [batch, seq / n, width]."""
    for scales, w in zip(params["norms"], params["layers"], strict=True):
        x += attention(ops, setup, rms_norm(x, scales[0]), w)
        x += swiglu(ops, rms_norm(x, scales[1]), w)
    return x


def forward_backward(ops, setup, x, params):
    """The mean square of the result, and its gradients of each device's rows and weights."""

    def own_part(x, params):
        y = forward(ops, setup, x, params).astype(jnp.float32)
        return jnp.sum(y * y) / (setup.batch * setup.seq * setup.width)

    # All devices have the same scales and use them on their rows. As such they would be typed, and
    # JAX would sum each one's gradient where it arises; like this all are summed at once.
    own = params | {"norms": lax.pcast(params["norms"], "tp", to="varying")}
    loss, (dx, gradients) = jax.value_and_grad(own_part, (0, 1))(x, own)
    loss, gradients["norms"] = ops.psum((loss, gradients["norms"]), "tp")
    return loss, (dx, gradients)


def programs(ops, setup, mesh):
    """Both passes, as jitted functions of x and the parameters."""
    specs = (ROWS, {"norms": P(), "layers": [LAYER] * setup.layers})

    def on_mesh(fn, out_specs):
        fn = partial(fn, ops, setup)
        return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=out_specs))

    return {
        "forward": on_mesh(forward, ROWS),
        "forward + backward": on_mesh(forward_backward, (P(), specs)),
    }


def make_operands(setup, mesh, seed=0):
    """The activations and the parameters, made where they lie."""
    n, head = mesh.size, setup.head_width
    shapes = {
        "qkv": (setup.width, n * (setup.heads + 2 * setup.kv_heads) * head),
        "out": (n * setup.heads * head, setup.width),
        "gate_up": (setup.width, n * 2 * setup.hidden),
        "down": (n * setup.hidden, setup.width),
    }

    def make(key):
        keys = iter(jax.random.split(key, 2 + setup.layers * len(shapes)))
        layers = [
            {k: jax.random.normal(next(keys), s) / np.sqrt(s[0]) for k, s in shapes.items()}
            for _ in range(setup.layers)
        ]
        norms = 1 + 0.1 * jax.random.normal(next(keys), (setup.layers, 2, setup.width))
        x = jax.random.normal(next(keys), (setup.batch, setup.seq, setup.width))
        operands = x, {"norms": norms, "layers": layers}
        return jax.tree.map(lambda y: y.astype(setup.dtype), operands)

    specs = (ROWS, {"norms": P(), "layers": [LAYER] * setup.layers})
    shardings = jax.tree.map(partial(NamedSharding, mesh), specs)
    return jax.jit(make, out_shardings=shardings)(jax.random.key(seed))


@jax.jit
def largest_difference(got, want):
    """Of any array, the norm of the difference over that of the second; NaN if any has one."""

    def difference(a, b):
        a, b = (y.astype(jnp.float32) for y in (a, b))
        return jnp.sqrt(jnp.sum((a - b) ** 2) / jnp.sum(b**2))

    return jnp.max(jnp.stack(jax.tree.leaves(jax.tree.map(difference, got, want))))


# About ten times what another order of the same sums was seen to change.
ROUNDING = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}


def compare(ours, theirs, operands, dtype):
    """Whether the passes agree, with a sentence for each."""
    same, sentences = True, []
    for name in ours:
        got, want = (fns[name](*operands) for fns in (ours, theirs))
        found = float(largest_difference(got, want))
        within = found <= ROUNDING[dtype]  # a NaN is not
        same &= within
        text = f"{name} {found:.1e} ({'within' if within else 'BEYOND'} rounding)"
        if isinstance(got, tuple):
            text += f", losses {float(got[0]):.6f} and {float(want[0]):.6f}"
        sentences.append(text)
    return same, "; ".join(sentences)


def seconds_of(call, runs):
    """Of each of several runs, queued one behind the other as steps of training are."""
    start = time.perf_counter()
    for _ in range(runs):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / runs


def time_in_turn(calls, samples=50):
    """Median seconds of a call, by name; samples in turn, so that drifting clocks meet all."""
    for _ in range(3):  # XLA records a CUDA graph at first, and replays it in the third run
        longest = max(seconds_of(call, 1) for call in calls.values())
    found = {name: [] for name in calls}
    for _ in range(samples):
        for name, call in calls.items():
            found[name].append(seconds_of(call, runs=math.ceil(0.1 / longest)))
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def speed(ours, theirs, operands, setup):
    """A table of milliseconds, medians of both in turn: its lines."""
    yield f"{'':<20}{'jax.lax':>10}{'pk_jax':>10}{'speed-up':>10}{'TFLOP/s a device':>18}"
    for name, factor in (("forward", 1), ("forward + backward", 3)):  # gradients of both factors
        flops = factor * setup.flops
        calls = {
            "pk_jax": partial(ours[name], *operands),
            "jax.lax": partial(theirs[name], *operands),
        }
        seconds = time_in_turn(calls)
        pk_s, lax_s = seconds["pk_jax"], seconds["jax.lax"]
        yield (
            f"{name:<20}{lax_s * 1e3:>7.2f} ms{pk_s * 1e3:>7.2f} ms{lax_s / pk_s:>9.3f}x"
            f"{flops / pk_s / 1e12:>18.0f}"
        )


def parse_arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, help="default: all, or 8 virtual CPU devices")
    parser.add_argument("--cpu", action="store_true", help="virtual CPU devices even if GPUs exist")
    parser.add_argument("--model", choices=MODELS, help="default: 70b-slice on GPUs, else small")
    for field in dataclasses.fields(Setup):
        numeric = field.type is int
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int if numeric else str)
    return parser.parse_args(argv)


def make_setup(args, on_cpu, num_devices):
    """The model asked for, with what else is."""
    setup = MODELS[args.model or ("small" if on_cpu else "70b-slice")]
    names = [field.name for field in dataclasses.fields(Setup)]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    setup = dataclasses.replace(setup, **given)
    if setup.seq % num_devices:
        sys.exit(f"--seq {setup.seq} is not divisible by {num_devices} devices")
    if setup.dtype not in ROUNDING:
        sys.exit(f"--dtype {setup.dtype} is none of {', '.join(ROUNDING)}")
    if setup.attention is None and not on_cpu and setup.dtype != "float32":
        setup = dataclasses.replace(setup, attention="cudnn")
    return setup


def main(argv=None):
    args = parse_arguments(argv)
    jax.config.update("jax_num_cpu_devices", args.devices or 8)
    if args.cpu:
        jax.config.update("jax_platforms", "cpu")
    devices = jax.devices()[: args.devices]
    on_cpu = devices[0].platform == "cpu"
    setup = make_setup(args, on_cpu, len(devices))
    mesh = jax.make_mesh((len(devices),), ("tp",), axis_types=(AxisType.Auto,), devices=devices)
    print(f"mesh       {mesh.size} x {devices[0].device_kind}")
    print(f"setup      {', '.join(f'{k} {v}' for k, v in vars(setup).items())}")
    operands = make_operands(setup, mesh)
    ours, theirs = (programs(ops, setup, mesh) for ops in (InPk, InLax))
    same, sentence = compare(ours, theirs, operands, setup.dtype)
    print(f"agreement  {sentence}")
    if same and not on_cpu:
        for line in speed(ours, theirs, operands, setup):
            print(f"speed      {line}", flush=True)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())

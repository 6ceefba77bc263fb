"""Trains a byte-level language model on long sequences, cut over the devices, by ring attention.

Each device has some rows of every sequence and all weights. Nothing but attention looks at another
row, and that is one call, `pk.ring_attention`, in which keys and values go round the devices. The
layout is "zigzag": sequences are reordered once, where data are loaded, targets and positions with
them, so that under the causal mask all devices have the same work.

The same steps run with the whole sequence on one device and `pk.attention`. The losses must agree.

    python examples/long_context.py                # all GPUs, or else 8 virtual CPU devices
    python examples/long_context.py --cpu --devices 4 --seq 1024 --steps 20
"""

import argparse
import math
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from _arguments import positive
from _text import load_text
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from train_lm import VOCABULARY, adamw, compare, normalise

import pk_jax as pk

ROWS = P(None, "sp")  # [batch, sequence]
LAYERS, KV_SHARE = 2, 2  # so many heads of the query share one of the keys


def init(rng, width):
    """Weights by layer. Heads of the keys are fewer than those of the query, as in Llama."""
    heads, narrow = width, width // KV_SHARE
    shapes = {
        "q": (width, heads),
        "k": (width, narrow),
        "v": (width, narrow),
        "out": (heads, width),
    }
    shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}
    layers = {
        name: rng.standard_normal((LAYERS, *shape), np.float32) / math.sqrt(shape[0])
        for name, shape in shapes.items()
    }
    embedding = 0.02 * rng.standard_normal((VOCABULARY, width), np.float32)
    return {"embedding": embedding, "layers": layers}


def rotate(x, positions):
    """Rotary embedding of x [batch, rows, heads, head width] at the rows' own positions."""
    half = x.shape[-1] // 2
    angle = positions[:, :, None, None] * 10_000.0 ** -(jnp.arange(half) / half)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)]
    return jnp.concatenate(turned, -1).astype(x.dtype)


def losses(attend, dtype, head, params, tokens, targets, positions):
    """Bits of each byte, [batch, rows], for whatever rows `attend` has."""
    params = jax.tree.map(lambda p: p.astype(dtype), params)
    x = jax.nn.one_hot(tokens, VOCABULARY, dtype=dtype) @ params["embedding"]

    def layer(x, w):
        y = normalise(x)
        q, k, v = ((y @ w[name]).reshape(*y.shape[:2], -1, head) for name in "qkv")
        seen = attend(rotate(q, positions), rotate(k, positions), v, is_causal=True)
        x += seen.reshape(x.shape) @ w["out"]
        return x + jnp.square(jax.nn.relu(normalise(x) @ w["up"])) @ w["down"], None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    logits = jnp.matmul(normalise(x), params["embedding"].T, preferred_element_type=jnp.float32)
    chosen = jnp.sum(logits * jax.nn.one_hot(targets, VOCABULARY), -1)
    return (jax.nn.logsumexp(logits, -1) - chosen) / math.log(2)


def make_step(losses):
    def step(state, *batch):
        params, mean, square, count = state
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(losses(p, *batch)))(params)
        count += 1
        return (*adamw(params, grads, mean, square, count, 2e-3), count), loss

    return jax.jit(step, donate_argnums=0)


def train(step, params, batches):
    """Losses of all steps, and the seconds of the median step."""
    zeros = partial(jax.tree.map, jnp.zeros_like)
    state, found, seconds = (params, zeros(params), zeros(params), jnp.zeros(())), [], []
    for batch in batches:
        start = time.perf_counter()
        state, loss = step(state, *batch)
        found.append(float(loss))
        seconds.append(time.perf_counter() - start)
    return found, float(np.median(seconds))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("--devices", None), ("--seq", None), ("--batch", 2), ("--steps", 30)):
        parser.add_argument(name, type=positive, default=default)
    parser.add_argument("--layout", choices=("zigzag", "contiguous"), default="zigzag")
    parser.add_argument("--cpu", action="store_true", help="virtual CPU devices even if GPUs exist")
    args = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", args.devices or 8)
    if args.cpu:
        jax.config.update("jax_platforms", "cpu")
    devices = jax.devices()[: args.devices]
    on_cpu, ranks = devices[0].platform == "cpu", len(devices)
    width, head, dtype = (64, 16, "float32") if on_cpu else (1024, 128, "bfloat16")
    length = args.seq or (1024 if on_cpu else 16384)
    if length % (2 * ranks):
        sys.exit(f"--seq {length} is not divisible by {2 * ranks}, two pieces for each device")
    mesh = jax.make_mesh((ranks,), ("sp",), axis_types=(AxisType.Auto,), devices=devices)

    ring = partial(pk.ring_attention, axis_name="sp", layout=args.layout)
    in_parts = jax.shard_map(
        partial(losses, ring, dtype, head), mesh=mesh, in_specs=(P(), ROWS, ROWS, ROWS),
        out_specs=ROWS,
    )  # fmt: skip
    whole = partial(losses, pk.attention, dtype, head)

    text, _ = load_text()
    rng = np.random.default_rng(0)
    params = init(rng, width)
    starts = rng.integers(0, len(text) - length, (args.steps, args.batch))
    rows = [text[each[:, None] + np.arange(length + 1)].astype(np.int32) for each in starts]
    positions = np.broadcast_to(np.arange(length, dtype=np.float32), (args.batch, length))
    batches = [(each[:, :-1], each[:, 1:], positions) for each in rows]

    def cut(x):
        x = pk.zigzag(x, ranks) if args.layout == "zigzag" else x
        return jax.device_put(x, NamedSharding(mesh, ROWS))

    print(
        f"mesh       {ranks} {devices[0].device_kind}, {length // ranks} of {length} rows on each"
    )
    results = {}
    for name, fn, place, at in (
        (f"ring, {args.layout}", in_parts, cut, NamedSharding(mesh, P())),
        ("whole", whole, partial(jax.device_put, device=devices[0]), devices[0]),
    ):
        placed = [tuple(map(place, batch)) for batch in batches]
        results[name] = train(make_step(fn), jax.device_put(params, at), placed)
        print(f"{name:17} {results[name][0][-1]:.3f} bits, {results[name][1]:.3f} s a step")
    same, sentence = compare(*(found for found, _ in results.values()), dtype)
    print(f"agreement  {sentence}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())

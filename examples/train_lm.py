"""Trains a small language model on Python's own source files, with pk_jax and again with jax.lax.

It shows how pk_jax goes into a training step: the model is written against a module of collectives,
`comm`, and calls `comm.all_gather`, `comm.psum_scatter`, `comm.psum` and `comm.pmean` inside
`jax.shard_map`. `pk_jax` is such a module and `jax.lax` is another, so the same steps run twice,
ten by ten in turn, and the losses have to agree. Every device holds a part of everything:

* axis "data" of the mesh splits the batch. Weights are split over it too: a layer gathers its own
  just before use, and the gradient of that gather leaves each device the sum for its part.
* axis "model" splits heads and hidden units inside a layer, and the sequence between layers: rows
  are gathered before the first matmul, and the products of the second are summed and scattered.

The model predicts the next byte. Bits per byte on files it has not seen are printed beside those of
a model that only knows how frequent each byte is.

    python examples/train_lm.py                 # all GPUs, or else 8 virtual CPU devices
    python examples/train_lm.py --cpu --mesh 2x2 --steps 100
"""

import dataclasses
import math
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from _arguments import parse_arguments
from _report import Progress, save_chart
from _text import byte_frequency_bits, load_text
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pk_jax as pk

VOCABULARY = 256
BLOCK = 10  # steps that a run takes before it is the other's turn
BOTH = ("data", "model")
ROWS = P("data", "model")  # the batch over "data", positions over "model"


@dataclasses.dataclass(frozen=True)
class Setup:
    layers: int
    width: int
    heads: int
    batch: int
    seq: int
    steps: int
    dtype: str  # of activations, and of weights on the wire; the weights themselves are float32

    @property
    def learning_rate(self):
        return 0.64 / self.width


ON_CPU = Setup(layers=2, width=64, heads=2, batch=16, seq=128, steps=250, dtype="float32")
ON_GPU = Setup(layers=8, width=512, heads=8, batch=64, seq=512, steps=600, dtype="bfloat16")


# ---- The model, as one device sees it -------------------------------------------------------

SPECS = {
    "embedding": P(BOTH),
    "blocks": {  # the leading dimension is the layer
        "qkv": P(None, "data", None, "model"),  # [width, 3, heads, head width]
        "out": P(None, "data", "model"),  # [width, heads, head width]
        "up": P(None, "data", "model"),  # [width, hidden]
        "down": P(None, "data", "model"),  # [width, hidden]
    },
}


def init(rng, setup):
    n, width, heads = setup.layers, setup.width, setup.heads

    def normal(*shape, fan_in):
        return rng.standard_normal(shape, np.float32) / math.sqrt(fan_in)

    # What blocks add to the residual stream starts small, because all of them add to it.
    return {
        "embedding": 0.02 * normal(VOCABULARY, width, fan_in=1),
        "blocks": {
            "qkv": normal(n, width, 3, heads, width // heads, fan_in=width),
            "out": normal(n, width, heads, width // heads, fan_in=2 * n * width),
            "up": normal(n, width, 4 * width, fan_in=width),
            "down": normal(n, width, 4 * width, fan_in=2 * n * 4 * width),
        },
    }


def normalise(x):
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def look_back(x):
    """Takes half the channels from the byte before: a cheap way to see pairs of bytes early."""
    half = x.shape[-1] // 2
    before = jnp.pad(x[:, :-1, :half], ((0, 0), (1, 0), (0, 0)))
    return jnp.concatenate([before, x[..., half:]], -1)


def rotate(x):
    """Rotary position embedding of x [batch, seq, heads, head width]."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * 10_000.0 ** -(jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(x.dtype)


def block(comm, x, weights):
    """One layer. x [batch / data, seq / model, width] holds this device's rows."""
    gather_rows = partial(comm.all_gather, axis_name="model", axis=1, tiled=True)
    scatter_rows = partial(comm.psum_scatter, axis_name="model", scatter_dimension=1, tiled=True)
    w = comm.all_gather(weights, "data", tiled=True)

    rows = look_back(gather_rows(normalise(x)))  # every position
    q, k, v = jnp.moveaxis(jnp.einsum("btd,dchk->btchk", rows, w["qkv"]), 2, 0)  # our heads
    seen = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
    x += scatter_rows(jnp.einsum("bthk,dhk->btd", seen, w["out"]))

    rows = look_back(gather_rows(normalise(x)))
    hidden = jnp.square(jax.nn.relu(rows @ w["up"]))  # our hidden units
    x += scatter_rows(jnp.einsum("btf,df->btd", hidden, w["down"]))
    return x, None


def predict(comm, dtype, params, tokens):
    """Logits of the next byte at this device's positions, [batch / data, seq / model, 256]."""
    params = jax.tree.map(lambda p: p.astype(dtype), params)
    embedding = comm.all_gather(params["embedding"], BOTH, tiled=True)
    # A lookup as a matmul: its gradient adds in the same order on every run, a scatter's does not.
    x = normalise(jax.nn.one_hot(tokens, VOCABULARY, dtype=dtype) @ embedding)
    x, _ = jax.lax.scan(partial(block, comm), x, params["blocks"])
    return jnp.matmul(normalise(x), embedding.T, preferred_element_type=jnp.float32)


def bits_per_byte(comm, dtype, params, tokens, targets):
    logits = predict(comm, dtype, params, tokens)
    chosen = jnp.sum(logits * jax.nn.one_hot(targets, VOCABULARY), -1)
    loss = jnp.mean(jax.nn.logsumexp(logits, -1) - chosen) / math.log(2)
    return comm.pmean(loss, BOTH)


# ---- Training ---------------------------------------------------------------------------------


def adamw(params, grads, mean, square, step, learning_rate):
    """One step of AdamW. All of it is elementwise: each device updates the part it holds."""
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, grads)
    square = jax.tree.map(lambda s, g: 0.95 * s + 0.05 * g * g, square, grads)

    def update(p, m, s):
        direction = m / (1 - 0.9**step) / (jnp.sqrt(s / (1 - 0.95**step)) + 1e-8)
        return p - learning_rate * (direction + 0.1 * p)

    return jax.tree.map(update, params, mean, square), mean, square


def train_step(comm, setup, state, tokens, targets):
    params, mean, square, step = state
    loss, grads = jax.value_and_grad(partial(bits_per_byte, comm, setup.dtype))(
        params, tokens, targets
    )
    # Each device has the gradient of its part of the weights; only the norm needs all of them.
    norm = jnp.sqrt(comm.psum(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)), BOTH))
    grads = jax.tree.map(lambda g: g / jnp.maximum(norm, 1), grads)
    step = step + 1
    warmup = step / (1 + setup.steps / 15)
    cooldown = 1.5 * (1 - step / (1 + setup.steps))
    learning_rate = setup.learning_rate * jnp.clip(jnp.minimum(warmup, cooldown), 0, 1)
    params, mean, square = adamw(params, grads, mean, square, step, learning_rate)
    return (params, mean, square, step), loss


def on_mesh(mesh, fn, in_specs, out_specs, **options):
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    return jax.jit(mapped, **options)


class Run:
    """Training from scratch. Nothing but `comm` differs between two runs of one seed."""

    def __init__(self, comm, mesh, setup, seed, text, held_out_batches):
        state_specs = (SPECS, SPECS, SPECS, P())
        self.step_fn = on_mesh(
            mesh,
            partial(train_step, comm, setup),
            (state_specs, ROWS, ROWS),
            (state_specs, P()),
            donate_argnums=0,
        )
        self.loss_fn = on_mesh(
            mesh, partial(bits_per_byte, comm, setup.dtype), (SPECS, ROWS, ROWS), P()
        )
        self.rng = np.random.default_rng(seed)
        self.batch = partial(windows, text, self.rng, setup, mesh)
        self.held_out_batches = held_out_batches
        shardings = jax.tree.map(partial(NamedSharding, mesh), SPECS)
        params = jax.device_put(init(self.rng, setup), shardings)
        zeros = partial(jax.tree.map, jnp.zeros_like)
        self.state = (params, zeros(params), zeros(params), jnp.zeros(()))
        self.losses = []  # of every step, in bits per byte
        self.held_out = {}  # step -> bits per byte
        self.seconds = []  # of a step, for each block of the full length

    @property
    def params(self):
        return self.state[0]

    def train(self, steps):
        """Runs a block of steps, of which the host waits for the last only."""
        start = time.perf_counter()
        losses = []
        for _ in range(steps):
            self.state, loss = self.step_fn(self.state, *self.batch())
            losses.append(loss)
        jax.block_until_ready(losses)
        if steps == BLOCK:
            self.seconds.append((time.perf_counter() - start) / steps)
        self.losses += map(float, losses)

    def evaluate(self):
        losses = [self.loss_fn(self.params, *batch) for batch in self.held_out_batches]
        self.held_out[len(self.losses)] = float(np.mean(losses))


def train_in_turn(runs, steps):
    """Trains all runs, block by block in turn, so that what slows the machine meets them alike."""
    progress = Progress(" / ".join(runs), steps)
    done = 0
    blocks = [1] * min(steps, 2)  # the first compiles, the second is the first that is captured
    blocks += [BLOCK] * ((steps - len(blocks)) // BLOCK)
    blocks += [steps - sum(blocks)] if sum(blocks) < steps else []
    order = list(runs.values())
    for i, block in enumerate(blocks):
        for run in order if i % 2 else reversed(order):  # nobody is always first
            run.train(block)
        before, done = done, done + block
        if done * 6 // steps > before * 6 // steps:
            for run in order:
                run.evaluate()
        progress.show(done, order[0].losses[-1])
    progress.finish(f"{steps} steps each, in turn")


def speed(runs):
    """How fast the first run was, over the second: the sentence that says so."""
    ours, theirs = (np.array(run.seconds) for run in runs.values())
    names = list(runs)
    if ours.size < 3:
        return f"{names[0]} over {names[1]}: too few steps to tell"
    rates = [1 / np.median(seconds) for seconds in (ours, theirs)]
    low, ratio, high = np.percentile(theirs / ours, (25, 50, 75))  # of blocks next to each other
    return (
        f"{names[0]} {rates[0]:.1f} steps/s, {names[1]} {rates[1]:.1f}; end to end {ratio:.3f}x "
        f"(median of {ours.size} pairs of {BLOCK} steps, quartiles {low:.3f}x to {high:.3f}x)"
    )


def windows(text, rng, setup, mesh):
    """A random batch of the text and, for each byte, the byte after it."""
    start = rng.integers(0, len(text) - setup.seq, setup.batch)
    rows = text[start[:, None] + np.arange(setup.seq + 1)].astype(np.int32)
    return jax.device_put((rows[:, :-1], rows[:, 1:]), NamedSharding(mesh, ROWS))


def sample(comm, mesh, setup, params, prompt, seed):
    """Continues `prompt`, up to the length of a training sequence."""
    predict_fn = on_mesh(mesh, partial(predict, comm, setup.dtype), (SPECS, ROWS), ROWS)
    rng = np.random.default_rng(seed)
    rows = np.zeros((mesh.shape["data"], setup.seq), np.int32)  # axis "data" needs a row each
    rows[:, : len(prompt)] = np.frombuffer(prompt, np.uint8)
    length = min(setup.seq, 160)
    for i in range(len(prompt), length):
        logits = np.asarray(predict_fn(params, rows))[0, i - 1]
        rows[:, i] = np.argmax(logits / 0.6 + rng.gumbel(size=VOCABULARY))  # temperature 0.6
    return rows[0, :length].astype(np.uint8).tobytes().decode("ascii", "replace")


# ---- Comparison and command line -------------------------------------------------------------

# Bits per byte by which two runs may differ in their first five steps and later: about ten times
# what another mesh, so another order of the same sums, was seen to change. Training amplifies it.
ROUNDING = {"float32": (1e-5, 2e-3), "bfloat16": (2e-3, 1e-1)}


def compare(losses, others, dtype):
    """Whether two runs differ by no more than rounding, and the sentence that says so."""
    difference = np.abs(np.subtract(losses, others))
    early, late = ROUNDING[dtype]
    limit = np.where(np.arange(difference.size) < 5, early, late)
    same = bool(np.all(difference <= limit))  # a NaN is not
    step = int(np.argmax(difference))
    return same, (
        f"final losses {losses[-1]:.6f} and {others[-1]:.6f}; largest difference of a step "
        f"{difference[step]:.1e}, at step {step + 1} ({'within' if same else 'BEYOND'} rounding)"
    )


def make_mesh(args):
    count = args.devices or (math.prod(args.mesh) if args.mesh else None)
    jax.config.update("jax_num_cpu_devices", count or 8)
    if args.cpu:
        jax.config.update("jax_platforms", "cpu")
    devices = jax.devices()  # GPUs, where there are some
    count = count or 2 ** int(math.log2(len(devices)))
    data, model = args.mesh or (count // math.gcd(count, 2), math.gcd(count, 2))
    if data * model != count or count > len(devices):
        sys.exit(f"no mesh {data}x{model} of {count} devices: there are {len(devices)}")
    return jax.make_mesh(
        (data, model), BOTH, axis_types=(AxisType.Auto,) * 2, devices=devices[:count]
    )


def make_setup(args, mesh):
    setup = ON_CPU if mesh.devices.flat[0].platform == "cpu" else ON_GPU
    given = {k: v for k, v in vars(args).items() if k in ("steps", "batch", "seq") and v}
    setup = dataclasses.replace(setup, **given)
    data, model = mesh.shape["data"], mesh.shape["model"]
    for name, size, parts in (
        ("--batch", setup.batch, data),
        ("--seq", setup.seq, model),
        ("the number of heads", setup.heads, model),
        ("the width", setup.width, data),
        ("the vocabulary", VOCABULARY, data * model),
    ):
        if size % parts:
            sys.exit(f"{name}, {size}, is not divisible by {parts}, as a {data}x{model} mesh needs")
    return setup


def main(argv=None):
    args = parse_arguments(__doc__, argv)
    mesh = make_mesh(args)
    setup = make_setup(args, mesh)
    text, unseen = load_text()
    rng = np.random.default_rng(args.seed + 1)
    held_out_batches = [windows(unseen, rng, setup, mesh) for _ in range(12)]
    targets = np.concatenate([np.asarray(targets) for _, targets in held_out_batches])
    frequency_bits = byte_frequency_bits(text, targets)
    data, model = mesh.shape.values()
    print(f"mesh       {data} data x {model} model, {mesh.devices.flat[0].device_kind}")
    print(f"setup      {', '.join(f'{k} {v}' for k, v in vars(setup).items())}")

    runs = {
        name: Run(comm, mesh, setup, args.seed, text, held_out_batches)
        for name, comm in (("pk_jax", pk), ("jax.lax", jax.lax))
    }
    train_in_turn(runs, setup.steps)
    ours, theirs = runs.values()
    print(f"speed      {speed(runs)}")
    print("sample")
    for line in sample(pk, mesh, setup, ours.params, b"def ", args.seed).splitlines():
        print(f"  | {line}")
    save_chart(args.out, runs, frequency_bits)
    same, sentence = compare(ours.losses, theirs.losses, setup.dtype)
    print(f"agreement  {sentence}")
    print(
        f"held-out   {ours.held_out[setup.steps]:.3f} bits per byte; "
        f"{frequency_bits:.3f} from byte frequencies alone"
    )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())

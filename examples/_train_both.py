"""Data and the comparison of the examples of tensor parallelism in a library of modules."""

import argparse

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tensor_parallel import InLax

import pk_jax as pk

ROWS = P(None, "tp")  # of [batch, seq, width]: each device has some positions of every sequence


def main(train, description, argv=None):
    """Trains with pk_jax's layers and with jax.lax's; returns 0 if their losses agree and fall.

    Args:
        train: a function of layers, a mesh, x, y and a number of steps; its losses.
        description: of the command line.
        argv: the command line's arguments.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--cpu", action="store_true", help="virtual CPU devices even if GPUs exist")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", 8)
    if args.cpu:
        jax.config.update("jax_platforms", "cpu")
    mesh = jax.make_mesh((jax.device_count(),), ("tp",), axis_types=(AxisType.Auto,))
    print(f"mesh       {mesh.size} x {mesh.devices.flat[0].device_kind}")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 8 * mesh.size, 16), np.float32)
    y = np.sin(x @ rng.standard_normal((16, 1), np.float32))
    x, y = (jax.device_put(each, NamedSharding(mesh, ROWS)) for each in (x, y))
    losses = []
    for name, layers in (("pk_jax", pk.tp), ("jax.lax", InLax)):
        losses.append(train(layers, mesh, x, y, args.steps))
        first, last = losses[-1][0], losses[-1][-1]
        print(f"{name:<10} loss {first:.5f} -> {last:.5f} in {args.steps} steps")
    same = agree(*losses, rtol=1e-4 if args.cpu else 1e-2)
    print(f"agreement  {'within' if same else 'BEYOND'} rounding")
    return 0 if same else 1


def agree(ours, theirs, rtol):
    """Whether losses are alike and fall; on GPUs float32 products are rounded more coarsely."""
    return bool(np.allclose(ours, theirs, rtol=rtol) and ours[-1] < ours[0])

"""Programs on two GPUs, one rank each on the axis "x", and operands for them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding


def on_two_gpus(f, in_specs, out_specs):
    """The mesh, and f of each rank's parts, jitted."""
    mesh = Mesh(np.array(jax.devices("cuda")[:2]), ("x",))
    mapped = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return mesh, jax.jit(mapped)


def draw(mesh, spec, shape, seed):
    """Normal numbers in bfloat16."""
    x = jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
    return jax.device_put(x, NamedSharding(mesh, spec))

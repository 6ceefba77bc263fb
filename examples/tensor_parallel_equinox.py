"""Tensor parallelism in Equinox: a module whose dense layers are pk_jax's, and its training.

The module's parameters are arrays of the whole mesh, cut by columns and by rows, and its call is a
`jax.shard_map` over them. So it takes and returns arrays of the whole mesh, like any other module,
and what is around it, here two plain `eqx.nn.Linear`, is left to jit's own sharding.

    pip install equinox
    python examples/tensor_parallel_equinox.py      # trains twice, with pk_jax and with jax.lax
"""

import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from _train_both import ROWS, main
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# Of the parameters.
SPECS = {"up": P(None, "tp"), "up_bias": P("tp"), "down": P("tp"), "down_bias": P()}


class FeedForward(eqx.Module):
    """down(gelu(up(x))), cut over the axis "tp" of a mesh."""

    params: dict[str, jax.Array]
    mesh: Mesh = eqx.field(static=True)
    layers: Any = eqx.field(static=True)

    def __init__(self, width, hidden, mesh, layers, *, key):
        self.mesh, self.layers = mesh, layers
        first, second = jax.random.split(key)
        params = {
            "up": jax.random.normal(first, (width, hidden)) / np.sqrt(width),
            "up_bias": jnp.zeros(hidden),
            "down": jax.random.normal(second, (hidden, width)) / np.sqrt(hidden),
            "down_bias": jnp.zeros(width),
        }
        shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
        self.params = jax.lax.with_sharding_constraint(params, shardings)

    def __call__(self, x):
        def on_each_device(x, p):
            options = {"axis_name": "tp", "sequence_dimension": 1}
            h = self.layers.column_parallel_dense(x, p["up"], bias=p["up_bias"], **options)
            h = jax.nn.gelu(h)
            return self.layers.row_parallel_dense(h, p["down"], bias=p["down_bias"], **options)

        f = jax.shard_map(on_each_device, mesh=self.mesh, in_specs=(ROWS, SPECS), out_specs=ROWS)
        return f(x, self.params)


class Model(eqx.Module):
    enter: eqx.nn.Linear
    feed_forward: FeedForward
    leave: eqx.nn.Linear

    def __init__(self, features, width, hidden, mesh, layers, *, key):
        keys = jax.random.split(key, 3)
        whole = NamedSharding(mesh, P())
        self.enter, self.leave = (
            eqx.filter_shard(eqx.nn.Linear(*sizes, key=k), whole)
            for sizes, k in (((features, width), keys[0]), ((width, 1), keys[1]))
        )
        self.feed_forward = FeedForward(width, hidden, mesh, layers, key=keys[2])

    def __call__(self, x):
        """[batch, seq, features] to [batch, seq, 1]; plain layers take one position at a time."""
        x = jax.vmap(jax.vmap(self.enter))(x)
        return jax.vmap(jax.vmap(self.leave))(x + self.feed_forward(x))


@eqx.filter_jit
def train_step(model, x, y):
    def loss(model):
        return jnp.mean((model(x) - y) ** 2)

    value, gradients = eqx.filter_value_and_grad(loss)(model)
    return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradients)), value


def train(layers, mesh, x, y, steps):
    """The losses of a few steps; whatever the layers, from the same start on the same data."""
    model = eqx.filter_jit(Model)(16, 32, 64, mesh, layers, key=jax.random.key(0))
    losses = []
    for _ in range(steps):
        model, loss = train_step(model, x, y)
        losses.append(float(loss))
    return np.array(losses)


if __name__ == "__main__":
    sys.exit(main(train, __doc__.partition("\n")[0]))

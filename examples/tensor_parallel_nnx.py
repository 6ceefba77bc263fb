"""Tensor parallelism in Flax NNX: a module whose dense layers are pk_jax's, trained under nnx.jit.

The module's parameters are arrays of the whole mesh, cut by columns and by rows, and its call is a
`jax.shard_map` over them. So it takes and returns arrays of the whole mesh, like any other module,
and what is around it, here two plain `nnx.Linear`, is left to jit's own sharding.

    pip install flax
    python examples/tensor_parallel_nnx.py      # trains twice, with pk_jax and with jax.lax
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax  # comes with flax
from _train_both import ROWS, main
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

COLUMN, COLUMN_BIAS, ROW, ROW_BIAS = P(None, "tp"), P("tp"), P("tp"), P()


class FeedForward(nnx.Module):
    """down(gelu(up(x))), cut over the axis "tp" of a mesh."""

    def __init__(self, width, hidden, mesh, layers, *, rngs):
        self.mesh, self.layers = mesh, layers
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Param(init(rngs.params(), (width, hidden)), out_sharding=COLUMN)
        self.up_bias = nnx.Param(jnp.zeros(hidden), out_sharding=COLUMN_BIAS)
        self.down = nnx.Param(init(rngs.params(), (hidden, width)), out_sharding=ROW)
        self.down_bias = nnx.Param(jnp.zeros(width), out_sharding=ROW_BIAS)

    def __call__(self, x):
        def on_each_device(x, up, up_bias, down, down_bias):
            options = {"axis_name": "tp", "sequence_dimension": 1}
            h = self.layers.column_parallel_dense(x, up, bias=up_bias, **options)
            return self.layers.row_parallel_dense(jax.nn.gelu(h), down, bias=down_bias, **options)

        specs = (ROWS, COLUMN, COLUMN_BIAS, ROW, ROW_BIAS)
        f = jax.shard_map(on_each_device, mesh=self.mesh, in_specs=specs, out_specs=ROWS)
        return f(x, *(p[...] for p in (self.up, self.up_bias, self.down, self.down_bias)))


class Model(nnx.Module):
    def __init__(self, features, width, hidden, mesh, layers, *, rngs):
        self.enter = nnx.Linear(features, width, rngs=rngs)
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.feed_forward = FeedForward(width, hidden, mesh, layers, rngs=rngs)
        self.leave = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x):
        x = self.enter(x)
        return self.leave(x + self.feed_forward(self.norm(x)))


@partial(nnx.jit, static_argnums=(0, 1))
def create(mesh, layers):
    """The model and its optimizer, each parameter where its `out_sharding` says."""
    model = Model(16, 32, 64, mesh, layers, rngs=nnx.Rngs(0))
    state = nnx.state(model)
    shardings = jax.tree.map(partial(NamedSharding, mesh), nnx.get_partition_spec(state))
    nnx.update(model, jax.lax.with_sharding_constraint(state, shardings))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


@nnx.jit
def train_step(model, optimizer, x, y):
    def loss(model):
        return jnp.mean((model(x) - y) ** 2)

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def train(layers, mesh, x, y, steps):
    """The losses of a few steps; whatever the layers, from the same start on the same data."""
    with jax.set_mesh(mesh):
        model, optimizer = create(mesh, layers)
        return np.array([float(train_step(model, optimizer, x, y)) for _ in range(steps)])


if __name__ == "__main__":
    sys.exit(main(train, __doc__.partition("\n")[0]))

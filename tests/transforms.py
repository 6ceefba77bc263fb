"""What the tests of collectives under JAX's transforms share."""

import jax
import jax.numpy as jnp
import numpy as np

RANKS = 4
ring = [(i, (i + 1) % RANKS) for i in range(RANKS)]

# What a module (pk or lax) does to a rank's [4, 8].
LINEAR = {
    "psum": lambda m, x: m.psum(x, "x"),
    "pmean": lambda m, x: m.pmean(x, "x"),
    "psum_scatter": lambda m, x: m.psum_scatter(x, "x", scatter_dimension=1, tiled=True),
    "psum_scatter untiled": lambda m, x: m.psum_scatter(x, "x"),
    "all_to_all": lambda m, x: m.all_to_all(x, "x", 1, 0, tiled=True),
    "all_to_all one axis": lambda m, x: m.all_to_all(x, "x", 1, 1, tiled=True),
    "all_to_all untiled": lambda m, x: m.all_to_all(x, "x", 0, 0),
    "ppermute": lambda m, x: m.ppermute(x, "x", ring),
    "ppermute of some": lambda m, x: m.ppermute(x, "x", [(0, 2), (2, 1)]),
    "all_gather": lambda m, x: m.all_gather(x, "x", axis=1),
}


def values(*shape):
    return jnp.asarray(np.sin(np.arange(np.prod(shape))).reshape(shape), jnp.float32)


def primitives_in(fn, *args):
    """Names of all primitives in the jaxpr of fn, inner jaxprs included."""

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            yield eqn.primitive.name
            for value in eqn.params.values():
                for inner in value if isinstance(value, (tuple, list)) else (value,):
                    inner = getattr(inner, "jaxpr", inner)
                    if hasattr(inner, "eqns"):
                        yield from visit(inner)

    return list(visit(jax.make_jaxpr(fn)(*args).jaxpr))

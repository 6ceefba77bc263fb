"""all_gather(rms_norm(x) * weight), one kernel: an op that pk_jax does not have.

Build its library with build.py, then: python rms_norm_gather.py
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pk_jax as pk

OP = "rms_norm_gather"
LIBRARY = Path(__file__).with_name(f"lib{OP}.so")

if LIBRARY.exists():
    pk.load_ops(LIBRARY)


def reference(x, weight, *, axis_name, eps):
    """What the op means, in jax.lax: the oracle of the tests, and what runs without the kernel."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + np.float32(eps))
    normal = (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)
    return lax.all_gather(normal, axis_name, tiled=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def rms_norm_gather(x, weight, axis_name, eps=1e-6, implementation=None):
    """Normalises the rows of x, multiplies them by weight, and gathers the rows of all ranks.

    Args:
        x: [..., cols], this rank's part; float32 or bfloat16.
        weight: [cols], of x's dtype.
        axis_name: the mesh axis or axes to gather over.
        eps: added to the mean of the squares.
        implementation: None, "cuda" or "reference".

    Returns:
        all_gather of the normalised x along its first dimension, tiled.
    """
    if x.dtype != weight.dtype or x.dtype not in (jnp.float32, jnp.bfloat16):
        raise TypeError(
            f"{OP}: x and weight must both be float32 or both bfloat16, got {x.dtype} and "
            f"{weight.dtype}; convert them with .astype"
        )
    if x.ndim == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"{OP}: weight must have the shape of a row of x, got {weight.shape} for {x.shape}"
        )
    return pk.call_op(
        OP, reference, (x, weight), axis_name, implementation=implementation, eps=float(eps)
    )


def _forward(x, weight, axis_name, eps, implementation):
    return rms_norm_gather(x, weight, axis_name, eps, implementation), (x, weight)


def _backward(axis_name, eps, implementation, operands, cotangent):
    of_operands = functools.partial(reference, axis_name=axis_name, eps=eps)
    _, transpose = jax.vjp(of_operands, *operands)
    return transpose(cotangent)


rms_norm_gather.defvjp(_forward, _backward)


def main():
    mesh = Mesh(np.array(jax.devices()), ("tp",))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P("tp"), P()), out_specs=P("tp"))
    def differences(x, weight):
        got = rms_norm_gather(x, weight, "tp")
        return jnp.abs(got - reference(x, weight, axis_name="tp", eps=1e-6))

    rng = np.random.default_rng(0)
    x = rng.standard_normal((mesh.size * 1000, 1001), np.float32)
    x = jax.device_put(x, NamedSharding(mesh, P("tp")))
    weight = jnp.asarray(rng.standard_normal(1001, np.float32))
    path = "kernel" if f"@pk_jax_{OP}(" in differences.lower(x, weight).as_text() else "reference"
    print(f"{mesh.size} x {mesh.devices.flat[0].device_kind}: {path}")
    print(f"largest difference from the reference: {differences(x, weight).max():.1e}")


if __name__ == "__main__":
    main()

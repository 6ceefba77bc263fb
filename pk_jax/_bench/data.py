"""Operands that every rank can compute: a hash of rank, data set and position.

So a check compares a result with what it must be, bit by bit, without a communication that could
be wrong itself. Integers alone: the same bits in every program that computes them, and far quicker
to compile than a generator of jax.random.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

DTYPE = jnp.bfloat16


def value(rank: Any, data_set: Any, position: jax.Array, summed: bool) -> jax.Array:
    """The element of `rank` at a flat position; rank may be an array too.

    Random sign and mantissa with a magnitude in [0.5, 1). If the elements are to be summed:
    integers from -16 to 15, whose sums over eight ranks are exact in bfloat16 in any order.
    """
    seed = _mixed(jnp.asarray(rank, jnp.uint32) * 64 + jnp.asarray(data_set, jnp.uint32) + 1)
    bits = _mixed(position ^ seed)
    if summed:
        return ((bits >> 27).astype(jnp.int32) - 16).astype(DTYPE)
    return lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16) & 0x807F | 0x3F00, DTYPE)


def coordinates(shape: tuple[int, ...]) -> list[jax.Array]:
    """Of each element of `shape`, its index along each dimension."""
    return [lax.broadcasted_iota(jnp.uint32, shape, d) for d in range(len(shape))]


def flat(coords: list[Any], shape: tuple[int, ...]) -> jax.Array:
    """The row-major position in `shape` of the element at `coords`."""
    position = jnp.zeros((), jnp.uint32)
    for coord, stride in zip(coords, strides(shape), strict=True):
        position = position + coord.astype(jnp.uint32) * jnp.uint32(stride)
    return position


def strides(shape: tuple[int, ...]) -> list[int]:
    """Elements between neighbours along each dimension, row-major."""
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


def _mixed(x: jax.Array) -> jax.Array:
    """Two rounds of multiply and shift: every bit of the result hangs on every bit of x."""
    for _ in range(2):
        x = (x ^ (x >> 16)) * np.uint32(0x9E3779B1)
        x = (x ^ (x >> 15)) * np.uint32(0x85EBCA77)
    return x ^ (x >> 16)

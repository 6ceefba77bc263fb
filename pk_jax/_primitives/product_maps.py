"""What the rules of jax.vmap for products with a collective do to [outer, rows, k] and w."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def maps_any(axis_data: Any, dims: Any, axis_name: tuple[Any, ...]) -> bool:
    """Whether a map does anything to an op: JAX also asks where no operand is mapped."""
    return axis_data.name in axis_name or any(d is not None for d in dims)


def takes_parts(axis_data: Any, axis_name: tuple[Any, ...], maps_x: bool, maps_w: bool) -> bool:
    """Whether a map is no larger call of the op: over nothing, its own axis, or both factors."""
    return axis_data.size == 0 or axis_data.name in axis_name or (maps_x and maps_w)


def map_parts(
    parts: Callable[..., Any], axis_data: Any, operands: Any, dims: Any, params: dict[str, Any]
) -> Any:
    """The map of an op's composition of parts, whose own rules then say how each is mapped."""
    mapped = jax.vmap(
        functools.partial(parts, **params),
        tuple(dims),
        axis_name=axis_data.name,
        axis_size=axis_data.size,
        spmd_axis_name=axis_data.spmd_name,
    )
    return mapped(*operands)


def longer_x(x: Any, d: int | None, size: int) -> Any:
    """The x of all elements of a map as one, element by element along `outer`."""
    x = jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
    return x.reshape(size * x.shape[1], *x.shape[2:])


def wider_w(w: Any, d: int | None, size: int, transpose_w: bool) -> Any:
    """The w of all elements of a map as one, element by element along p."""
    at = 0 if transpose_w else 1
    w = jnp.moveaxis(jnp.broadcast_to(w, (size, *w.shape)) if d is None else w, d or 0, at)
    merged = w.shape[at] * w.shape[at + 1]
    return w.reshape((merged, w.shape[2]) if transpose_w else (w.shape[0], merged))


def split(y: Any, at: int, size: int) -> Any:
    """Y with the elements of a map, which lie along a dimension, in one of their own before it."""
    return y.reshape(*y.shape[:at], size, y.shape[at] // size, *y.shape[at + 1 :])

"""Collectives over axes of which some stay inside a host: one implementation inside, lax across.

GPUs of one host (one NVLink domain) reach each other's memory, others do not. `inner` names the
axes inside, and the rest of `axis_name` goes across. Each op is composed so that as little as
possible crosses: a gather crosses before it is multiplied, a sum after it is divided. What a rank
gets is what the op over axis_name as given would give it; where the order of that tuple is not
outer axes then inner ones, or the other way round, a transpose on each GPU puts it right.

Nothing here knows of hosts or of kernels: the functions compose any split of the axes from the ops
they are given for the inner ones.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from pk_jax._primitives import checks
from pk_jax._reference import collectives as reference
from pk_jax._tuning import hardware

Axes = tuple[Any, ...]

_ACROSS = {"psum": reference.psum, "pmax": reference.pmax, "pmin": reference.pmin}


def reduce(
    op: str,
    x: Any,
    axis_name: Axes,
    inner: Axes,
    *,
    reduce_inside: Callable[..., Any],
    scatter_inside: Callable[..., Any],
    gather_inside: Callable[..., Any],
) -> Any:
    """psum, pmax or pmin.

    Args:
        op: the name of the op.
        x: an array.
        axis_name: all axes.
        inner: those inside a host, in the order of axis_name.
        reduce_inside: the op over inner axes: (x, axes).
        scatter_inside: psum_scatter over inner axes, as in lax.
        gather_inside: all_gather over inner axes, as in lax.
    """
    outer = _others(axis_name, inner)
    if x.size * x.dtype.itemsize < hardware.ACROSS_IN_PARTS_BYTES:
        return _ACROSS[op](reduce_inside(x, inner), outer)
    size = checks.bound_size(inner)
    flat = jnp.pad(x.reshape(-1), (0, -x.size % size))
    if op == "psum":
        part = scatter_inside(flat, inner, scatter_dimension=0, tiled=True)
    else:
        rows = reduce_inside(flat, inner).reshape(size, -1)
        part = lax.dynamic_index_in_dim(rows, lax.axis_index(inner), keepdims=False)
    part = _ACROSS[op](part, outer)
    flat = gather_inside(part, inner, axis=0, tiled=True, to="invarying")
    return flat[: x.size].reshape(x.shape)


def all_gather(
    x: Any,
    axis_name: Axes,
    inner: Axes,
    *,
    axis: int,
    tiled: bool,
    to: str = "varying",
    gather_inside: Callable[..., Any],
) -> Any:
    """all_gather; axis_name, inner and gather_inside as in reduce, the rest as in lax."""
    outer = _others(axis_name, inner)
    outer_first = axis_name == (*outer, *inner)
    x = reference.all_gather(x, outer, axis=axis, to=to)
    x = gather_inside(x, inner, axis=axis + outer_first, tiled=False, to=to)
    x = _merge(x, axis)
    if not outer_first:
        x = _reorder(x, axis, (*inner, *outer), axis_name)
    return _merge(x, axis) if tiled else x


def psum_scatter(
    x: Any,
    axis_name: Axes,
    inner: Axes,
    *,
    scatter_dimension: int,
    tiled: bool,
    scatter_inside: Callable[..., Any],
) -> Any:
    """psum_scatter; axis_name, inner and scatter_inside as in reduce, the rest as in lax."""
    outer = _others(axis_name, inner)
    outer_first = axis_name == (*outer, *inner)
    at, size = scatter_dimension, checks.bound_size(inner)
    if tiled:
        x = _split(x, at, [checks.bound_size(axis_name), -1])
    if outer_first:
        x = _split(x, at, [-1, size])
    else:
        x = _split(_reorder(x, at, axis_name, (*inner, *outer)), at, [size, -1])
    x = scatter_inside(x, inner, scatter_dimension=at + outer_first, tiled=False)
    return reference.psum_scatter(x, outer, scatter_dimension=at)


def _others(axis_name: Axes, inner: Axes) -> Axes:
    return tuple(axis for axis in axis_name if axis not in inner)


def _reorder(x: Any, at: int, now: Axes, wanted: Axes) -> Any:
    """x, whose dimension `at` goes over ranks in the order of `now`, in the order of `wanted`."""
    if now == wanted:
        return x
    sizes = [checks.bound_size([axis]) for axis in now]
    split = _split(x, at, sizes)
    places = [at + now.index(axis) for axis in wanted]
    order = [*range(at), *places, *range(at + len(now), split.ndim)]
    return split.transpose(order).reshape(x.shape)


def _split(x: Any, at: int, sizes: Sequence[int]) -> Any:
    """X with dimension `at` cut into several; one of the sizes may be -1."""
    known = math.prod(size for size in sizes if size != -1)
    sizes = [x.shape[at] // known if size == -1 else size for size in sizes]
    return x.reshape(*x.shape[:at], *sizes, *x.shape[at + 1 :])


def _merge(x: Any, at: int) -> Any:
    """X with dimension `at` and the next as one."""
    return x.reshape(*x.shape[:at], x.shape[at] * x.shape[at + 1], *x.shape[at + 2 :])

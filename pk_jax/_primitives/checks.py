"""Checks of the arguments that all collectives share; each error names values and remedy."""

import math
import operator
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from pk_jax import _compat


def check_axes(
    op: str, axis_name: Any, *, like_reduction: bool = False, positions: bool | None = None
) -> tuple[Any, ...]:
    """axis_name as a tuple of axes that are bound here.

    Args:
        op: name of the op, for messages.
        axis_name: a name or a tuple of names.
        like_reduction: also take a list, as lax's reductions do.
        positions: also take positions of array axes (ints); by default if like_reduction.
    """
    if positions is None:
        positions = like_reduction
    if like_reduction and isinstance(axis_name, list):
        axis_name = tuple(axis_name)
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    for name in axes:
        if isinstance(name, int):
            if positions:
                continue
            raise TypeError(f"{op}: axis_name must be the name of a mesh axis, got the int {name}")
        if not isinstance(name, Hashable) or name is None:
            raise TypeError(
                f"{op}: axis_name must be the name of a mesh axis or a tuple of names, "
                f"got {axis_name!r}"
            )
        if name not in _compat.bound_axes():
            raise NameError(_unbound(op, name))
    if len(set(axes)) != len(axes):
        raise ValueError(f"{op}: axis_name {axes} names an axis twice")
    return axes


def check_groups(
    op: str,
    axis_index_groups: Any,
    axis_name: tuple[Any, ...],
    *,
    equal_sizes: bool = True,
) -> tuple[tuple[int, ...], ...] | None:
    """axis_index_groups as tuples of ints that split the axis into groups."""
    if axis_index_groups is None:
        return None
    what = f"{op}: axis_index_groups={axis_index_groups!r}"
    try:
        if isinstance(axis_index_groups, str):
            raise TypeError
        groups = tuple(tuple(map(operator.index, group)) for group in axis_index_groups)
    except TypeError:
        raise TypeError(f"{what} must be a list of lists of ints") from None
    size = bound_size(axis_name)
    if sorted(i for group in groups for i in group) != list(range(size)):
        raise ValueError(
            f"{what} must hold each index 0..{size - 1} of axis {axis_name} (size {size}) "
            "exactly once"
        )
    if equal_sizes and len({len(group) for group in groups}) > 1:
        raise ValueError(f"{what} must all have one size, got {[len(g) for g in groups]}")
    return groups


def check_typed_groups(op: str, x: Any, groups: Any) -> None:
    """Raises if the sums of different groups would have to be typed as equal on all ranks."""
    traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(x))
    if groups is not None and traced and _compat.check_vma():
        raise NotImplementedError(
            f"{op}: axis_index_groups needs jax.shard_map(..., check_vma=False), since results of "
            "different groups differ"
        )


def check_permutation(
    op: str, perm: Any, axis_name: tuple[Any, ...]
) -> tuple[tuple[int, int], ...]:
    """Pairs (source, destination) of ranks of the axis; negative ones count from its end."""
    what = f"{op}: perm={perm!r}"
    try:
        if not isinstance(perm, (list, tuple)):
            raise TypeError
        pairs = [(operator.index(source), operator.index(to)) for source, to in perm]
    except (TypeError, ValueError):
        raise TypeError(f"{what} must be a list of (source, destination) pairs of ints") from None
    size = bound_size(axis_name)
    outside = [rank for pair in pairs for rank in pair if not -size <= rank < size]
    if outside:
        raise ValueError(f"{what} names ranks {outside}; axis {axis_name} has 0..{size - 1}")
    pairs = [(source % size, to % size) for source, to in pairs]
    for side, word in enumerate(("source", "destination")):
        ranks = [pair[side] for pair in pairs]
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"{what} names a {word} twice: sources and destinations are unique")
    return tuple(pairs)


def check_parts(
    op: str,
    name: str,
    shape: tuple[int, ...],
    dimension: int,
    num_parts: int,
    axis_name: tuple[Any, ...],
    tiled: bool,
) -> None:
    """Raises unless the dimension can be cut in a part for each rank."""
    length = shape[dimension]
    if length % num_parts if tiled else length != num_parts:
        must = "must be divisible by" if tiled else "must equal"
        remedy = "pad it" if tiled else "reshape it, or pass tiled=True to keep the dimension"
        raise ValueError(
            f"{op}: {name}={dimension} of shape {shape} has size {length}, which {must} the "
            f"{num_parts} ranks of axis {axis_name}; {remedy}"
        )


def check_dimension(op: str, name: str, value: Any, ndim: int) -> int:
    """A dimension argument as an int in 0..ndim - 1."""
    try:
        index = operator.index(value)
    except TypeError:
        raise TypeError(f"{op}: {name} must be an int, got {value!r}") from None
    if not -ndim <= index < ndim:
        raise ValueError(f"{op}: {name}={index} is out of bounds for {ndim} dimensions")
    return index % ndim


def check_flag(op: str, name: str, value: Any) -> bool:
    """A True/False argument as a bool."""
    if isinstance(value, np.bool_):
        return bool(value)
    try:
        return bool(operator.index(value))
    except TypeError:
        raise TypeError(f"{op}: {name} must be True or False, got {value!r}") from None


def check_no_explicit_axes(op: str, *operands: Any) -> None:
    """Raises where the types of arrays name mesh axes: lax then asks for an out_sharding."""
    mesh = jax.sharding.get_abstract_mesh()
    meshes = [mesh]
    if not mesh.manual_axes:  # inside shard_map what is closed over still names the mesh outside
        meshes += [jax.typeof(x).sharding.mesh for x in operands]
    if any(jax.sharding.AxisType.Explicit in each.axis_types for each in meshes):
        raise NotImplementedError(
            f"{op}: the types of the operands name the mesh axes "
            f"{sorted({axis for each in meshes for axis in each.axis_names})}, and no rule says "
            "how the result lies; call it inside jax.shard_map over all of them"
        )


def bound_size(axis_name: Sequence[Any], groups: tuple[tuple[int, ...], ...] | None = None) -> int:
    """Ranks in a group: the product of the axes' sizes, or the size of the groups."""
    if groups is not None:
        return len(groups[0])
    sizes = _compat.bound_axes()
    return math.prod(sizes[name] for name in axis_name)


def _unbound(op: str, name: Any) -> str:
    mesh = jax.sharding.get_abstract_mesh()
    bound = tuple(_compat.bound_axes())
    if name in mesh.axis_names:
        manual = tuple(axis for axis in mesh.axis_names if axis in bound)
        wanted = {*manual, name}
        return (
            f"{op}: axis {name!r} of the mesh {mesh.axis_names} is not manual here (manual: "
            f"{manual}); call it inside jax.shard_map with {name!r} among its axis_names, e.g. "
            f"axis_names={{{', '.join(sorted(map(repr, wanted)))}}}"
        )
    if bound or mesh.axis_names:
        return (
            f"{op}: axis {name!r} is not in the mesh {mesh.axis_names} (axes bound here: {bound}); "
            f"name one of these, or make the mesh with an axis {name!r}"
        )
    return (
        f"{op}: axis {name!r} is unbound and there is no mesh here; call it in a function under "
        f"jax.shard_map(f, mesh=..., in_specs=..., out_specs=...) with a mesh that has an axis "
        f"{name!r}"
    )

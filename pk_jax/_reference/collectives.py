"""The collectives in jax.lax, with the few corners that lax's lowerings do not cover."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pk_jax import _compat
from pk_jax._compat import parallel

AxisNames = tuple[Hashable, ...]
Groups = Sequence[Sequence[int]] | None

# These are lax's own, whole.
psum = parallel.psum
pmean = parallel.pmean


def _extremum(
    op: str, combine: Callable[[Any, Any], Any], x: Any, axes: Any, groups: Groups
) -> Any:
    is_complex = jnp.issubdtype(jnp.result_type(x), jnp.complexfloating)
    if not is_complex or any(isinstance(axis, int) for axis in axes):
        return getattr(parallel, op)(x, axes, axis_index_groups=groups)
    # Complex numbers are compared by their parts, a reduction that XLA has no collective of: its
    # compiler for GPUs ends the process over one.
    if groups is None:
        to = "invarying" if _compat.check_vma() else "varying"
        return functools.reduce(combine, parallel.all_gather(x, axes, to=to))
    # Groups may have different sizes, which no gather has: a smaller one counts a member twice.
    largest = max(map(len, groups))
    members = np.zeros((sum(map(len, groups)), largest), np.int32)
    for group in groups:
        members[list(group)] = [*group, *[group[0]] * (largest - len(group))]
    parts = parallel.all_gather(x, axes)
    return functools.reduce(combine, parts[jnp.asarray(members)[lax.axis_index(axes)]])


def pmax(x: Any, axes: Any, *, axis_index_groups: Groups = None) -> Any:
    """The lax.pmax of one array."""
    return _extremum("pmax", lax.max, x, axes, axis_index_groups)


def pmin(x: Any, axes: Any, *, axis_index_groups: Groups = None) -> Any:
    """The lax.pmin of one array."""
    return _extremum("pmin", lax.min, x, axes, axis_index_groups)


def all_gather(
    x: Any,
    axis_name: AxisNames,
    *,
    axis_index_groups: Groups = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
) -> Any:
    """The lax.all_gather of one array, along a dimension of the result that is not negative."""

    def gather(x: Any) -> Any:
        return parallel.all_gather(
            x, axis_name, axis_index_groups=axis_index_groups, axis=axis, tiled=tiled, to=to
        )

    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        # lax gathers keys only along a dimension they have. Their words come after all dimensions,
        # so `axis` means the same for them.
        words = gather(jax.random.key_data(x))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    return _in_bytes(gather, x)


def all_to_all(
    x: Any,
    axis_name: AxisNames,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Groups = None,
    tiled: bool = False,
) -> Any:
    """The lax.all_to_all of a pytree."""

    def exchange(x: Any) -> Any:
        return parallel.all_to_all(
            x,
            axis_name,
            split_axis,
            concat_axis,
            axis_index_groups=axis_index_groups,
            tiled=tiled,
        )

    return jax.tree.map(functools.partial(_in_bytes, exchange), x)


def ppermute(x: Any, axis_name: AxisNames, perm: Sequence[tuple[int, int]]) -> Any:
    """The lax.ppermute of a pytree."""
    return jax.tree.map(
        functools.partial(_in_bytes, lambda x: parallel.ppermute(x, axis_name, perm)), x
    )


def psum_scatter(
    x: Any,
    axis_name: AxisNames,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Groups = None,
    tiled: bool = False,
) -> Any:
    """The lax.psum_scatter of one array."""
    return parallel.psum_scatter(
        x,
        axis_name,
        scatter_dimension=scatter_dimension,
        axis_index_groups=axis_index_groups,
        tiled=tiled,
    )


def _in_bytes(move: Callable[[Any], Any], x: Any) -> Any:
    """move(x), integers smaller than a byte going as one byte each.

    XLA's CPU collectives write past their buffers when they move 2-bit integers. Only integers: a
    bitcast has no derivative.
    """
    dtype = jnp.result_type(x)
    if not jnp.issubdtype(dtype, jnp.integer) or _compat.bits_per_element(dtype) not in (2, 4):
        return move(x)
    bits = jnp.dtype(f"uint{_compat.bits_per_element(dtype)}")
    as_bytes = lax.bitcast_convert_type(x, bits).astype(jnp.uint8)
    return lax.bitcast_convert_type(move(as_bytes).astype(bits), dtype)

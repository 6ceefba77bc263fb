"""Checks of what all attention functions take, in their words."""

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pk_jax import _compat
from pk_jax._primitives import checks, matmul, product_checks
from pk_jax._reference.attention import Places, Spec

LAYOUTS = ("contiguous", "zigzag")

# float8 has too few digits for logits that are not scaled by the row.
DTYPES = ("float16", "bfloat16", "float32", "float64")

MOST_POSITIONS = 2**31 - 1


def arrays_of(op: str, **operands: Any) -> tuple[Any, Any, Any]:
    """Query, key and value as arrays of JAX, of one dtype and with shapes that fit."""
    for name, x in operands.items():
        product_checks.check_operand(op, name, x)
    query, key, value = arrays = tuple(map(jnp.asarray, operands.values()))
    dtypes = [x.dtype for x in arrays]
    if len(set(dtypes)) > 1 or dtypes[0].name not in DTYPES:
        raise TypeError(
            f"{op}: query, key and value must have one dtype, of {DTYPES}, got "
            f"{', '.join(dtype.name for dtype in dtypes)}; convert them"
        )
    shapes = [x.shape for x in arrays]
    if any(len(shape) != 4 for shape in shapes):
        raise ValueError(
            f"{op}: query must be [B, T, N, D], key [B, S, K, D] and value [B, S, K, Dv], got "
            f"shapes {_list(shapes)}; add the dimensions that are missing, as by query[None]"
        )
    (batch, _, heads, width), (*rows, key_width), (*value_rows, _) = shapes
    if rows != value_rows:
        raise ValueError(
            f"{op}: key {shapes[1]} and value {shapes[2]} must have the same batch, length and "
            "heads; their last dimensions alone may differ"
        )
    if batch != rows[0]:
        raise ValueError(
            f"{op}: query has a batch of {batch}, of shape {shapes[0]}, and key one of {rows[0]}, "
            f"of {shapes[1]}; repeat or slice one, or map over the query with jax.vmap"
        )
    if width != key_width:
        raise ValueError(
            f"{op}: the last dimension of query, {width} of {shapes[0]}, must equal that of key, "
            f"{key_width} of {shapes[1]}; only that of value may differ"
        )
    if rows[2] < 1 or heads % rows[2]:
        raise ValueError(
            f"{op}: the heads of query, {heads} of shape {shapes[0]}, must be a multiple of those "
            f"of key and value, {rows[2]} of {shapes[1]}; repeat the heads of one of them"
        )
    checks.check_no_explicit_axes(op, *arrays)
    product_checks.check_states(op, [*_compat.bound_axes()], "attention", **operands)
    return query, key, value


def spec_of(
    op: str, query: Any, scale: Any, is_causal: Any, local_window_size: Any, logits_soft_cap: Any
) -> Spec:
    """The attention that the arguments ask for."""
    left, right = _window(op, local_window_size)
    if checks.check_flag(op, "is_causal", is_causal):
        right = 0
    if scale is None:
        scale = max(query.shape[3], 1) ** -0.5
    cap = None
    if logits_soft_cap is not None:
        cap = _number(op, "logits_soft_cap", logits_soft_cap, "leave it None for no cap")
        if not 0 < cap < math.inf:
            raise ValueError(
                f"{op}: logits_soft_cap must be positive and finite, got {cap}; None is no cap"
            )
    scale = _number(op, "scale", scale, "multiply the query by it, and give scale=1.0")
    if not math.isfinite(scale):
        raise ValueError(f"{op}: scale must be finite, got {scale}; None is 1 / sqrt(D)")
    return Spec(scale, cap, left, right, matmul.precision_of_call())


def places_of(op: str, query: Any, key: Any, query_ids: Any, key_ids: Any) -> Places:
    """The places of rows that lie from position 0 on, with the segment ids given."""
    ids = {"query_segment_ids": query_ids, "key_value_segment_ids": key_ids}
    missing = [name for name, x in ids.items() if x is None]
    if len(missing) == 2:
        return Places()
    if missing:
        (given,) = set(ids) - set(missing)
        raise ValueError(
            f"{op}: {given} came without {missing[0]}; give both, or neither for one segment"
        )
    for (name, x), rows, of in zip(ids.items(), (query, key), ("query", "key"), strict=True):
        product_checks.check_operand(op, name, x)
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(
                f"{op}: {name} must hold integers, got dtype {x.dtype}; convert them to int32"
            )
        if x.shape != rows.shape[:2]:
            raise ValueError(
                f"{op}: {name} must be {list(rows.shape[:2])}, an id for each row of {of} "
                f"{rows.shape}, got shape {x.shape}; broadcast or slice it"
            )
    query_ids, key_ids = map(jnp.asarray, ids.values())
    if query_ids.dtype != key_ids.dtype:
        raise TypeError(
            f"{op}: query_segment_ids and key_value_segment_ids must have one dtype, got "
            f"{query_ids.dtype} and {key_ids.dtype}; convert them to int32"
        )
    return Places(query_segments=query_ids, key_segments=key_ids)


def _check_known(op: str, layout: Any) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"{op}: layout must be one of {LAYOUTS}, got {layout!r}")


def check_layout(op: str, layout: Any, query: Any, key: Any, num_ranks: int) -> str:
    """The layout of the ranks' rows, which can have it."""
    _check_known(op, layout)
    for name, x in (("query", query), ("key", key)):
        length = x.shape[1]
        if layout == "zigzag" and length % 2:
            raise ValueError(
                f"{op}: a rank's part of {name} has {length} rows, of shape {x.shape}, and with "
                "layout='zigzag' it is two pieces of one size; pad the sequence to a multiple of "
                f"{2 * num_ranks}, twice the ranks, before zigzag(), and give the padding a "
                "segment id of its own"
            )
        if num_ranks * length > MOST_POSITIONS:
            raise NotImplementedError(
                f"{op}: {num_ranks} ranks of {length} rows of {name} have positions past "
                f"{MOST_POSITIONS}, which int32 does not hold; use fewer ranks or rows"
            )
    return layout


def check_exchange(
    op: str, query: Any, key: Any, axes: tuple[Any, ...], ring: tuple[Any, ...], layout: Any
) -> None:
    """Raises unless the ranks of some axes can share the heads, and a ring may lie between."""
    size, heads, kv_heads = checks.bound_size(axes), query.shape[2], key.shape[2]
    if heads % size:
        raise ValueError(
            f"{op}: the heads of query, {heads} of shape {query.shape}, must be divisible by the "
            f"{size} ranks of axis {axes}; cut the sequence over fewer, with ring_axis_name for "
            "the others, or use ring_attention"
        )
    if kv_heads % size and size % kv_heads:
        raise ValueError(
            f"{op}: the heads of key and value, {kv_heads} of shape {key.shape}, must be divisible "
            f"by the {size} ranks of axis {axes}, or divide them; repeat them to "
            f"{math.lcm(kv_heads, size)}, or use ring_attention"
        )
    both = [axis for axis in axes if axis in ring]
    if both:
        raise ValueError(
            f"{op}: axis_name {axes} and ring_axis_name {ring} share {both}; heads are exchanged "
            "over one axis, and keys go round another"
        )
    _check_known(op, layout)
    if layout != LAYOUTS[0] and not ring:
        raise ValueError(
            f"{op}: layout={layout!r} is that of a ring, and there is no ring_axis_name; each rank "
            f"has all rows of its heads, the same work in the layout {LAYOUTS[0]!r}"
        )


def check_pieces(op: str, x: Any, num_ranks: Any, axis: Any) -> tuple[int, int]:
    """The dimension that is to be cut in two pieces a rank, and the pieces."""
    product_checks.check_operand(op, "x", x)
    try:
        count = operator.index(num_ranks)
    except TypeError:
        raise TypeError(f"{op}: num_ranks must be an int, got {num_ranks!r}") from None
    if count < 1:
        raise ValueError(f"{op}: num_ranks must be 1 or more, got {count}")
    index = checks.check_dimension(op, "axis", axis, x.ndim)
    if x.shape[index] % (2 * count):
        length = x.shape[index]
        raise ValueError(
            f"{op}: axis={axis} of shape {x.shape} has size {length}, which must be divisible by "
            f"{2 * count}, two pieces for each of {count} ranks; pad it to "
            f"{length + -length % (2 * count)}"
        )
    return index, 2 * count


def _window(op: str, size: Any) -> tuple[int | None, int | None]:
    if size is None:
        return None, None
    sides = tuple(size) if isinstance(size, (tuple, list)) else (size, size)
    try:
        left, right = (operator.index(side) for side in sides)
    except (TypeError, ValueError):
        raise TypeError(
            f"{op}: local_window_size must be an int, a pair (left, right) of ints or None, got "
            f"{size!r}"
        ) from None
    if min(left, right) < 0:
        raise ValueError(
            f"{op}: local_window_size={size!r} must not be negative; a query at position i sees "
            "the keys at i - left to i + right, so 0 is its own position alone"
        )
    return min(left, MOST_POSITIONS), min(right, MOST_POSITIONS)


def _number(op: str, name: str, value: Any, remedy: str) -> float:
    """A number as a float; what is traced, and so no part of the program, is none."""
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(value, (np.ndarray, np.generic, jax.Array)) and not isinstance(value, Tracer):
        kinds = (jnp.integer, jnp.floating)
        real = value.shape == () and any(jnp.issubdtype(value.dtype, kind) for kind in kinds)
    if not real:
        raise TypeError(
            f"{op}: {name} must be a number that is known here, got {value!r}; {remedy}"
        )
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _list(shapes: list[tuple[int, ...]]) -> str:
    return f"{shapes[0]}, {shapes[1]} and {shapes[2]}"

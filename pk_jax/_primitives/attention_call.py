"""The custom calls of attention and of its backward, on the operands of the primitives.

The kernels take heads of a few sizes, so that smaller ones are filled up with zeros, which change
no logit and whose results are cut off. A tile of them is BOUND rows; of each such piece they are
told the least and the largest segment id, by which tiles that cannot meet are passed over.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pk_jax import _selection
from pk_jax._reference.attention import Places, Spec

# Sizes of heads, (D, Dv), from the smallest on: the first that holds both sizes of a call is meant.
HEADS = ((64, 64), (128, 128), (192, 128), (256, 256))
BACKWARD_HEADS = HEADS[:2]

# Rows that share their least and their largest segment id; rows of the backward's statistics are
# filled up to a multiple.
BOUND = 64

# The kernels number rows of the batch, and pieces of all heads, in 32 bits with room.
MOST_ROWS = MOST_PIECES = 2**30 - 1

# Least and most. A larger scale makes logits of so many digits that exponentials of what fp32
# leaves of them are far from 1 where they should be; a larger cap has no digits left in the
# kernels' tanh, which has 7 of them, and under a smaller one what is hidden by -1e15 caps would be
# seen.
SCALES = (1e-10, 1e3)
CAPS = (1e-6, 1e4)

LOG2_E = math.log2(math.e)


def heads_of(sizes: tuple[tuple[int, int], ...], width: int, value_width: int) -> Any:
    """The smallest heads of a kernel that hold heads of these sizes; None if none do."""
    return next((pair for pair in sizes if width <= pair[0] and value_width <= pair[1]), None)


def why_not(
    query: Any, key: Any, value: Any, places: Places, *, spec: Spec, dtype: Any
) -> str | None:
    """Why the kernel cannot take these types and this attention; None if it can.

    The precision of the products makes no difference: those of halves are exact in fp32, and
    weights are rounded to the values' dtype at any precision.
    """
    return _why_not(_selection.ATTENTION[0], HEADS, (query, key, value), places, spec, dtype)


def why_not_backward(
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    of_out: Any,
    of_lse: Any,
    places: Places,
    *,
    spec: Spec,
    dtype: Any,
) -> str | None:
    """The same of the backward."""
    op = _selection.ATTENTION_BACKWARD
    if of_out.dtype != query.dtype:
        return (
            f"a cotangent in {of_out.dtype} of operands in {query.dtype} has no CUDA {op}; the "
            "kernel takes one dtype"
        )
    return _why_not(op, BACKWARD_HEADS, (query, key, value), places, spec, dtype)


def _why_not(
    op: str,
    sizes: tuple[tuple[int, int], ...],
    operands: tuple[Any, Any, Any],
    places: Places,
    spec: Spec,
    dtype: Any,
) -> str | None:
    query, key, value = operands
    if not all(isinstance(size, int) for x in operands for size in x.shape):
        return f"the kernels of {op} are for sizes that are known; these are symbols, of jax.export"
    reason = _selection.why_not_dtype(query.dtype, op)
    if reason is not None:
        return reason
    if dtype not in (query.dtype, np.float32):
        return (
            f"{query.dtype} to {dtype} has no CUDA {op}; its results are in the operands' dtype or "
            "in float32"
        )
    widths = query.shape[3], value.shape[3]
    if heads_of(sizes, *widths) is None:
        return f"heads of sizes {widths} have no CUDA {op}; the kernels hold {sizes[-1]} at most"
    reason = _why_not_numbers(spec)
    if reason is not None:
        return reason
    ids = places.query_segments
    if ids is not None and ids.dtype.itemsize > 4:
        return f"segment ids in {ids.dtype} do not fit 32 bits; convert them to int32"
    longest = max(query.shape[1], key.shape[1])
    if longest * query.shape[0] > MOST_ROWS:
        batch = query.shape[0]
        return f"{batch} times {longest} rows; the kernels count to {MOST_ROWS} in all the batch"
    pieces = query.shape[0] * query.shape[2] * num_pieces(longest)
    if pieces > MOST_PIECES:
        return (
            f"{pieces} pieces of {BOUND} rows in all heads of the batch; the kernels count to "
            f"{MOST_PIECES}"
        )
    return None


def _why_not_numbers(spec: Spec) -> str | None:
    if spec.scale <= 0:
        return f"the kernels take a scale above 0, got {spec.scale}; negate the query instead"
    for name, number, (least, most) in (
        ("a scale", spec.scale, SCALES),
        ("a cap", spec.soft_cap, CAPS),
    ):
        if number is not None and not least <= number <= most:
            return (
                f"the kernels take {name} of {least} to {most}, got {number}, for the digits that "
                "fp32 has"
            )
    return None


def num_pieces(length: int) -> int:
    return -(-length // BOUND)


def forward(
    query: Any,
    key: Any,
    value: Any,
    places: Places,
    *,
    spec: Spec,
    dtype: Any,
    num_sms: int,
) -> tuple[Any, Any]:
    """`_reference.attention.attention` by the kernel, on so many SMs."""
    heads = heads_of(HEADS, query.shape[3], value.shape[3])
    arrays, attributes = _places(places, query, key, spec)
    rows = query.shape[:3]
    results = (
        jax.ShapeDtypeStruct((*rows, heads[1]), dtype),
        jax.ShapeDtypeStruct(rows, np.float32),
        jax.ShapeDtypeStruct((1,), np.uint32),  # scratch: blocks take their tiles by tickets
    )
    out, lse, _ = jax.ffi.ffi_call("pk_jax_attention", results)(
        *_padded(heads, query, key, value),
        *arrays,
        **attributes,
        num_blocks=np.int64(num_sms),
    )
    return out[..., : value.shape[3]], lse


def backward(
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    of_out: Any,
    of_lse: Any,
    places: Places,
    *,
    spec: Spec,
    dtype: Any,
    num_sms: int,
) -> tuple[Any, Any, Any]:
    """`_reference.attention.backward` by the kernel, on so many SMs.

    It adds to the cotangent of the query in fp32, in an order that blocks keep by taking `turns`.
    """
    width, value_width = query.shape[3], value.shape[3]
    heads = heads_of(BACKWARD_HEADS, width, value_width)
    arrays, attributes = _places(places, query, key, spec)
    batch, length, num_heads, _ = query.shape
    if _sees_nothing_somewhere(spec, places, length, key.shape[1]):
        # A weight of 0 is no help against what comes back there, which may be infinite.
        empty = lse == -jnp.inf
        of_lse = jnp.where(empty, 0, of_lse)
        of_out = jnp.where(empty[..., None], 0, of_out)
    lse, origin = statistics(out, lse, of_out, of_lse)
    query, key, value = _padded(heads, query, key, value)
    (of_out,) = _padded(heads[1:], of_out)
    results = (
        jax.ShapeDtypeStruct(query.shape, np.float32),
        jax.ShapeDtypeStruct(key.shape, dtype),
        jax.ShapeDtypeStruct(value.shape, dtype),
        # Scratch: who adds next to each piece of the first, and tickets for tiles.
        jax.ShapeDtypeStruct((batch * num_heads * num_pieces(length) + 1,), np.uint32),
    )
    to_query, to_key, to_value, _ = jax.ffi.ffi_call("pk_jax_attention_backward", results)(
        query, key, value, of_out, lse, origin, *arrays, **attributes, num_blocks=np.int64(num_sms)
    )
    return (
        to_query[..., :width].astype(dtype),
        to_key[..., :width],
        to_value[..., :value_width],
    )


def statistics(out: Any, lse: Any, of_out: Any, of_lse: Any) -> tuple[Any, Any]:
    """What the backward reads of each row, [B, N, T] filled up to whole pieces.

    Returns:
        The log-sum-exp in powers of 2, infinite where a row has no weights, so that they are 0; and
        ``sum(of_out * out) - of_lse``, from which the cotangent of a weight counts.
    """
    origin = jnp.sum(of_out.astype(np.float32) * out.astype(np.float32), -1) - of_lse
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse * np.float32(LOG2_E))
    missing = [(0, 0), (0, 0), (0, -lse.shape[1] % BOUND)]
    lse, origin = (jnp.moveaxis(x, 1, 2) for x in (lse, origin))
    return jnp.pad(lse, missing, constant_values=jnp.inf), jnp.pad(origin, missing)


def _sees_nothing_somewhere(spec: Spec, places: Places, rows: int, keys: int) -> bool:
    """Whether a row may see no key: of keys from position 0 on it always sees the first ones."""
    if places.query_segments is not None or places.query_starts is not None:
        return True
    return spec.left is not None and rows - 1 - spec.left > keys - 1


def _padded(sizes: Any, *arrays: Any) -> list[Any]:
    """Arrays with heads of these sizes, the last of which is that of the last array."""
    of_each = (*(sizes[0] for _ in arrays[1:]), sizes[-1])
    return [
        jnp.pad(x, [(0, 0)] * 3 + [(0, size - x.shape[3])]) if size > x.shape[3] else x
        for x, size in zip(arrays, of_each, strict=True)
    ]


def _places(
    places: Places, query: Any, key: Any, spec: Spec
) -> tuple[list[Any], dict[str, np.generic]]:
    """The further operands of a call that say where rows are, and the attributes of both calls."""
    arrays = []
    limits = [spec.left, spec.right]
    begins = (places.query_starts, places.key_starts)
    starts = spec.by_position and any(x is not None for x in begins)
    if starts:
        arrays += [_starts(*each) for each in zip(begins, (query, key), strict=True)]
    else:
        # From position 0 on, what reaches as far as the other array is no limit.
        farthest = (query.shape[1] - 1, key.shape[1] - 1)
        limits = [None if x is None or x >= y else x for x, y in zip(limits, farthest, strict=True)]
    segments = places.query_segments is not None
    if segments:
        ids = [_as_int32(x) for x in (places.query_segments, places.key_segments)]
        arrays += [*ids, *map(bounds, ids)]
    left, right = (-1 if limit is None else limit for limit in limits)
    return arrays, {
        "scale": np.float32(spec.scale),
        "soft_cap": np.float32(spec.soft_cap or 0.0),
        "left": np.int64(left),
        "right": np.int64(right),
        "starts": np.bool_(starts),
        "segments": np.bool_(segments),
    }


def _starts(starts: Any, x: Any) -> Any:
    """Where the halves of an array begin, [B, 2]."""
    if starts is None:
        starts = np.array([[0, x.shape[1] // 2]])
    return jnp.broadcast_to(jnp.asarray(starts, np.int32), (x.shape[0], 2))


def _as_int32(ids: Any) -> Any:
    """Ids as different as they were."""
    if ids.dtype == np.uint32:
        return lax.bitcast_convert_type(ids, np.int32)
    return ids.astype(np.int32)


def bounds(ids: Any) -> Any:
    """The least and the largest of each piece of the ids of rows, [B, pieces, 2]."""
    batch, length = ids.shape
    # The last piece may be short; one of its own ids more is no other bound.
    ids = jnp.pad(ids, [(0, 0), (0, -length % BOUND)], mode="edge")
    pieces = ids.reshape(batch, num_pieces(length), BOUND)
    return jnp.stack([pieces.min(2), pieces.max(2)], -1)

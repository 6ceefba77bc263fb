"""Attention in jax.lax: the softmax over keys, block by block, with its tangent and its cotangent.

Logits are ``scale * query . key``, then capped to ``cap * tanh(logit / cap)``, then masked: a mask
on capped logits is what FlashAttention has too, and one that is applied before would be capped.
They, the weights and all sums are in fp32 (float64 of float64); weights are rounded to the values'
dtype for the product with them, as on tensor cores.

Keys are taken a block at a time with a running maximum and sum (Milakov & Gimelshein,
arXiv:1805.02867), and given the log-sum-exp the weights of a block are ``exp(logit - lse)`` by
themselves (FlashAttention, arXiv:2205.14135). So no array is [T, S]; up to BLOCK keys are one
block, which is the softmax as it is written down. With the lse of all keys `tangent` and `backward`
of parts of the keys are parts of a sum, and `merge` makes one result of two: a ring needs no more.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pk_jax import _compat

# Keys taken at a time.
BLOCK = 512


class Spec(NamedTuple):
    """What is known of an attention before its arrays are.

    Attributes:
        scale: of the logits.
        soft_cap: bound of the logits; None for none.
        left: a query sees so many keys before its own position; None for all.
        right: and so many after it. 0 is causal attention.
        precision: of the products, as in lax.dot_general.
    """

    scale: float
    soft_cap: float | None = None
    left: int | None = None
    right: int | None = None
    precision: Any = None

    @property
    def by_position(self) -> bool:
        return self.left is not None or self.right is not None


class Places(NamedTuple):
    """Where rows stand in the whole sequence, and to what part of it they belong.

    Attributes:
        query_starts: [B, 2], positions at which the two halves of the rows begin, the first of
            T // 2 rows; None if they begin at 0. Two, since a rank of a zigzag ring has two pieces.
        key_starts: the same of the keys.
        query_segments: [B, T]; None if there is one segment.
        key_segments: [B, S].
    """

    query_starts: Any = None
    key_starts: Any = None
    query_segments: Any = None
    key_segments: Any = None


def starts(layout: str, rank: Any, length: int, num_ranks: int) -> tuple[Any, Any]:
    """The positions at which the halves of a rank's rows begin, for a known or a traced rank."""
    half = length // 2
    if layout == "zigzag":
        return rank * half, (2 * num_ranks - 1 - rank) * half
    return rank * length, rank * length + half


def positions(starts: Any, length: int) -> Any:
    """[B, length] (or [1, length]) positions of rows that begin at `starts`."""
    rows = lax.iota(np.int32, length)[None]
    if starts is None:
        return rows
    half = length // 2
    return jnp.where(rows < half, starts[:, :1] + rows, starts[:, 1:] + (rows - half))


def visible(spec: Spec, places: Places, query_positions: Any, key_positions: Any) -> Any:
    """Which keys a query sees, [B, 1, 1, T, S]; None if it is all of them.

    Args:
        spec: the window.
        places: the segments.
        query_positions: [B, T], B may be 1.
        key_positions: [B, S].
    """
    seen = None
    if spec.by_position:
        before = query_positions[:, :, None] - key_positions[:, None, :]
        if spec.left is not None:
            seen = before <= spec.left
        if spec.right is not None:
            near = before >= -spec.right
            seen = near if seen is None else seen & near
    if places.query_segments is not None:
        same = places.query_segments[:, :, None] == places.key_segments[:, None, :]
        seen = same if seen is None else seen & same
    return None if seen is None else seen[:, None, None]


def sees(spec: Spec, query: tuple[tuple[int, int], int], key: tuple[tuple[int, int], int]) -> bool:
    """Whether any of some rows is near enough to any of some keys: `visible` of known positions.

    Args:
        spec: the window.
        query: the starts of the halves, and the number of rows.
        key: the same of the keys.
    """
    for query_first, query_last in _spans(*query):
        for key_first, key_last in _spans(*key):
            # All differences between the nearest and the farthest occur.
            near = spec.left is None or query_first - key_last <= spec.left
            if near and (spec.right is None or key_first - query_last <= spec.right):
                return True
    return False


def _spans(starts: tuple[int, int], length: int) -> list[tuple[int, int]]:
    """First and last position of each half that has rows."""
    halves = zip(starts, (length // 2, length - length // 2), strict=True)
    return [(first, first + size - 1) for first, size in halves if size]


def accumulator(dtype: Any) -> Any:
    """The dtype of logits, sums and the log-sum-exp."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


# The op and its two derivatives. Heads of the query are [K, G]: G of them share one of the keys.


def attention(
    query: Any, key: Any, value: Any, places: Places, *, spec: Spec, dtype: Any
) -> tuple[Any, Any]:
    """The result [B, T, N, Dv] in `dtype`, and its log-sum-exp [B, T, N].

    Not meant to be differentiated: `tangent` is its derivative.
    """
    rows = _Rows(query, key, value, places, spec)
    batch, length, heads, groups, _ = rows.query.shape

    def step(carry: Any, part: Any) -> Any:
        top, total, out = carry
        logits, _, seen = rows.logits(part)
        if seen is not None:
            logits = jnp.where(seen, logits, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(logits, -1, initial=-jnp.inf))
        # Where nothing was seen yet there is no maximum to subtract.
        shift = jnp.where(new_top == -jnp.inf, 0, new_top)
        weights, kept = jnp.exp(logits - shift[..., None]), jnp.exp(top - shift)
        total = total * kept + jnp.sum(weights, -1)
        out = out * _rowwise(kept) + rows.weigh(weights, part["value"])
        return (new_top, total, out), None

    shape = (batch, heads, groups, length)
    carry = (
        jnp.full(shape, -jnp.inf, rows.dtype),
        jnp.zeros(shape, rows.dtype),
        jnp.zeros((batch, length, heads, groups, value.shape[3]), rows.dtype),
    )
    (top, total, out), _ = rows.over_keys(step, carry)
    total = jnp.where(total == 0, 1, total)
    lse = top + jnp.log(total)
    return rows.merged(out / _rowwise(total)).astype(dtype), rows.merged(jnp.moveaxis(lse, 3, 1))


def tangent(
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    to_query: Any,
    to_key: Any,
    to_value: Any,
    places: Places,
    *,
    spec: Spec,
    dtype: Any,
) -> tuple[Any, Any]:
    """The tangents of `attention` to those of query, key and value, of which it is linear.

    ``out`` and ``lse`` are those of the row over all its keys, also where these are a part.
    """
    rows = _Rows(query, key, value, places, spec)
    lse = rows.of_rows(lse)
    to_query = rows.split(to_query)

    def step(carry: Any, part: Any) -> Any:
        to_out, to_lse = carry
        logits, slope, seen = rows.logits(part)
        weights = _weights(logits, seen, lse)
        change = rows.dot("btkgd,bskd->bkgts", to_query, part["key"])
        change += rows.dot("btkgd,bskd->bkgts", rows.query, part["to_key"])
        change = weights * slope(change)
        to_out += rows.weigh(change, part["value"]) + rows.weigh(weights, part["to_value"])
        return (to_out, to_lse + jnp.sum(change, -1)), None

    shape = rows.split(out).shape
    carry = jnp.zeros(shape, rows.dtype), jnp.zeros(lse.shape, rows.dtype)
    # The step again where it is differentiated: its residuals would be [T, S] in all.
    step = jax.checkpoint(step, prevent_cse=False)
    (to_out, to_lse), _ = rows.over_keys(step, carry, to_key=to_key, to_value=to_value)
    to_out -= _rowwise(to_lse) * rows.split(out).astype(rows.dtype)
    return rows.merged(to_out).astype(dtype), rows.merged(jnp.moveaxis(to_lse, 3, 1))


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
) -> tuple[Any, Any, Any]:
    """The cotangents of query, key and value to those of ``out`` and ``lse``: tangent's transpose.

    The cotangent of a weight counts from that of its row's sum, ``sum(of_out * out) - of_lse``.
    """
    rows = _Rows(query, key, value, places, spec)
    lse, of_lse = rows.of_rows(lse), rows.of_rows(of_lse)
    # What comes back to a row that saw nothing may be infinite, having met its log-sum-exp.
    empty = lse == -jnp.inf
    of_lse = jnp.where(empty, 0, of_lse)
    of_out = jnp.where(_rowwise(empty), 0, rows.split(of_out))
    wide = (of_out.astype(rows.dtype), rows.split(out).astype(rows.dtype))
    origin = of_lse - jnp.moveaxis(jnp.sum(wide[0] * wide[1], -1), 1, 3)

    def step(of_query: Any, part: Any) -> Any:
        logits, slope, seen = rows.logits(part)
        weights = _weights(logits, seen, lse)
        change = rows.dot("btkgd,bskd->bkgts", of_out, part["value"]) + origin[..., None]
        change = slope(weights * change)
        of_query += rows.weigh(change, part["key"])
        return of_query, (
            rows.dot("bkgts,btkgd->bskd", change.astype(query.dtype), rows.query),
            rows.dot("bkgts,btkgd->bskd", weights.astype(of_out.dtype), of_out),
        )

    step = jax.checkpoint(step, prevent_cse=False)
    carry = jnp.zeros(rows.query.shape, rows.dtype)
    of_query, (of_key, of_value) = rows.over_keys(step, carry)
    return rows.merged(of_query).astype(dtype), of_key.astype(dtype), of_value.astype(dtype)


def merge(out: Any, lse: Any, other_out: Any, other_lse: Any) -> tuple[Any, Any]:
    """The result over two sets of keys from those over each; either may have seen nothing."""
    both = jnp.logaddexp(lse, other_lse)
    shift = jnp.where(both == -jnp.inf, 0, both)
    parts = ((out, lse), (other_out, other_lse))
    return sum(jnp.exp(each - shift)[..., None] * part for part, each in parts), both


class _Rows:
    """The rows of the query, and how they meet a block of keys."""

    def __init__(self, query: Any, key: Any, value: Any, places: Places, spec: Spec):
        self.dtype = accumulator(query.dtype)
        self.heads, self.spec, self.places = key.shape[2], spec, places
        self.query, self.key, self.value = self.split(query), key, value
        self.positions = positions(places.query_starts, query.shape[1])

    def split(self, x: Any) -> Any:
        """[B, T, N, ...] as [B, T, K, G, ...]."""
        groups = x.shape[2] // self.heads
        return x.reshape(*x.shape[:2], self.heads, groups, *x.shape[3:])

    def merged(self, x: Any) -> Any:
        """[B, T, K, G, ...] as [B, T, N, ...]."""
        return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], *x.shape[4:])

    def of_rows(self, lse: Any) -> Any:
        """[B, T, N] as [B, K, G, T]."""
        return jnp.moveaxis(self.split(lse), 1, 3)

    def dot(self, subscripts: str, a: Any, b: Any) -> Any:
        """A product in fp32, exact in its factors."""
        if a.dtype != b.dtype:
            a, b = a.astype(self.dtype), b.astype(self.dtype)
        precision = self.spec.precision
        return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=self.dtype)

    def weigh(self, weights: Any, x: Any) -> Any:
        """The sum of a block's [B, S, K, D] by weights: [B, T, K, G, D]."""
        return self.dot("bkgts,bskd->btkgd", weights.astype(x.dtype), x)

    def logits(self, part: Any) -> tuple[Any, Any, Any]:
        """The logits with a block of keys, what they make of a tangent of q . k, and the mask."""
        logits = self.dot("btkgd,bskd->bkgts", self.query, part["key"]) * self.spec.scale
        places = self.places._replace(key_segments=part.get("segments"))
        seen = visible(self.spec, places, self.positions, part["positions"])
        cap = self.spec.soft_cap
        if cap is None:
            return logits, lambda change: change * self.spec.scale, seen
        bent = jnp.tanh(logits / cap)
        slope = (1 - bent * bent) * self.spec.scale
        return bent * cap, lambda change: change * slope, seen

    def over_keys(self, step: Any, carry: Any, **more: Any) -> tuple[Any, Any]:
        """lax.scan of a step over blocks of keys, whose results lie along the keys as these do.

        The keys that are left over are a block of their own.
        """
        length = self.key.shape[1]
        parts = {"key": self.key, "value": self.value, **more}
        parts["positions"] = positions(self.places.key_starts, length)
        if self.places.key_segments is not None:
            parts["segments"] = self.places.key_segments
        if length <= BLOCK:
            return step(carry, parts)
        count = length // BLOCK
        whole = jax.tree.map(lambda x: _in_blocks(x[:, : count * BLOCK], count), parts)
        # A loop carries one type, and what it adds up varies over mesh axes where the operands do.
        carry = jax.tree.map(lambda x: _compat.vary_alike((), x, self.query)[0], carry)
        carry, results = lax.scan(step, carry, whole)
        results = jax.tree.map(_joined, results)
        if length % BLOCK:
            carry, rest = step(carry, jax.tree.map(lambda x: x[:, count * BLOCK :], parts))
            results = jax.tree.map(lambda *xs: jnp.concatenate(xs, 1), results, rest)
        return carry, results


def _in_blocks(x: Any, count: int) -> Any:
    """[B, S, ...] as [count, B, S / count, ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0], count, BLOCK, *x.shape[2:]), 1, 0)


def _joined(x: Any) -> Any:
    """[count, B, S / count, ...] as [B, S, ...]."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], math.prod(x.shape[1:3]), *x.shape[3:])


def _rowwise(x: Any) -> Any:
    """[B, K, G, T] as [B, T, K, G, 1]."""
    return jnp.moveaxis(x, 3, 1)[..., None]


def _weights(logits: Any, seen: Any, lse: Any) -> Any:
    """The weights of keys in rows whose log-sum-exp is known; 0, with its derivative, if unseen.

    So where that is -inf, too, as nothing is seen there.
    """
    logits = logits - lse[..., None]
    return jnp.exp(logits if seen is None else jnp.where(seen, logits, -jnp.inf))

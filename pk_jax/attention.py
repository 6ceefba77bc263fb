"""Attention on one device, and over sequences that are cut along a mesh axis.

`query` is [B, T, N, D], `key` [B, S, K, D] and `value` [B, S, K, Dv], as in
``jax.nn.dot_product_attention``: of N heads of the query each N / K that follow one another share
one of the keys'.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pk_jax import config as _config
from pk_jax._primitives import attention as _attention
from pk_jax._primitives import attention_checks, checks
from pk_jax._primitives import ring_attention as _ring_attention
from pk_jax._primitives import ulysses as _ulysses
from pk_jax.config import Config


def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    query_segment_ids: Any = None,
    key_value_segment_ids: Any = None,
    logits_soft_cap: float | None = None,
    return_residual: bool = False,
    implementation: str | None = None,
    config: Config | None = None,
) -> Any:
    """Attention on one device's arrays, ``softmax(scale * query @ key.T) @ value`` for each head.

    Logits, weights and sums are in fp32 and the result is rounded once. Keys are taken a block at
    a time with a running softmax (FlashAttention, Dao et al., arXiv:2205.14135; Milakov and
    Gimelshein, arXiv:1805.02867), so that no array is [T, S]. A row that sees no key is 0, its
    residual is -inf and its gradients are 0.

    On a Hopper GPU it is one kernel, for float16 and bfloat16, a positive scale and heads of up to
    256 elements, and its backward pass another, for heads of up to 128; both pass over blocks of
    keys that no row of a block sees. All else is ``jax.lax``; what they take in full is in
    docs/attention.md. Same inputs give the same bits.

    The backward pass keeps query, key, value, the result and the residual, and makes the weights
    again. The residual has a gradient, unlike that of ``jax.nn``. There are derivatives of every
    order, and every ``jax.vmap``: over the query alone it is more heads, else a larger batch.

    Args:
        query: [B, T, N, D], float16, bfloat16, float32 or float64.
        key: [B, S, K, D] of the same dtype; N must be a multiple of K.
        value: [B, S, K, Dv] of the same dtype.
        scale: a number that the logits are multiplied by; None is 1 / sqrt(D).
        is_causal: the query at position i sees keys at 0 to i, also where T and S differ.
        local_window_size: (left, right), the query at position i sees keys at i - left to
            i + right; an int is both. Together with `is_causal` a key must be seen by both.
        query_segment_ids: integers [B, T]; a query sees the keys of its own id alone.
        key_value_segment_ids: integers [B, S] of the same dtype.
        logits_soft_cap: logits become ``cap * tanh(logits / cap)``, after the scale and before the
            mask.
        return_residual: also return the log-sum-exp of the logits that each row sees.
        implementation: None is the kernel where it can be, "cuda" raises the reason if it cannot,
            "reference" is ``jax.lax``. With the first two, derivatives take a kernel where there is
            one.
        config: has no knobs yet.

    Returns:
        [B, T, N, Dv] in the query's dtype; with return_residual a pair with the residual [B, T, N]
        in float32 (float64 of float64).

    Raises:
        TypeError: an operand is not an array, or dtypes differ or are not among these.
        ValueError: shapes that do not fit, a negative window, segment ids on one side alone, a cap
            that is not positive, or a knob.
        NotImplementedError: arrays whose types name mesh axes; with implementation="cuda", what
            the kernel does not take.

    Two documents in a row of eight tokens, neither of which sees the other::

        >>> ids = jnp.array([[0, 0, 0, 1, 1, 1, 1, 1]])
        >>> x = jnp.ones((1, 8, 4, 16))
        >>> segments = {"query_segment_ids": ids, "key_value_segment_ids": ids}
        >>> y, lse = pk.attention(x, x, x, is_causal=True, **segments, return_residual=True)
        >>> y.shape, jnp.exp(lse - 4)[0, 2:5, 0].round().tolist()  # each logit is 4
        ((1, 8, 4, 16), [3.0, 1.0, 2.0])
    """
    op = "attention"
    return_residual = checks.check_flag(op, "return_residual", return_residual)
    asked = _Asked(op, scale, is_causal, local_window_size, logits_soft_cap, implementation, config)
    arrays, spec, places = asked.of(query, key, value, query_segment_ids, key_value_segment_ids)
    outs = _attention.attention(*arrays, places, spec=spec, **asked.how)
    return tuple(outs) if return_residual else outs[0]


def ring_attention(
    query: Any,
    key: Any,
    value: Any,
    axis_name: Any,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    query_segment_ids: Any = None,
    key_value_segment_ids: Any = None,
    logits_soft_cap: float | None = None,
    return_residual: bool = False,
    layout: str = "contiguous",
    implementation: str | None = None,
    config: Config | None = None,
) -> Any:
    """Attention over a sequence that is cut along a mesh axis; keys and values go round the ranks.

    Equals :func:`attention` on the gathered arrays, of which each rank has its part: in n - 1 hops
    it meets the keys and values of all others, and merges what they give in fp32 by their
    log-sum-exps (Ring Attention, Liu et al., arXiv:2310.01889). A hop whose keys no rank sees is
    not made, as most are not under a short window; a rank that sees none of a hop's keys computes
    nothing in it, or by the kernel passes over them. No array is larger than a rank's part, but for
    the logits of some keys.

    Under a causal mask and the contiguous layout the last rank has n times the work of the first.
    "zigzag" gives all the same: rank r has piece r and piece 2n - 1 - r of 2n, as is the practice
    in training on long sequences (ring-flash-attention; Llama 3, arXiv:2407.21783).
    :func:`zigzag` reorders an array, and all that goes with its rows (ids, rotary positions,
    targets) the same way.

    The gradient is one more way round, with the cotangents of keys and values in fp32 beside them
    and home in the last hop; it keeps the operands, the result and the residual. All sums are in
    an order that is fixed for each rank.

    Args:
        query: [B, T, N, D], this rank's part, T the same on all ranks. Lengths that differ between
            ranks cannot be seen here, and are an error of ``jax.shard_map`` at the latest.
        key: [B, S, K, D], this rank's part. S may differ from T.
        value: [B, S, K, Dv].
        axis_name: the mesh axis or axes of the sequence, several in the order of the mesh's.
        scale: as in :func:`attention`.
        is_causal: by the positions in the whole sequence, in both layouts.
        local_window_size: by these positions, too.
        query_segment_ids: [B, T], this rank's.
        key_value_segment_ids: [B, S], this rank's; they go round with the keys.
        logits_soft_cap: as in :func:`attention`.
        return_residual: also return the log-sum-exp over all keys.
        layout: "contiguous", rank r has rows r * T to (r + 1) * T - 1; or "zigzag".
        implementation: None composes the ring of ``pk.ppermute`` and :func:`attention` on each
            device, "reference" of ``jax.lax``; "cuda" raises NotImplementedError, as there is no
            one kernel for it.
        config: the knobs of ``pk.ppermute``.

    Returns:
        [B, T, N, Dv] in the query's dtype; with return_residual a pair with the residual [B, T, N].

    Raises:
        TypeError: as in :func:`attention`.
        ValueError: as in :func:`attention`; a layout that there is not, or an odd T or S that
            cannot be two pieces of one size.
        NotImplementedError: arrays whose types name mesh axes; positions past 32 bits.

    Four GPUs, a causal language model, balanced::

        >>> @jax.shard_map(mesh=mesh, in_specs=P(None, "sp"), out_specs=P(None, "sp"))
        ... def f(q, k, v):                                       # each rank's two pieces
        ...     return pk.ring_attention(q, k, v, "sp", is_causal=True, layout="zigzag")
        >>> y = pk.unzigzag(f(*(pk.zigzag(x, 4) for x in (q, k, v))), 4)
    """
    op = "ring_attention"
    return_residual = checks.check_flag(op, "return_residual", return_residual)
    asked = _Asked(op, scale, is_causal, local_window_size, logits_soft_cap, implementation, config)
    axes = checks.check_axes(op, axis_name)
    arrays, spec, places = asked.of(query, key, value, query_segment_ids, key_value_segment_ids)
    outs = _ring(op, *arrays, places, axes, spec, layout, **asked.how)
    return tuple(outs) if return_residual else outs[0]


def ulysses_attention(
    query: Any,
    key: Any,
    value: Any,
    axis_name: Any,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    query_segment_ids: Any = None,
    key_value_segment_ids: Any = None,
    logits_soft_cap: float | None = None,
    return_residual: bool = False,
    ring_axis_name: Any = None,
    layout: str = "contiguous",
    implementation: str | None = None,
    config: Config | None = None,
) -> Any:
    """Attention over a sequence that is cut along a mesh axis, each rank taking some of the heads.

    Equals :func:`attention` on the gathered arrays: an all_to_all gives each rank all rows of its
    N / n heads, and after attention another gives all heads of its rows back (DeepSpeed-Ulysses,
    Jacobs et al., arXiv:2309.14509). Of K < n heads of the keys each rank needs one, and is sent
    that one: they are repeated n / K times before they are sent, never further. Segment ids are
    gathered.

    With `ring_axis_name` attention goes round a ring of that axis in between, for more ranks than
    there are heads: the sequence is cut along (ring axes, then these), in_specs
    ``P(None, ("ring", "ulysses"))``, and a ring rank's rows are those of its Ulysses ranks.

    Args:
        query: [B, T, N, D], this rank's part; N must be divisible by the n ranks.
        key: [B, S, K, D]; K must be divisible by n, or divide it.
        value: [B, S, K, Dv].
        axis_name: the mesh axis or axes of the sequence, of n ranks.
        scale: as in :func:`attention`.
        is_causal: by the positions in the whole sequence.
        local_window_size: by these positions, too.
        query_segment_ids: [B, T], this rank's.
        key_value_segment_ids: [B, S], this rank's.
        logits_soft_cap: as in :func:`attention`.
        return_residual: also return the log-sum-exp over all keys, of this rank's rows.
        ring_axis_name: the axis or axes of a :func:`ring_attention` between the two exchanges.
        layout: that of the ring, in its ranks; without one "contiguous".
        implementation: None is ``pk.all_to_all`` and :func:`attention` on each device, with the
            kernels that there are; "cuda" raises the reason if one cannot be; "reference" is
            ``jax.lax``.
        config: the knobs of ``pk.all_to_all``; the ring takes those that it has as well.

    Returns:
        [B, T, N, Dv] in the query's dtype; with return_residual a pair with the residual [B, T, N].

    Raises:
        TypeError: as in :func:`attention`.
        ValueError: as in :func:`ring_attention`, or heads that n ranks cannot share.
        NotImplementedError: as in :func:`ring_attention`.

    Four GPUs, eight heads of the query and two of the keys::

        >>> @jax.shard_map(mesh=mesh, in_specs=P(None, "sp"), out_specs=P(None, "sp"))
        ... def f(q, k, v):                   # q: [B, T, 8, D], k and v: [B, T, 2, D]
        ...     return pk.ulysses_attention(q, k, v, "sp", is_causal=True)
    """
    op = "ulysses_attention"
    return_residual = checks.check_flag(op, "return_residual", return_residual)
    asked = _Asked(op, scale, is_causal, local_window_size, logits_soft_cap, implementation, config)
    axes = checks.check_axes(op, axis_name)
    arrays, spec, places = asked.of(query, key, value, query_segment_ids, key_value_segment_ids)
    ring = () if ring_axis_name is None else checks.check_axes(op, ring_axis_name)
    attention_checks.check_exchange(op, *arrays[:2], axes, ring, layout)
    exchange = _ulysses.Exchange(axes, **asked.how)
    query, key, value = map(exchange.rows_of_heads, arrays)
    places = exchange.gathered(places)
    how = asked.parts("ring_attention" if ring else "attention")
    if ring:
        outs = _ring(op, query, key, value, places, ring, spec, layout, **how)
    else:
        outs = _attention.attention(query, key, value, places, spec=spec, **how)
    out, *residual = outs if return_residual else outs[:1]
    out, *residual = map(exchange.heads_of_rows, (out, *residual))
    return (out, *residual) if return_residual else out


def zigzag(x: Any, num_ranks: int, axis: int = 1) -> jax.Array:
    """A global array in the order in which it is cut for ``ring_attention(layout="zigzag")``.

    Of 2n pieces in a row, 0 to 2n - 1, rank r gets pieces r and 2n - 1 - r, so that all ranks have
    as many keys before them under a causal mask. Apply it to all that goes with the rows, positions
    among them: ``zigzag(jnp.arange(length), n, axis=0)``.

    Args:
        x: an array, whole, outside of ``jax.shard_map``.
        num_ranks: n, the ranks of the ring.
        axis: the dimension of the sequence, divisible by 2n.

    Returns:
        x with its pieces in the order 0, 2n - 1, 1, 2n - 2 and so on.

        >>> pk.zigzag(jnp.arange(8), 2, axis=0).tolist()
        [0, 1, 6, 7, 2, 3, 4, 5]
    """
    axis, pieces = attention_checks.check_pieces("zigzag", x, num_ranks, axis)
    return _in_order(x, _zigzag_rows(x.shape[axis], pieces), axis)


def unzigzag(x: Any, num_ranks: int, axis: int = 1) -> jax.Array:
    """The order before :func:`zigzag`, whose arguments it has."""
    axis, pieces = attention_checks.check_pieces("unzigzag", x, num_ranks, axis)
    return _in_order(x, np.argsort(_zigzag_rows(x.shape[axis], pieces)), axis)


def _zigzag_rows(length: int, pieces: int) -> np.ndarray:
    """The rows of a sequence in the order of zigzag."""
    first, second = np.arange(length).reshape(2, pieces // 2, length // pieces)
    return np.stack([first, second[::-1]], 1).reshape(-1)


def _in_order(x: Any, rows: np.ndarray, axis: int) -> jax.Array:
    """The rows of x in an order, lying on devices as x does where its type says so."""
    x = jnp.asarray(x)
    at = x.at[(slice(None),) * axis + (rows,)]
    sharding = jax.typeof(x).sharding
    return at.get(unique_indices=True, mode="promise_in_bounds", out_sharding=sharding)


class _Asked:
    """The arguments that all three functions have, checked."""

    def __init__(
        self,
        op: str,
        scale: Any,
        is_causal: Any,
        window: Any,
        soft_cap: Any,
        implementation: str | None,
        config: Config | None,
    ):
        _config.check_implementation(op, implementation)
        together = implementation != "reference"
        resolved = _config.resolve(op, config, together=together)
        self.op, self.logits = op, (scale, is_causal, window, soft_cap)
        self.how: dict[str, Any] = {"implementation": implementation, "config": resolved}

    def parts(self, op: str) -> dict[str, Any]:
        """How an op runs that is a part of this one."""
        return self.how | {"config": _config.part_of(self.how["config"], op)}

    def of(
        self, query: Any, key: Any, value: Any, query_ids: Any, key_ids: Any
    ) -> tuple[tuple[Any, Any, Any], Any, Any]:
        """The arrays, what is asked of them, and the places of their rows."""
        arrays = attention_checks.arrays_of(self.op, query=query, key=key, value=value)
        places = attention_checks.places_of(self.op, *arrays[:2], query_ids, key_ids)
        return arrays, attention_checks.spec_of(self.op, arrays[0], *self.logits), places


def _ring(
    op: str,
    query: Any,
    key: Any,
    value: Any,
    places: Any,
    axes: tuple[Any, ...],
    spec: Any,
    layout: str,
    **how: Any,
) -> Any:
    attention_checks.check_layout(op, layout, query, key, checks.bound_size(axes))
    if not axes:
        how |= {"config": _config.part_of(how["config"], "attention")}
        return _attention.attention(query, key, value, places, spec=spec, **how)
    return _ring_attention.ring_attention(
        query, key, value, places, axes, spec=spec, layout=layout, **how
    )

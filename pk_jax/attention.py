"""Attention on one device, and over sequences that are cut along a mesh axis.

`query` is [B, T, N, D], `key` [B, S, K, D] and `value` [B, S, K, Dv], as in
``jax.nn.dot_product_attention``: of N heads of the query each N / K that follow one another share
one of the keys'.
"""

from typing import Any

from pk_jax import config as _config
from pk_jax._primitives import attention as _attention
from pk_jax._primitives import attention_checks, checks
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
        implementation: "cuda" raises NotImplementedError, as there is no kernel yet; None and
            "reference" are ``jax.lax``.
        config: has no knobs yet.

    Returns:
        [B, T, N, Dv] in the query's dtype; with return_residual a pair with the residual [B, T, N]
        in float32 (float64 of float64).

    Raises:
        TypeError: an operand is not an array, or dtypes differ or are not among these.
        ValueError: shapes that do not fit, a negative window, segment ids on one side alone, a cap
            that is not positive, or a knob.
        NotImplementedError: arrays whose types name mesh axes.

    Two documents in a row of eight tokens, neither of which sees the other::

        >>> ids = jnp.array([[0, 0, 0, 1, 1, 1, 1, 1]])
        >>> x = jnp.ones((1, 8, 4, 16))
        >>> segments = {"query_segment_ids": ids, "key_value_segment_ids": ids}
        >>> y, lse = pk.attention(x, x, x, is_causal=True, **segments, return_residual=True)
        >>> y.shape, jnp.exp(lse - 4)[0, 2:5, 0].round().tolist()  # each logit is 4
        ((1, 8, 4, 16), [3.0, 1.0, 2.0])
    """
    op = "attention"
    _config.check_implementation(op, implementation)
    resolved = _config.resolve(op, config)
    attention_checks.check_arrays(op, query, key, value)
    out, lse = _attention.attention(
        query,
        key,
        value,
        attention_checks.places_of(op, query, key, query_segment_ids, key_value_segment_ids),
        spec=attention_checks.spec_of(
            op, query, scale, is_causal, local_window_size, logits_soft_cap
        ),
        implementation=implementation,
        config=resolved,
    )
    return (out, lse) if checks.check_flag(op, "return_residual", return_residual) else out

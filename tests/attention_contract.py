"""The custom calls of attention as what they promise, in NumPy, for tests without a GPU.

Written from what the calls are given alone: rows of a tile see a tile of keys only if the bounds of
their segment ids meet, and nothing here knows of heads that were filled up.
"""

import jax
import numpy as np

from pk_jax._primitives import attention_call

PIECE = attention_call.BOUND


class Calls:
    """Stands for jax.ffi.ffi_call, and keeps what it was asked."""

    def __init__(self):
        self.attributes = []

    def ffi_call(self, target, results):
        run = {"pk_jax_attention": _forward, "pk_jax_attention_backward": _backward}[target]

        def call(*operands, **attributes):
            self.attributes.append(attributes)
            wanted = [(each.shape, each.dtype) for each in results]

            def on_host(*operands):
                outs = run(*map(np.asarray, operands), **attributes)
                outs = [x.astype(dtype) for x, (_, dtype) in zip(outs, wanted, strict=True)]
                assert [(x.shape, x.dtype) for x in outs] == wanted
                return tuple(outs)

            return jax.pure_callback(on_host, tuple(results), *operands)

        return call


def _logits(query, key, rest, scale, soft_cap, left, right, starts, segments):
    """Capped logits [B, K, G, T, S], what is seen of them, and what is left of the operands."""
    batch, rows, heads, width = query.shape
    keys, kv_heads = key.shape[1:3]
    rest = list(rest)
    seen = np.ones((batch, rows, keys), bool)
    of_query, of_key = (np.broadcast_to(np.arange(n), (batch, n)) for n in (rows, keys))
    if starts:
        of_query, of_key = (_positions(rest.pop(0), n) for n in (rows, keys))
    before = of_query[:, :, None] - of_key[:, None, :]
    seen &= (left < 0) | (before <= left)
    seen &= (right < 0) | (before >= -right)
    if segments:
        ids, key_ids, bounds, key_bounds = (np.asarray(rest.pop(0)) for _ in range(4))
        assert {x.dtype.name for x in (ids, key_ids, bounds, key_bounds)} == {"int32"}
        seen &= ids[:, :, None] == key_ids[:, None, :]
        meet = bounds[:, :, None, 0] <= key_bounds[:, None, :, 1]
        meet &= key_bounds[:, None, :, 0] <= bounds[:, :, None, 1]
        seen &= np.repeat(np.repeat(meet, PIECE, 1), PIECE, 2)[:, :rows, :keys]
    assert not rest
    query = query.reshape(batch, rows, kv_heads, heads // kv_heads, width).astype(np.float32)
    logits = np.einsum("btkgd,bskd->bkgts", query, key.astype(np.float32)) * scale
    logits = soft_cap * np.tanh(logits / soft_cap) if soft_cap else logits
    return query, logits, seen[:, None, None]


def _positions(starts, rows):
    starts = np.asarray(starts)
    assert starts.dtype == np.int32
    half = rows // 2
    first, second = starts[:, :1] + np.arange(half), starts[:, 1:] + np.arange(rows - half)
    return np.concatenate([first, second], 1)


def _forward(query, key, value, *rest, num_blocks, **attributes):
    _, logits, seen = _logits(query, key, rest, **attributes)
    logits = np.where(seen, logits, -np.inf)
    top = np.max(logits, -1, keepdims=True)
    weights = np.where(seen, np.exp(logits - np.where(top == -np.inf, 0, top)), 0)
    total = np.sum(weights, -1, keepdims=True)
    lse = (top + np.log(np.where(total == 0, 1, total)))[..., 0]
    weights = weights / np.where(total == 0, 1, total)
    out = np.einsum("bkgts,bskd->btkgd", weights, value.astype(np.float32))
    rows = query.shape[:3]
    tickets = np.zeros(1, np.uint32)
    return out.reshape(*rows, value.shape[3]), np.moveaxis(lse, 3, 1).reshape(rows), tickets


def _backward(query, key, value, of_out, lse, origin, *rest, num_blocks, scale, **attributes):
    batch, rows, heads, _ = query.shape
    wide, logits, seen = _logits(query, key, rest, scale, **attributes)
    groups = (batch, key.shape[2], heads // key.shape[2])
    assert lse.shape[2] % PIECE == 0 and np.all(lse[:, :, rows:] == np.inf)
    assert not np.any(origin[:, :, rows:])
    lse, origin = (x[:, :, :rows].reshape(*groups, rows, 1) for x in (lse, origin))
    weights = np.where(seen, np.exp2(logits * np.float32(attention_call.LOG2_E) - lse), 0)
    of_out = of_out.reshape(*wide.shape[:4], -1).astype(np.float32)
    change = np.einsum("btkgd,bskd->bkgts", of_out, value.astype(np.float32)) - origin
    change = weights * change * scale
    cap = attributes["soft_cap"]
    change = change * (1 - (logits / cap) ** 2) if cap else change
    return (
        np.einsum("bkgts,bskd->btkgd", change, key.astype(np.float32)).reshape(query.shape),
        np.einsum("bkgts,btkgd->bskd", change, wide),
        np.einsum("bkgts,btkgd->bskd", weights, of_out),
        np.zeros(query.shape[0] * query.shape[2] * -(-rows // PIECE) + 1, np.uint32),
    )

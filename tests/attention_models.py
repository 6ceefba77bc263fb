"""What the tests of attention share: operands, the op in double precision, and one to derive."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from product_models import reals

import pk_jax as pk


def operands(batch=2, rows=5, keys=7, heads=4, kv_heads=2, width=8, value_width=None, dtype=None):
    """Query, key and value, with logits of some size."""
    dtype = dtype or "float32"
    return (
        reals((batch, rows, heads, width), dtype) * 2,
        reals((batch, keys, kv_heads, width), dtype, seed=1),
        reals((batch, keys, kv_heads, value_width or width), dtype, seed=2),
    )


def ids(batch, length, count=2, seed=0):
    """Segment ids in no order, of which some are on one side alone."""
    return np.random.default_rng(seed).integers(seed, count + seed, (batch, length), np.int32)


def mask(rows, keys, is_causal=False, local_window_size=None, query_ids=None, key_ids=None):
    """[B, T, S], by loops over the definition."""
    batch = 1 if query_ids is None else len(query_ids)
    seen = np.ones((batch, rows, keys), bool)
    size = local_window_size
    left, right = (size, size) if isinstance(size, int) else size or (10**9, 10**9)
    for b, i, j in np.ndindex(seen.shape):
        seen[b, i, j] = i - left <= j <= i + right and not (is_causal and j > i)
        if query_ids is not None:
            seen[b, i, j] &= query_ids[b][i] == key_ids[b][j]
    return seen


def in_double(query, key, value, seen, scale=None, cap=None, cotangents=None):
    """The result and the log-sum-exp in NumPy's float64, a head and a row at a time.

    With their cotangents, those of query, key and value too.
    """
    query, key, value = (np.asarray(x).astype(np.float64) for x in (query, key, value))
    batch, rows, heads, width = query.shape
    scale = width**-0.5 if scale is None else scale
    out = np.zeros((batch, rows, heads, value.shape[3]))
    lse = np.full((batch, rows, heads), -np.inf)
    found = [np.zeros_like(x) for x in (query, key, value)]
    seen = np.broadcast_to(seen, (batch, *seen.shape[1:]))
    for b, i, head in np.ndindex(batch, rows, heads):
        at, of = seen[b, i], head // (heads // key.shape[2])
        if not at.any():
            continue
        keys, values, row = key[b, at, of], value[b, at, of], (b, i, head)
        logits = keys @ query[row] * scale
        bent = 1.0 if cap is None else 1 - np.tanh(logits / cap) ** 2
        logits = logits if cap is None else cap * np.tanh(logits / cap)
        weights = np.exp(logits - logits.max())
        lse[row] = logits.max() + np.log(weights.sum())
        weights /= weights.sum()
        out[row] = weights @ values
        if cotangents is not None:
            of_out, of_lse = (np.asarray(x).astype(np.float64)[row] for x in cotangents)
            jacobian = np.diag(weights) - np.outer(weights, weights)  # of the softmax
            of_logits = (jacobian @ (values @ of_out) + weights * of_lse) * bent * scale
            found[0][row] = of_logits @ keys
            found[1][b, at, of] += np.outer(of_logits, query[row])
            found[2][b, at, of] += np.outer(weights, of_out)
    return (out, lse) if cotangents is None else ((out, lse), tuple(found))


def dense(query, key, value, seen, scale=None, cap=None, cotangents=None):
    """The same by whole matrices, for larger sizes: logits of all heads at once."""
    query, key, value = (np.asarray(x).astype(np.float64) for x in (query, key, value))
    (batch, rows, _, width), kv_heads = query.shape, key.shape[2]
    scale = width**-0.5 if scale is None else scale

    def by_head(x):
        """[B, T, N, D] as [B, K, N / K, T, D]."""
        x = x.reshape(*x.shape[:2], kv_heads, -1, x.shape[3])
        return np.moveaxis(x, 1, 3)

    def by_row(x):
        x = np.moveaxis(x, 3, 1)
        return x.reshape(*x.shape[:2], -1, x.shape[4])

    query, key, value = map(by_head, (query, key, value))
    seen = np.broadcast_to(seen, (batch, rows, key.shape[3]))[:, None, None]
    logits = query @ key.swapaxes(3, 4) * scale
    bent = np.tanh(logits / cap) if cap else None
    logits = np.where(seen, cap * bent if cap else logits, -np.inf)
    top = logits.max(-1, keepdims=True)
    weights = np.exp(logits - np.where(top == -np.inf, 0, top))
    total = weights.sum(-1, keepdims=True)
    weights /= np.where(total == 0, 1, total)
    lse = np.where(total == 0, -np.inf, top + np.log(np.where(total == 0, 1, total)))
    outs = by_row(weights @ value), by_row(lse)[..., 0]
    if cotangents is None:
        return outs
    of_out, of_lse = (np.asarray(x).astype(np.float64) for x in cotangents)
    of_out, of_lse = by_head(of_out), by_head(of_lse[..., None])
    of_lse = np.where(total == 0, 0, of_lse)
    of_weights = of_out @ value.swapaxes(3, 4)
    origin = (of_weights * weights).sum(-1, keepdims=True) - of_lse
    of_logits = weights * (of_weights - origin) * scale
    of_logits = of_logits * (1 - bent**2) if cap else of_logits
    # Of the heads that share one of the keys, the sum.
    of_key, of_value = (
        (x.swapaxes(3, 4) @ y).sum(2, keepdims=True)
        for x, y in ((of_logits, query), (weights, of_out))
    )
    return outs, tuple(map(by_row, (of_logits @ key, of_key, of_value)))


def with_cotangents(f, *xs):
    """A result with its log-sum-exp, the cotangents of xs, and what these are from."""

    def of(*xs):
        (out, lse), pull = jax.vjp(f, *xs)
        numbers = jnp.cos(jnp.arange(out.size)).reshape(out.shape).astype(out.dtype)
        cotangents = numbers, jnp.sin(numbers[..., 0].astype(lse.dtype))
        return (out, lse), pull(cotangents), cotangents

    return jax.jit(of)(*xs)


def direct(query, key, value, seen, scale=None, cap=None):
    """The op as it is written down, heads repeated, for JAX to derive as often as it likes."""
    groups = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, groups, 2) for x in (key, value))
    scale = query.shape[3] ** -0.5 if scale is None else scale
    logits = jnp.einsum("btnd,bsnd->bnts", query, key) * scale
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    seen = jnp.asarray(seen)[:, None]
    some = seen.any(-1, keepdims=True)
    logits = jnp.where(seen, logits, jnp.where(some, -jnp.inf, 0))
    lse = jax.nn.logsumexp(logits, -1)
    weights = jnp.where(some, jnp.exp(logits - lse[..., None]), 0)
    lse = jnp.where(some[..., 0], lse, -jnp.inf)
    return jnp.einsum("bnts,bsnd->btnd", weights, value), jnp.moveaxis(lse, 1, 2)


def on_whole(f, mesh, axes="x", layout="contiguous", check_vma=True, ids=None, ranks=None):
    """What `f` on each rank's parts is on whole arrays, cut along the sequence.

    Args:
        f: takes parts and gives a result with its log-sum-exp, or takes parts and parts of ids.
        mesh: of the ranks.
        axes: along which sequences are cut.
        layout: that of the ring of `ranks`, or of all ranks.
        check_vma: as in jax.shard_map.
        ids: whole, of the query and of the keys.
        ranks: of the ring.
    """
    spec, ranks = P(None, axes), ranks or mesh.size
    inner = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
    if layout == "contiguous":
        return lambda *xs: inner(*xs, *(ids or ()))

    def reordered(*xs):
        outs = inner(*(pk.zigzag(x, ranks) for x in (*xs, *(ids or ()))))
        return jax.tree.map(lambda y: pk.unzigzag(y, ranks), outs)

    return reordered


def loss(f, power=2):
    """A number that depends on each element of a result and of the log-sum-exps that there are."""

    def of(*xs):
        out, lse = f(*xs)
        weights = jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
        lse = jnp.where(lse == -jnp.inf, 0, lse)
        return jnp.sum(weights * out**power) + jnp.sum(jnp.sin(lse) * lse)

    return of


def check(xs, f, logits, rtol=2e-5):
    """Values and gradients of `f`, against those in double precision."""
    outs, found, cotangents = with_cotangents(f, *xs)
    want = in_double(*xs, **logits, cotangents=cotangents)
    check_close(outs, want[0], rtol)
    check_close(found, want[1], rtol)
    return outs, found


def logits_of(xs, query_ids=None, key_ids=None, **arguments):
    """The mask and the rest that arguments of ours ask for, as in_double() and direct() take it."""
    names = ("is_causal", "local_window_size")
    asked = {name: arguments[name] for name in names if name in arguments}
    seen = mask(xs[0].shape[1], xs[1].shape[1], **asked, query_ids=query_ids, key_ids=key_ids)
    return {"seen": seen, "scale": arguments.get("scale"), "cap": arguments.get("logits_soft_cap")}


def gradients(f, power=2):
    return jax.grad(loss(f, power), (0, 1, 2))


def second(f):
    """The gradient of a number made of all gradients."""
    first = gradients(f, 3)
    return jax.grad(lambda *xs: sum(jnp.sum(jnp.sin(g)) for g in first(*xs)), (0, 1, 2))


def check_close(got, want, rtol=2e-5):
    """Each array within rtol of the largest element of it that is finite, infinities alike."""
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    for one, other in zip(got, want, strict=True):
        one, other = (np.asarray(x).astype(np.float64) for x in (one, other))
        assert one.shape == other.shape
        finite = np.isfinite(other)
        np.testing.assert_array_equal(one[~finite], other[~finite])
        most = np.abs(other[finite]).max(initial=0)
        np.testing.assert_allclose(one[finite], other[finite], rtol=0, atol=rtol * max(most, 1e-3))

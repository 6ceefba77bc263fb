"""What the tests of attention's kernels share: operands, masks by name, and how near is near."""

from typing import NamedTuple

import numpy as np


class Sizes(NamedTuple):
    """Of one call; the key's heads are `heads` / `groups`."""

    rows: int = 129
    keys: int = 200
    width: int = 128
    value_width: int = 0
    heads: int = 4
    groups: int = 2
    batch: int = 2
    dtype: str = "bfloat16"


def operands(sizes, seed=0, factor=1.0):
    """Normal numbers, with logits some times larger."""
    rng = np.random.default_rng(seed)
    kv_heads = sizes.heads // sizes.groups
    shapes = (
        (sizes.rows, sizes.heads, sizes.width),
        (sizes.keys, kv_heads, sizes.width),
        (sizes.keys, kv_heads, sizes.value_width or sizes.width),
    )
    query, key, value = (rng.standard_normal((sizes.batch, *s), np.float32) for s in shapes)
    return [x.astype(sizes.dtype) for x in (query * factor, key, value)]


def cotangents_of(query, value, seed=1):
    rng = np.random.default_rng(seed)
    rows = query.shape[:3]
    of_out = rng.standard_normal((*rows, value.shape[3]), np.float32).astype(query.dtype)
    return of_out, rng.standard_normal(rows, np.float32)


def documents(length, batch=2, seed=0):
    """Ids that rise along the row, with gaps, of documents of random lengths."""
    rng = np.random.default_rng(seed)
    return np.sort(rng.integers(0, max(length // 40, 2), (batch, length)) * 7).astype(np.int32)


def any_ids(length, batch=2, seed=0):
    """Ids in no order; some are on one side alone."""
    return np.random.default_rng(seed).integers(seed, 4 + seed, (batch, length), np.int32) - 2


MASKS = {
    "whole": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (70, 3)},
    "causal window": {"is_causal": True, "local_window_size": 100, "scale": 0.2},
    "documents": {"is_causal": True, "ids": documents},
    "any segments": {"ids": any_ids, "logits_soft_cap": 5.0},
}


def given(sizes, arguments):
    """What ours is asked for besides arrays, its ids, and what it means."""
    arguments = dict(arguments)
    ids_of = arguments.pop("ids", None)
    ids = ()
    if ids_of is not None:
        ids = tuple(ids_of(n, sizes.batch, seed=i) for i, n in enumerate(sizes[:2]))
    asked = {k: v for k, v in arguments.items() if k in ("is_causal", "local_window_size")}
    seen = seen_by(sizes, ids, **asked)
    return arguments, ids, {
        "seen": seen,
        "scale": arguments.get("scale"),
        "cap": arguments.get("logits_soft_cap"),
    }  # fmt: skip


def seen_by(sizes, ids, is_causal=False, local_window_size=None):
    """`mask` of attention_models without its loops, which small sizes are compared with."""
    before = np.arange(sizes.rows)[:, None] - np.arange(sizes.keys)
    size = local_window_size
    left, right = (size, size) if isinstance(size, int) else size or (10**9, 10**9)
    seen = (before <= left) & (before >= (0 if is_causal else -right))
    return seen[None] if not ids else seen & (ids[0][:, :, None] == ids[1][:, None, :])


def check_rows(name, got, want, limit):
    """By the norm of all, by that of each row, and by the largest error."""
    got = np.asarray(got).astype(np.float64)
    assert got.shape == want.shape and np.isfinite(got).all(), name
    errors = got - want
    # What sums up to nothing, as where there is one key alone, leaves what fp32 rounds.
    least = 3e-4
    norms = np.linalg.norm(want, axis=-1)
    # Rows may be short where others are not, as of a key that few rows see.
    floor = np.median(norms) + least * want.shape[-1] ** 0.5
    of_rows = np.linalg.norm(errors, axis=-1) / np.maximum(norms, floor)
    whole = np.linalg.norm(errors) / max(np.linalg.norm(want), least * want.size**0.5)
    largest = np.abs(errors).max() / max(np.abs(want).max(), least)
    assert whole <= limit, f"{name}: relative norm of the error {whole}"
    worst = np.unravel_index(of_rows.argmax(), of_rows.shape)
    assert of_rows.max() <= 8 * limit, f"{name}: {of_rows.max()} in the row {worst}"
    worst = np.unravel_index(np.abs(errors).argmax(), errors.shape)
    assert largest <= 4 * limit, f"{name}: {largest} of the largest element at {worst}"


def check_lse(got, want, cap=None):
    """Infinite alike; tanh of a cap has some 7 digits."""
    got = np.asarray(got)
    assert got.dtype == np.float32 and got.shape == want.shape
    np.testing.assert_array_equal(got == -np.inf, want == -np.inf)
    some = want != -np.inf
    np.testing.assert_allclose(got[some], want[some], rtol=2e-5, atol=2e-4 + 2e-6 * (cap or 0))

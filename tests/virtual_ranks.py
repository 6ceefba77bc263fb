"""What the tests on virtual ranks share: how a call is made and what it must give."""

import numpy as np

POISON = 0xA5


def plan_words(plans):
    """(mechanism, protocol, *blocks a rank) as the harness wants them."""
    return [(mechanism, protocol, list(blocks)) for mechanism, protocol, *blocks in plans]


def random_bytes(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def poisoned(*shape):
    return np.full(shape, POISON, np.uint8)


def as_bytes(array):
    """[calls, ranks, ...] of any dtype as [calls, ranks, bytes]."""
    array = np.ascontiguousarray(array)
    return array.view(np.uint8).reshape(*array.shape[:2], -1)


def in_rank_order(values, reduction, dtype):
    """[calls, ranks, ...] combined over ranks, first to last, rounded once: [calls, ...]."""
    wide = (
        values.astype(np.float32) if np.dtype(dtype).itemsize == 2 and _is_float(dtype) else values
    )
    combine = {"sum": np.add, "max": np.maximum, "min": np.minimum}[reduction]
    total = wide[:, 0]
    for rank in range(1, wide.shape[1]):
        total = combine(total, wide[:, rank])
    return total.astype(dtype)


def _is_float(dtype):
    return np.dtype(dtype).name in ("float16", "bfloat16")

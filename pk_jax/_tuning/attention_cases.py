"""Named shapes of attention on one device, that benchmarks time."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """One attention of as many keys as rows, forward or forward and backward.

    Attributes:
        name: the case's name in ids and tables.
        batch: sequences.
        rows: of the query, and keys.
        heads: of the query.
        width: elements of a head.
        kv_heads: of keys and values.
        is_causal: whether a row sees the keys up to its own position alone.
        gradient: with the backward pass, else forward alone.
        tags: "forward" or "gradient".
    """

    name: str
    batch: int
    rows: int
    heads: int
    width: int
    kv_heads: int
    is_causal: bool
    gradient: bool

    @property
    def tags(self) -> frozenset[str]:
        return frozenset({"gradient" if self.gradient else "forward"})

    @property
    def flops(self) -> float:
        """Of the products that are needed, two forward and five backward; of half if causal."""
        forward = 4 * self.batch * self.heads * self.rows**2 * self.width
        return forward * (3.5 if self.gradient else 1) / (2 if self.is_causal else 1)


# Batch, rows, heads of the query and of the keys, and whether it is causal alone.
_SIZES = {
    "4k": (1, 4096, 32, 32, False),
    "16k": (1, 16384, 16, 16, False),
    "2k-b16": (16, 2048, 16, 16, False),
    "8k-gqa": (1, 8192, 32, 8, True),
}


def _cases(width: int, gradient: bool) -> list[AttentionCase]:
    found = []
    for size, (batch, rows, heads, kv_heads, causal_alone) in _SIZES.items():
        for is_causal in (True,) if causal_alone else (False, True):
            name = f"attn-d{width}-{size}{'-causal' * is_causal}{'-grad' * gradient}"
            sizes = (batch, rows, heads, width, kv_heads)
            found.append(AttentionCase(name, *sizes, is_causal, gradient))
    return found


ATTENTIONS = tuple(
    case for gradient in (False, True) for width in (128, 64) for case in _cases(width, gradient)
)

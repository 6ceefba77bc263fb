"""The exchange around Ulysses attention: all rows of some heads for some rows of all heads."""

from typing import Any

import jax.numpy as jnp

from pk_jax import config
from pk_jax._primitives import checks, exchanges, gathers
from pk_jax._reference.attention import Places
from pk_jax.config import Config


class Exchange:
    """An exchange over axes; rows are dimension 1, heads dimension 2, of what is checked."""

    def __init__(self, axes: tuple[Any, ...], implementation: str | None, config: Config):
        self.axes, self.size = axes, checks.bound_size(axes)
        self.implementation, self.config = implementation, config

    def rows_of_heads(self, x: Any) -> Any:
        """[B, n * T, N / n, D] of [B, T, N, D].

        Fewer heads than ranks are repeated, so that each rank is sent the one that it reads.
        """
        batch, length, heads, width = x.shape
        if heads < self.size:
            shape = (batch, length, heads, self.size // heads, width)
            x = jnp.broadcast_to(x[:, :, :, None], shape).reshape(batch, length, self.size, width)
        return self._exchanged(x, 2, 1)

    def heads_of_rows(self, x: Any) -> Any:
        """[B, T, N, ...] of [B, n * T, N / n, ...]."""
        return self._exchanged(x, 1, 2)

    def gathered(self, places: Places) -> Places:
        """The places of all rows."""
        ids = (places.query_segments, places.key_segments)
        if not self.axes or ids[0] is None:
            return places
        query, key = (
            gathers.all_gather(x, self.axes, axis=1, to="varying", **self._how("all_gather"))
            for x in ids
        )
        return places._replace(query_segments=query, key_segments=key)

    def _exchanged(self, x: Any, split_axis: int, concat_axis: int) -> Any:
        if not self.axes:
            return x
        how = self._how("all_to_all")
        return exchanges.all_to_all(x, self.axes, split_axis, concat_axis, **how)

    def _how(self, op: str) -> dict[str, Any]:
        return {
            "axis_index_groups": None,
            "tiled": True,
            "implementation": self.implementation,
            "config": config.part_of(self.config, op),
        }

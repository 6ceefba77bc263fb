"""The collectives in jax.lax, with the few corners that lax's lowerings do not cover."""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

AxisNames = tuple[Hashable, ...]
Groups = Sequence[Sequence[int]] | None

# These are lax's own, whole.
psum = lax.psum
pmax = lax.pmax
pmin = lax.pmin
pmean = lax.pmean
all_to_all = lax.all_to_all
ppermute = lax.ppermute
ragged_all_to_all = lax.ragged_all_to_all


def all_gather(
    x: Any,
    axis_name: AxisNames,
    *,
    axis_index_groups: Groups = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
) -> Any:
    """lax.all_gather of one array, random keys in any shape included."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        # lax gathers keys only along an axis they have. Their words follow `axis`, so a
        # non-negative one means the same for them.
        impl = jax.random.key_impl(x)
        words = all_gather(
            jax.random.key_data(x),
            axis_name,
            axis_index_groups=axis_index_groups,
            axis=axis,
            tiled=tiled,
            to=to,
        )
        return jax.random.wrap_key_data(words, impl=impl)
    return lax.all_gather(
        x, axis_name, axis_index_groups=axis_index_groups, axis=axis, tiled=tiled, to=to
    )


def psum_scatter(
    x: Any,
    axis_name: AxisNames,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Groups = None,
    tiled: bool = False,
) -> Any:
    """lax.psum_scatter of one array."""
    return lax.psum_scatter(
        x,
        axis_name,
        scatter_dimension=scatter_dimension,
        axis_index_groups=axis_index_groups,
        tiled=tiled,
    )

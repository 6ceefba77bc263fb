"""Types of products with a collective: shape, manual axes and effects, by lax's ops in turn.

Operands are as in `_reference/collective_matmul.py`.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pk_jax import _compat
from pk_jax.config import Config


def wire_dtype(config: Config, dtype: Any) -> Any:
    """The dtype in which parts of a sum in `dtype` cross the link."""
    is_float = jnp.issubdtype(dtype, jnp.floating)
    return np.dtype(config.reduce_dtype or dtype) if is_float else dtype


def _product_type(x: Any, w: Any, params: dict[str, Any]) -> Any:
    contracted = ((2,), (1 if params["transpose_w"] else 0,))
    out, _ = lax.dot_general_p.abstract_eval(
        x,
        w,
        dimension_numbers=(contracted, ((), ())),
        precision=None,
        preferred_element_type=params["dtype"],
        out_sharding=None,
    )
    return out


def of_gather(x: Any, *ws: Any, **params: Any) -> Any:
    names = ("axis_name", "axis_size")
    gathered, effects = _compat.all_gather_p.abstract_eval(
        x,
        axis_index_groups=None,
        all_gather_dimension=1,
        tiled=True,
        **{name: params[name] for name in names},
    )
    return [gathered, *(_product_type(gathered, w, params) for w in ws)], effects


def of_scatter(x: Any, w: Any, *_: Any, **params: Any) -> Any:
    names = ("axis_name", "axis_size")
    return _compat.reduce_scatter_p.abstract_eval(
        _product_type(x, w, params),
        axis_index_groups=None,
        scatter_dimension=1,
        tiled=True,
        **{name: params[name] for name in names},
    )


def of_reduce(x: Any, w: Any, *_: Any, **params: Any) -> Any:
    part, axes = _product_type(x, w, params), params["axis_name"]
    if params["typed"]:
        return _compat.psum_invariant_p.abstract_eval(part, axes=axes)
    return _compat.psum_p.abstract_eval(part, axes=axes, axis_index_groups=None)

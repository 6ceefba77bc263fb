"""Products with a collective, composed of pk_jax's own collectives and products.

The candidate of `collective_matmul.py` that runs where nothing fused can, and what a map means that
no single product covers. The parts choose by themselves how they run, so a gather or a sum over
axes that cross hosts is hierarchical. Operands are as in `_reference/collective_matmul.py`.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax

from pk_jax import config
from pk_jax._primitives import exchanges, gathers, matmul, reductions
from pk_jax._reference import collective_matmul as reference


def all_gather_matmul(x: Any, *ws: Any, axis_name: Any, dtype: Any, **params: Any) -> list[Any]:
    """The gather, and after it the products."""
    gathered = gathers.all_gather(
        x, axis_name, axis=1, tiled=True, to="varying", **_in_groups("all_gather", params)
    )
    return [gathered, *(_product(gathered, w, dtype, params) for w in ws)]


def matmul_reduce_scatter(*pairs: Any, axis_name: Any, axis_size: int, **params: Any) -> Any:
    """The product, and after it the sum."""
    dtype = params["dtype"]
    part = local(*pairs, **params)
    if not _summed_exactly(part.dtype, dtype):
        exchange = _exchange(axis_name, params)
        return reference.scattered_sum(part, axis_size, dtype, exchange)
    total = gathers.psum_scatter(
        part, axis_name, scatter_dimension=1, tiled=True, **_in_groups("psum_scatter", params)
    )
    return lax.convert_element_type(total, dtype)


def matmul_all_reduce(*pairs: Any, axis_name: Any, axis_size: int, **params: Any) -> Any:
    """The product, and after it the sum."""
    dtype = params["dtype"]
    part = local(*pairs, **params)
    if not _summed_exactly(part.dtype, dtype):
        exchange = _exchange(axis_name, params)
        gather = functools.partial(
            gathers.all_gather,
            axis_name=axis_name,
            axis=0,
            tiled=True,
            to="invarying",
            **_in_groups("all_gather", params),
        )
        return reference.whole_sum(part, axis_size, dtype, exchange, gather)
    total = reductions.reduce("psum", part, axis_name, **_in_groups("psum", params))
    return lax.convert_element_type(total, dtype)


def local(*pairs: Any, wire: Any, dtype: Any, **params: Any) -> Any:
    """This rank's part of the sum, one product of all pairs, in the dtype that crosses the link."""
    x, w = joined(*pairs, transpose_w=params["transpose_w"])
    exact = dtype if wire == dtype else reference.accumulator(dtype)
    return lax.convert_element_type(_product(x, w, exact, params), wire)


def joined(*pairs: Any, transpose_w: bool) -> tuple[Any, Any]:
    """One x and one w whose product is the sum of the pairs' products: they are joined along k."""
    if len(pairs) == 2:
        return pairs[0], pairs[1]
    return jnp.concatenate(pairs[::2], axis=2), jnp.concatenate(pairs[1::2], axis=int(transpose_w))


def _product(x: Any, w: Any, dtype: Any, params: dict[str, Any]) -> Any:
    multiply = functools.partial(
        matmul.matmul,
        transpose_b=params["transpose_w"],
        dtype=dtype,
        precision=params["precision"],
        implementation=params["implementation"],
        config=config.part_of(params["config"], matmul.OP),
    )
    return reference.in_rows(multiply, x, w)


def _summed_exactly(wire: Any, dtype: Any) -> bool:
    """Whether pk_jax's sum in `wire` is one in fp32, and not rounded more than to `dtype`."""
    return wire.itemsize > 1 and wire in (dtype, reference.accumulator(dtype))


def _exchange(axis_name: Any, params: dict[str, Any]) -> Any:
    return functools.partial(
        exchanges.all_to_all,
        axis_name=axis_name,
        split_axis=1,
        concat_axis=1,
        tiled=True,
        **_in_groups("all_to_all", params),
    )


def _in_groups(op: str, params: dict[str, Any]) -> dict[str, Any]:
    """What a part takes over from the parameters of the whole."""
    return {
        "axis_index_groups": None,
        "implementation": params["implementation"],
        "config": config.part_of(params["config"], op),
    }

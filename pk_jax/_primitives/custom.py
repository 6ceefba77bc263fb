"""The primitive pk_custom_op, for the kernels of other libraries.

Its meaning comes with each call, as a function in jax.lax. That function gives the typing (shape,
manual axis type, effects), and is what runs where the kernel cannot.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad

from pk_jax._primitives.rules import Rules, define, emit
from pk_jax._tuning.cost_model import Choice

# Attributes that every call has: those of emit(), the one that names the op, and the reference's.
RESERVED = (
    "groups",
    "devices",
    "group_size",
    "channel",
    "mechanism",
    "protocol",
    "num_blocks",
    "custom_op",
    "axis_name",
)

# The handler launches what it likes; the words only say that nothing beyond the channel is needed.
_CHOICE = Choice("register", "simple", 0, 0.0)

custom_op_p = Primitive("pk_custom_op")


def bind(
    name: str,
    reference: Callable[..., Any],
    operands: Sequence[Any],
    axis_name: tuple[Any, ...],
    implementation: str | None,
    attributes: dict[str, Any],
) -> Any:
    """Binds pk_custom_op; the arguments are checked."""
    return custom_op_p.bind(
        *operands,
        asked=name,
        reference=reference,
        axis_name=axis_name,
        implementation=implementation,
        attributes=tuple(attributes.items()),
    )


def meaning(
    op: str,
    reference: Callable[..., Any],
    operands: Sequence[Any],
    axis_name: tuple[Any, ...],
    attributes: Mapping[str, Any],
) -> jax.Array:
    """What the reference returns, which must be one array."""
    result = reference(*operands, axis_name=axis_name, **attributes)
    if not isinstance(result, (jax.Array, np.ndarray, np.generic)):
        raise TypeError(
            f"{op}: the reference must return one array, got a {type(result).__name__}; an op of "
            "several results returns them side by side in one array"
        )
    return jnp.asarray(result)


def _reference(
    *operands: Any, asked: str, reference: Any, axis_name: Any, attributes: Any, **_: Any
) -> jax.Array:
    return meaning(asked, reference, operands, axis_name, dict(attributes))


def _abstract_eval(*avals: Any, **params: Any) -> Any:
    traced = jax.make_jaxpr(lambda *xs: _reference(*xs, **params))(*avals)
    for value in traced.consts:
        if isinstance(value, Tracer):
            raise TypeError(
                f"{params['asked']}: the reference uses {value.aval.str_short()}, a value that is "
                "traced outside of it; pass it as an operand"
            )
    return traced.out_avals[0], traced.effects


def _batch(*_: Any, **params: Any) -> Any:
    raise NotImplementedError(
        f"{params['asked']}: a custom op has no rule for jax.vmap; give it one with "
        "jax.custom_batching.custom_vmap, or pass implementation='reference'"
    )


def _jvp(*_: Any, **params: Any) -> Any:
    raise NotImplementedError(
        f"{params['asked']}: a custom op has no derivative; wrap it in jax.custom_vjp, or pass "
        "implementation='reference'"
    )


def _cuda(ctx: Any, *operands: Any, groups: Any, asked: str, attributes: Any, **_: Any) -> Any:
    return emit(ctx, asked, operands, groups, _CHOICE, {**dict(attributes), "custom_op": asked})


define(
    custom_op_p,
    Rules(
        op="custom_op",
        abstract_eval=_abstract_eval,
        batch=_batch,
        reference=_reference,
        emit_cuda=_cuda,
        alone=lambda *operands, shape, **params: _reference(*operands, **params),
        needs_peers=True,
    ),
)
ad.primitive_jvps[custom_op_p] = _jvp

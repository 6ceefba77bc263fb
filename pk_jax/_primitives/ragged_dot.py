"""The primitive pk_ragged_dot: rows times the matrix of their group, which may lie transposed.

It is bilinear. Its transpose in the rows is the same product with the flag turned over; that in the
matrices, pk_ragged_contract, sums over the rows of each group, and both of that one's transposes
are pk_ragged_dot. So there are gradients of any order, which jax.lax.ragged_dot has not.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pk_jax import _compat, _selection
from pk_jax._primitives import matmul
from pk_jax._primitives.rules import fall_back, of_transpose
from pk_jax._reference import ragged_dot as reference
from pk_jax._tuning import ragged_dot_model
from pk_jax.config import Config, resolve

OP = "ragged_dot"

# The kernel adds up the rows of 32 groups at a time, none longer than all, in 32 bits.
MOST_SIZE = (2**31 - 1) // 32

ragged_dot_p = Primitive("pk_ragged_dot")
ragged_contract_p = Primitive("pk_ragged_contract")


def ragged_dot(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    *,
    dtype: Any,
    precision: Any,
    implementation: str | None,
    config: Config,
) -> Any:
    """Binds pk_ragged_dot to [m, k], [g, k, n] and int32 [g]; the arguments are checked.

    `precision` is that of the reference, as in lax.ragged_dot.
    """
    return _bind(
        ragged_dot_p,
        lhs,
        rhs,
        group_sizes,
        transpose_b=False,
        dtype=np.dtype(dtype),
        precision=precision,
        implementation=implementation,
        config=config,
    )


def _bind(primitive: Primitive, *operands: Any, **params: Any) -> Any:
    return primitive.bind(*_compat.vary_as_operands(*operands), **params)


def _abstract_eval(lhs: Any, rhs: Any, group_sizes: Any, *, numbers: Any, dtype: Any) -> Any:
    return _compat.ragged_dot_general_p.abstract_eval(
        lhs,
        rhs,
        group_sizes,
        ragged_dot_dimension_numbers=numbers,
        precision=None,
        preferred_element_type=dtype,
        group_offset=None,
        out_sharding=None,
    )


def _type_of_rows(lhs: Any, rhs: Any, group_sizes: Any, **params: Any) -> Any:
    numbers = reference.rows_numbers(lhs.ndim - 2, params["transpose_b"])
    return _abstract_eval(lhs, rhs, group_sizes, numbers=numbers, dtype=params["dtype"])


def _type_of_groups(lhs: Any, rhs: Any, group_sizes: Any, **params: Any) -> Any:
    numbers = reference.groups_numbers(lhs.ndim - 2)
    return _abstract_eval(lhs, rhs, group_sizes, numbers=numbers, dtype=params["dtype"])


def _rows(
    lhs: Any, rhs: Any, group_sizes: Any, like: Any, transpose_b: bool, params: dict[str, Any]
) -> Any:
    """The product of a transpose, in the dtype of what it is the cotangent of."""
    # Asking for "cuda", or for a tile, speaks of the op itself alone.
    return _bind(
        ragged_dot_p,
        lhs,
        rhs,
        group_sizes,
        transpose_b=transpose_b,
        dtype=np.dtype(like.aval.dtype),
        precision=params["precision"],
        implementation=of_transpose(params),
        config=resolve(OP, None),
    )


def _transpose_rows(cotangent: Any, lhs: Any, rhs: Any, group_sizes: Any, **params: Any) -> Any:
    transpose_b = params["transpose_b"]
    if ad.is_undefined_primal(lhs):
        return _rows(cotangent, rhs, group_sizes, lhs, not transpose_b, params), None, None
    factors = (cotangent, lhs) if transpose_b else (lhs, cotangent)
    to_rhs = _bind(
        ragged_contract_p,
        *factors,
        group_sizes,
        dtype=np.dtype(rhs.aval.dtype),
        precision=params["precision"],
        implementation=of_transpose(params),
    )
    return None, to_rhs, None


def _transpose_groups(cotangent: Any, lhs: Any, rhs: Any, group_sizes: Any, **params: Any) -> Any:
    if ad.is_undefined_primal(lhs):
        return _rows(rhs, cotangent, group_sizes, lhs, True, params), None, None
    return None, _rows(lhs, cotangent, group_sizes, rhs, False, params), None


def _batch(
    operands: Any, dims: Any, *, primitive: Primitive, places: Any, place: int, **params: Any
) -> Any:
    """A map over all operands is lax's batched product; any other runs one by one, in a loop."""
    if None not in dims:
        if params["implementation"] == "cuda":
            raise NotImplementedError(
                f"{OP}: there are no kernels for a map over all operands; use jax.lax.map, which "
                "runs them one by one, or implementation=None"
            )
        moved = [jnp.moveaxis(*each) for each in zip(operands, dims, places, strict=True)]
        return _bind(primitive, *moved, **params), place
    # lax has no such map. In a loop an operand that is not mapped is not copied.
    mapped = {
        i: jnp.moveaxis(x, d, 0)
        for i, (x, d) in enumerate(zip(operands, dims, strict=True))
        if d is not None
    }

    def one(parts: Any) -> Any:
        xs = [parts.get(i, x) for i, x in enumerate(operands)]
        return _bind(primitive, *xs, **params)

    return lax.map(one, mapped), 0


def _reference(*xs: Any, implementation: Any, config: Any, **params: Any) -> Any:
    return reference.ragged_dot(*xs, **params)


def _reference_of_groups(*xs: Any, implementation: Any, **params: Any) -> Any:
    return reference.ragged_contract(*xs, **params)


def _lower(ctx: Any, *operands: Any, **params: Any) -> Any:
    if ctx.avals_in[0].ndim > 2:
        if params["implementation"] is None and tuple(ctx.module_context.platforms) == ("cuda",):
            fall_back(OP, None, _selection.Decision("reference", _selection.MAPPED))
        return mlir.lower_fun(_reference, multiple_results=False)(ctx, *operands, **params)
    rules = {"reference": _reference, "cuda": _cuda}
    return matmul.lower(ctx, *operands, op=OP, most=MOST_SIZE, **rules, **params)


def _cuda(lhs: Any, rhs: Any, group_sizes: Any, *, num_sms: int, **params: Any) -> Any:
    (m, _), num_groups = lhs.shape, rhs.shape[0]
    plan = ragged_dot_model.choose(m, num_groups, num_sms, params["config"].tile)
    names = ("transpose_b", "dtype")
    return call(lhs, rhs, group_sizes, plan=plan, **{name: params[name] for name in names})


def call(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    *,
    transpose_b: bool,
    dtype: Any,
    plan: ragged_dot_model.Plan,
) -> Any:
    """The custom call, on operands with rows of whole 16 bytes."""
    m, k = lhs.shape
    n = rhs.shape[1 if transpose_b else 2]
    result = jax.ShapeDtypeStruct((m, n + -n % matmul.ALIGNMENT), dtype)
    out = jax.ffi.ffi_call("pk_jax_ragged_dot", result)(
        matmul.padded(lhs),
        matmul.padded(rhs),
        group_sizes,
        m=np.int64(m),
        n=np.int64(n),
        k=np.int64(k),
        num_groups=np.int64(rhs.shape[0]),
        transpose_b=np.bool_(transpose_b),
        tile=plan.tile,
        num_blocks=np.int64(plan.num_blocks),
    )
    return out if n % matmul.ALIGNMENT == 0 else out[:, :n]


def _define(
    primitive: Primitive, abstract_eval: Any, transpose: Any, places: Any, place: int, lower: Any
) -> None:
    """Registers one of the two; `places` are where a map's dimension is in operands and result."""
    bind = functools.partial(_bind, primitive)
    primitive.def_impl(functools.partial(_compat.run_eagerly, primitive))
    primitive.def_effectful_abstract_eval(abstract_eval)
    ad.defjvp(
        primitive,
        lambda t, lhs, rhs, group_sizes, **params: bind(t, rhs, group_sizes, **params),
        lambda t, lhs, rhs, group_sizes, **params: bind(lhs, t, group_sizes, **params),
        None,
    )
    ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = functools.partial(
        _batch, primitive=primitive, places=places, place=place
    )
    mlir.register_lowering(primitive, lower)


_define(ragged_dot_p, _type_of_rows, _transpose_rows, (0, 1, 0), 0, _lower)
_define(
    ragged_contract_p,
    _type_of_groups,
    _transpose_groups,
    (0, 0, 0),
    1,
    mlir.lower_fun(_reference_of_groups, multiple_results=False),
)

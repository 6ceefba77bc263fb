"""Checks of the operands and dtypes of matrix products, in the words of the public functions."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pk_jax import _compat
from pk_jax._primitives import checks, matmul
from pk_jax._reference.matmul import ACTIVATIONS
from pk_jax._tuning import matmul_model
from pk_jax.config import Config


def check_operand(op: str, name: str, operand: Any) -> None:
    """Raises TypeError unless an operand is an array of numbers."""
    if not isinstance(operand, (jax.Array, np.ndarray)):
        raise TypeError(
            f"{op}: {name} must be an array, got {operand!r} of type {type(operand).__name__}"
        )
    dtype = operand.dtype
    if not jnp.issubdtype(dtype, jnp.number) and dtype != jnp.bool_:
        raise TypeError(f"{op}: {name} must hold numbers, got dtype {dtype}; convert it first")


def common_dtype(op: str, **operands: Any) -> Any:
    """The dtype in which two operands are multiplied: what JAX promotes theirs to.

    Raises:
        TypeError: it promotes them to none, as floats of 8 bits with any others.
    """
    try:
        return jnp.result_type(*operands.values())
    except jax.dtypes.TypePromotionError:
        dtypes = {name: jax.dtypes.canonicalize_dtype(y.dtype) for name, y in operands.items()}
    found = " and ".join(f"{name} of dtype {dtype}" for name, dtype in dtypes.items())
    low, high = sorted(dtypes, key=lambda name: _rank(dtypes[name]))
    remedy = "convert both to a wider one"
    # A float of 8 bits or less holds few of the others' numbers.
    if _rank(dtypes[low]) != _rank(dtypes[high]) and _compat.bits_per_element(dtypes[high]) > 8:
        remedy = f"convert one, as by {low}.astype('{dtypes[high]}')"
    rule = f"jax_numpy_dtype_promotion={jax.config.jax_numpy_dtype_promotion}"
    raise TypeError(f"{op}: {found} have no common dtype by {rule}; {remedy}") from None


def _rank(dtype: Any) -> tuple[bool, bool, int]:
    """By which a dtype comes after those that it can stand for."""
    is_complex, is_inexact = (jnp.issubdtype(dtype, k) for k in (np.complexfloating, np.inexact))
    return is_complex, is_inexact, _compat.bits_per_element(dtype)


def result_dtype(op: str, common: Any, preferred: Any) -> Any:
    """The dtype of a product of operands of one dtype, as lax has it.

    Raises:
        TypeError: `preferred` is no dtype, or lax has no product in it.
    """
    if preferred is None:
        return common
    what = f"{op}: preferred_element_type={preferred!r}"
    try:
        dtype = jax.dtypes.canonicalize_dtype(preferred)
    except TypeError:
        raise TypeError(f"{what} must be a dtype or None") from None
    problem = matmul.why_not_dtypes(common, dtype)
    if problem is not None:
        raise TypeError(
            f"{what} does not go with operands of dtype {common}: {problem} Convert the operands "
            "or the result instead"
        )
    return dtype


def check_epilogue(op: str, bias: Any, activation: Any, cols: int, common: Any) -> None:
    """Raises unless a bias and an activation go with a product of so many columns.

    Args:
        op: the op's name.
        bias: the bias, or None.
        activation: the name of the activation, or None.
        cols: of the product.
        common: the dtype in which the operands are multiplied.
    """
    if activation is not None and activation not in [*ACTIVATIONS]:
        raise ValueError(
            f"{op}: activation must be one of {[*ACTIVATIONS]} or None, got {activation!r}; call "
            "another one on the result"
        )
    if bias is None and activation is None:
        return
    if not jnp.issubdtype(common, jnp.floating):
        raise TypeError(
            f"{op}: bias and activation go with real floating-point operands, got {common}; add "
            "and call them on the result"
        )
    if bias is None:
        return
    check_operand(op, "bias", bias)
    if bias.shape != (cols,):
        raise ValueError(
            f"{op}: bias must be [n], a number for each of the {cols} columns of w, got shape "
            f"{bias.shape}; reshape it, or add it to the result"
        )
    own = ("bfloat16", "float16") if common == jnp.float8_e4m3fn else (common.name,)
    if bias.dtype.name not in (*own, "float32"):
        raise TypeError(
            f"{op}: bias must be {' or '.join(own)} with operands of {common}, or float32, got "
            f"{bias.dtype}; convert it"
        )


def check_scales(
    op: str, scale_x: Any, scale_w: Any, x: tuple[int, ...], w: tuple[int, ...], common: Any
) -> dict[str, Any]:
    """The scales of operands of these shapes, ones where one is missing.

    Returns:
        scale_x of the shape of x without its last dimension, or 1 in each place, and scale_w [n] or
        [1]; both None if there are none.

    Raises:
        TypeError: they do not go with operands of the dtype, or are not float32.
        ValueError: their shapes do not fit.
    """
    scales = {"scale_x": scale_x, "scale_w": scale_w}
    if scale_x is None and scale_w is None:
        return scales
    for (name, scale), each, what in zip(
        scales.items(), (x[:-1], w[1:]), ("row of x", "column of w"), strict=True
    ):
        if scale is None or isinstance(scale, (float, int, np.number)):
            scale = jnp.float32(1 if scale is None else scale)
        check_operand(op, name, scale)
        if common != jnp.float8_e4m3fn:
            raise TypeError(
                f"{op}: {name} goes with operands of float8_e4m3fn, got {common}; multiply x, w or "
                "the result by it"
            )
        if scale.dtype != np.float32:
            raise TypeError(f"{op}: {name} must be float32, got {scale.dtype}; convert it")
        if scale.shape not in ((), each):
            raise ValueError(
                f"{op}: {name} must be a scalar, or of shape {each} with a number for each {what}, "
                f"got shape {scale.shape}; reshape it"
            )
        scales[name] = jnp.reshape(scale, (1,) * len(each)) if scale.shape == () else scale
    return scales


def possible_tile(op: str, given: Config | None, resolved: Config) -> Config:
    """The Config of a product of float8_e4m3fn: a tile that is only a default may give way.

    Raises:
        ValueError: the call asks for a tile that is too large for two accumulators.
    """
    shapes = matmul_model.SHAPES_OF_BYTES
    if resolved.tile is None or resolved.tile in shapes:
        return resolved
    if given is not None and given.tile is not None:
        raise ValueError(
            f"{op} cannot honour config.tile={given.tile} with operands of float8_e4m3fn: their "
            f"tiles are {shapes}"
        )
    return dataclasses.replace(resolved, tile=None)


def check_row_dimension(op: str, name: str, value: Any, shape: tuple[int, ...]) -> int:
    """A dimension of x [..., k] that is one of rows, not negative."""
    if len(shape) < 2:
        raise ValueError(f"{op}: x must be [..., m, k], got shape {shape}; a row alone is x[None]")
    index = checks.check_dimension(op, name, value, len(shape))
    if index == len(shape) - 1:
        raise ValueError(
            f"{op}: {name}={value} is the last dimension of x, of shape {shape}, which is "
            f"multiplied; name one of rows, {-len(shape)} to -2"
        )
    return index


def check_factors(op: str, x: Any, w: Any, name: str, axes: Sequence[Any], cut: str) -> None:
    """Raises unless x is [..., k] and w [k, p].

    Args:
        op: name of the op, for messages.
        x: an array of numbers.
        w: another.
        name: what to call w.
        axes: the axes of the op.
        cut: what a rank has a part of: "rows" of x, or "k" of both.
    """
    if np.ndim(x) < 1 or np.ndim(w) != 2:
        raise ValueError(
            f"{op}: x must be [..., k] and {name} [k, p], got shapes {x.shape} and {w.shape}; "
            "reshape them"
        )
    k, of_w = x.shape[-1], w.shape[0]
    if k == of_w:
        return
    hints = (_hints_of_sum if cut == "k" else _hints_of_gather)(x, w, name, axes)
    remedy = "; or ".join(hints) or "transpose or slice one of them"
    raise ValueError(
        f"{op}: the last dimension of x, {k} of {x.shape}, must equal the first of {name}, {of_w} "
        f"of {w.shape}; {remedy}"
    )


def _hints_of_sum(x: Any, w: Any, name: str, axes: Sequence[Any]) -> list[str]:
    """What may be wrong with factors that do not fit, of which a rank is to have parts along k."""
    k, (of_w, last), spec = x.shape[-1], w.shape, _spec(axes)
    hints = []
    if _has_all(w, of_w, k, axes):
        lies = _how_it_lies(w, "rows", axes)
        hints.append(f"{name} {lies}: give each rank its rows, in_specs P({spec}, None)")
    elif _has_all(x, k, of_w, axes):
        lies = _how_it_lies(x, "columns", axes)
        hints.append(
            f"x {lies}: give each rank its columns, in_specs P(..., {spec}); or, if a product made "
            "x, those of its weight"
        )
    if last == k:
        hints.append(f"{name} is [p, k]: pass {name}.T")
    elif not hints and _has_all(w, last, k, axes):
        lies = _how_it_lies(w, "columns", axes)
        hints.append(f"{name} is [p, k] and {lies}: in_specs P(None, {spec}), and pass {name}.T")
    return hints


def _hints_of_gather(x: Any, w: Any, name: str, axes: Sequence[Any]) -> list[str]:
    """What may be wrong with factors that do not fit, of which x is to be gathered along rows."""
    k, (of_w, last), spec = x.shape[-1], w.shape, _spec(axes)
    parts_of_x, parts_of_w = (
        checks.bound_size([axis for axis in axes if axis not in equal_over(y, axes)])
        for y in (x, w)
    )
    hints = []
    if k == of_w * parts_of_w:
        hints.append(f"{name} is cut along k, which is not gathered: in_specs P(None, {spec})")
    elif of_w == k * parts_of_x:
        hints.append(
            f"x is cut along k, which is not gathered: cut its rows, in_specs P(..., {spec}, None)"
        )
    if last == k:
        hints.append(f"{name} is [p, k]: pass {name}.T")
    elif not hints and k == last * parts_of_w:
        hints.append(
            f"{name} is [p, k] and cut along k, which is not gathered: in_specs P({spec}, None), "
            f"and pass {name}.T"
        )
    return hints


def _has_all(y: Any, length: int, part: int, axes: Sequence[Any]) -> bool:
    """Whether a length is that of the parts of all ranks, or of those on which y is the same."""
    return length in (part * checks.bound_size(each) for each in (axes, equal_over(y, axes)))


def _how_it_lies(y: Any, what: str, axes: Sequence[Any]) -> str:
    """Of a y that has the rows or columns of all ranks: what its type says of it."""
    if not _compat.check_vma():
        return f"has the {what} of all ranks"
    if equal := equal_over(y, axes):
        return f"is whole, being typed as equal on all ranks of {equal}"
    return f"is cut, as it varies over {[*axes]}, but has the {what} of all ranks"


def equal_over(y: Any, axes: Sequence[Any]) -> list[Any]:
    """The axes of more than one rank over which y is typed as equal, as far as types say."""
    if not _compat.check_vma():
        return []
    varying = _compat.varying_axes(y)
    return [axis for axis in axes if axis not in varying and checks.bound_size([axis]) > 1]


def check_states(
    op: str, axes: Sequence[Any], what: str = "product with a collective", **operands: Any
) -> None:
    """Raises where an operand is typed as a sum that is not done, or as what has one to come."""
    for name, x in operands.items():
        for axis in axes:
            state = _compat.state_over(x, (axis,), op)
            if state in ("unreduced", "reduced"):
                remedy = f"jax.lax.pcast({name}, {axis!r}, to='varying')"
                remedy = f"sum it by jax.lax.psum({name}, {axis!r})" if state[0] == "u" else remedy
                raise NotImplementedError(
                    f"{op}: {name} is typed as {state} over axis {axis!r}, which has no {what}; "
                    f"{remedy} first"
                )


def check_summed(op: str, x: Any, w: Any, axes: Sequence[Any], dtype: Any) -> None:
    """Raises where a sum over ranks of x @ w is known to be none of parts along k."""
    if dtype == np.bool_:
        raise TypeError(f"{op}: there is no sum of booleans; convert x or w to int32")
    varying = _compat.varying_axes(x, w)
    alike = [axis for axis in equal_over(x, axes) if axis not in varying]
    if alike:
        raise ValueError(
            f"{op}: x and w are typed as equal on all ranks of {alike} (they vary over "
            f"{sorted(varying, key=str)}), so that the sum over {tuple(axes)} is of equal parts; "
            "shard k over the axis, or use jax.lax.pcast(x, axis, to='varying') if it is meant"
        )


def check_scattered(op: str, shape: tuple[int, ...], at: int, axes: Sequence[Any]) -> None:
    """Raises unless the rows can be cut in a part for each rank."""
    length, size = shape[at], checks.bound_size(axes)
    if length % size:
        raise ValueError(
            f"{op}: scatter_dimension={at} of x, of shape {shape}, has size {length}, which must "
            f"be divisible by the {size} ranks of axis {tuple(axes)}; pad it with zeros to "
            f"{length + -length % size} (jax.numpy.pad) and cut them from the last ranks' results"
        )


def _spec(axes: Sequence[Any]) -> str:
    """The axes as they stand in a PartitionSpec."""
    return repr(axes[0] if len(axes) == 1 else tuple(axes))

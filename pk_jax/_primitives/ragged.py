"""The primitive pk_ragged_all_to_all.

The sender decides what moves (pk_jax/_reference/ragged.py says it in full), so the transpose asks
the senders for their sizes and does not rely on `recv_sizes`. Only the rows that moved are
transposed: a row of the cotangent returns to where its value came from, and is zero in the
cotangent of `output`; all others are the cotangent of `output`.

With PK_JAX_CHECKS=1, read when a program is lowered (so not when it comes from jit's cache), a
slice out of range is an error at run time that names rank and row. The kernel knows it itself.
Elsewhere the composed form takes the place of XLA's, tells a wrong `recv_sizes` and slices that
arrive at one row, too, and wants all ranks of the mesh to make the call.
"""

import functools
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pk_jax import _capability, _compat, _selection
from pk_jax._capability import CHECKS
from pk_jax._primitives import checks, exchanges
from pk_jax._primitives.rules import (
    Rules,
    define,
    emit,
    is_zero,
    lower,
    no_tangent,
    of_transpose,
)
from pk_jax._reference import ragged as reference
from pk_jax._tuning import cost_model
from pk_jax.config import Config, resolve

OP = "ragged_all_to_all"

ragged_all_to_all_p = Primitive("pk_ragged_all_to_all")


def ragged_all_to_all(
    operand: Any,
    output: Any,
    *index_arrays: Any,
    axis_name: tuple[Any, ...],
    axis_index_groups: tuple[tuple[int, ...], ...] | None,
    implementation: str | None,
    config: Config,
) -> Any:
    """Checks the arrays and binds pk_ragged_all_to_all; the other arguments are checked.

    Args:
        operand: the array to send from.
        output: the array to write to.
        *index_arrays: input_offsets, send_sizes, output_offsets, recv_sizes.
        axis_name: the axes.
        axis_index_groups: the groups, if any.
        implementation: as in the public function.
        config: the resolved Config.
    """
    size = checks.bound_size(axis_name, axis_index_groups)
    arrays = {"operand": operand, "output": output}
    arrays |= dict(zip(reference.INDEX_NAMES, index_arrays, strict=True))
    _check_arrays(arrays, size)
    dtype = _index_dtype(index_arrays)
    indices = [lax.convert_element_type(x, dtype) for x in index_arrays]
    return _bind(
        operand,
        output,
        *indices,
        axis_name=axis_name,
        axis_index_groups=axis_index_groups,
        axis_size=size,
        batch=1,
        implementation=implementation,
        config=config,
    )


def _check_arrays(arrays: dict[str, Any], size: int) -> None:
    for name, x in arrays.items():
        if not isinstance(x, (jax.Array, np.ndarray)):
            raise TypeError(f"{OP}: {name} must be an array, got {x!r} of type {type(x).__name__}")
    operand, output = arrays["operand"], arrays["output"]
    for name in ("operand", "output"):
        if arrays[name].ndim == 0:
            raise ValueError(f"{OP}: {name} must have a leading dimension, got a 0-d array")
    if operand.shape[1:] != output.shape[1:]:
        raise ValueError(
            f"{OP}: operand {operand.shape} and output {output.shape} must be equal in all "
            "dimensions but the first"
        )
    if operand.dtype != output.dtype:
        raise TypeError(
            f"{OP}: operand and output must have one dtype, got {operand.dtype} and {output.dtype}"
        )
    for name in reference.INDEX_NAMES:
        x = arrays[name]
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{OP} {name} must be integer type, got {x.dtype}")
        if x.ndim != 1 or x.shape[0] < 1:
            raise ValueError(
                f"{OP} {name} must be rank 1 with positive dimension size, but got shape {x.shape}"
            )
    lengths = {name: arrays[name].shape[0] for name in reference.INDEX_NAMES}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{OP}: the index arrays must all have one length, got {lengths}")
    if lengths["send_sizes"] % size:
        raise ValueError(
            f"{OP}: index arrays of length {lengths['send_sizes']} cannot hold the same number of "
            f"slices for each of {size} ranks; the length must be a multiple of {size}"
        )


def _index_dtype(index_arrays: tuple[Any, ...]) -> Any:
    """int64 if an index could need it and JAX has it, else int32."""
    wide = any(x.dtype.itemsize == 8 or x.dtype == jnp.uint32 for x in index_arrays)
    return jax.dtypes.canonicalize_dtype(jnp.int64) if wide else jnp.dtype(jnp.int32)


def _bind(*operands: Any, **params: Any) -> Any:
    return ragged_all_to_all_p.bind(*_compat.vary_alike(params["axis_name"], *operands), **params)


def _abstract_eval(*operands: Any, **params: Any) -> Any:
    lax_params = {name: params[name] for name in ("axis_name", "axis_index_groups")}
    return _compat.ragged_all_to_all_p.abstract_eval(*operands, **lax_params)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    result = ragged_all_to_all_p.bind(*primals, **params)
    moved, kept = tangents[:2]
    if is_zero(moved) and is_zero(kept):
        return result, no_tangent(result)
    moved, kept = ad.instantiate_zeros(moved), ad.instantiate_zeros(kept)
    return result, ragged_all_to_all_p.bind(moved, kept, *primals[2:], **params)


def _transpose(cotangent: Any, operand: Any, output: Any, *indices: Any, **params: Any) -> Any:
    wanted = [ad.is_undefined_primal(operand), ad.is_undefined_primal(output)]
    if is_zero(cotangent):
        zeros = [
            ad.Zero(x.aval) if w else None for x, w in zip((operand, output), wanted, strict=True)
        ]
        return [*zeros, None, None, None, None]
    axis_name, batch = params["axis_name"], params["batch"]
    params["implementation"] = of_transpose(params)
    send_sizes = indices[1]
    arrived = jnp.stack(indices[:3])
    if axis_name:
        arrived = exchanges.all_to_all(
            arrived,
            axis_name,
            1,
            1,
            axis_index_groups=params["axis_index_groups"],
            tiled=True,
            implementation=params["implementation"],
            config=resolve("all_to_all", None),
        )
    sent_from, sizes, sent_to = arrived
    to_operand = to_output = None
    if wanted[0]:
        zero = ad.instantiate_zeros(ad.Zero(operand.aval))
        to_operand = _bind(cotangent, zero, sent_to, sizes, sent_from, send_sizes, **params)
    if wanted[1]:
        num_rows = operand.aval.shape[0] if wanted[0] else operand.shape[0]
        written = reference.written(
            arrived,
            num_rows // batch,
            cotangent.shape[0] // batch,
            batch,
        )
        written = lax.expand_dims(written, range(1, cotangent.ndim))
        to_output = jnp.where(written, jnp.zeros_like(cotangent), cotangent)
    return [to_operand, to_output, None, None, None, None]


def _batch(axis_data: Any, operands: Any, dims: Any, **params: Any) -> Any:
    size, batch = axis_data.size, params["batch"]
    if axis_data.name in params["axis_name"]:
        # The mapped axis is one that the op is over: no data crosses devices there.
        composed = functools.partial(_composed, **params)
        rule = jax.vmap(composed, in_axes=tuple(dims), axis_name=axis_data.name, axis_size=size)
        return rule(*operands), 0
    if all(d is None for d in dims):
        return ragged_all_to_all_p.bind(*operands, **params), None
    if size == 0:
        return batching.bdim_at_front(operands[1], dims[1], 0), 0

    def rows(x: Any, d: int | None) -> Any:
        x = batching.bdim_at_front(x, d, size)
        return x.reshape(size * x.shape[1], *x.shape[2:])

    def slices(x: Any, d: int | None) -> Any:
        x = batching.bdim_at_front(x, d, size)
        x = x.reshape(size, x.shape[1] // batch, batch)
        return jnp.moveaxis(x, 0, 1).ravel()

    merged = [rows(x, d) for x, d in zip(operands[:2], dims[:2], strict=True)]
    merged += [slices(x, d) for x, d in zip(operands[2:], dims[2:], strict=True)]
    result = _bind(*merged, **{**params, "batch": size * batch})
    return result.reshape(size, result.shape[0] // size, *result.shape[1:]), 0


def checks_on() -> bool:
    """Whether PK_JAX_CHECKS asks for errors where slices are out of range."""
    value = os.environ.get(CHECKS, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{CHECKS} must be 0 or 1, got {value!r}")
    return value == "1"


def _check_processes(ctx: Any) -> None:
    """Raises if the processes of the mesh would not all compile checks, or none."""
    devices = _compat.mesh_devices(ctx) or []
    if len({device.process_index for device in devices}) > 1:
        problem = _selection.why_checks_differ(checks_on(), _capability.of_processes(devices))
        if problem is not None:
            raise RuntimeError(f"{OP}: {problem}")


def _lower(ctx: Any, *operands: Any, **params: Any) -> Any:
    _check_processes(ctx)
    rules = RULES
    if any(0 in aval.shape for aval in ctx.avals_in):
        params["implementation"] = "reference"
    # XLA has the operation itself, except on CPU, and without checks.
    elif "cpu" not in ctx.module_context.platforms and not checks_on():
        rules = RULES._replace(reference=_lax)
    return lower(ctx, *operands, rules=rules, **params)


def _composed(*operands: Any, shape: Any = None, **params: Any) -> Any:
    return reference.ragged_all_to_all(
        *operands,
        axis_name=params["axis_name"],
        axis_index_groups=params["axis_index_groups"],
        batch=params["batch"],
        checks=checks_on(),
    )


def _lax(operand: Any, output: Any, *indices: Any, **params: Any) -> Any:
    return _compat.parallel.ragged_all_to_all(
        operand,
        output,
        *_absolute(operand.shape, output.shape, *indices, batch=params["batch"], keep_bad=False),
        axis_name=params["axis_name"],
        axis_index_groups=params["axis_index_groups"],
    )


def _absolute(
    shape: Any, out_shape: Any, *indices: Any, batch: int, keep_bad: bool
) -> tuple[Any, ...]:
    """The index arrays with offsets into the whole of `operand` and `output`."""
    if batch == 1:
        return indices
    *slices, recv_sizes = indices
    moved = reference.absolute(
        jnp.stack(slices), shape[0] // batch, out_shape[0] // batch, batch, keep_bad=keep_bad
    )
    return (*moved, recv_sizes)


def _emit_cuda(ctx: Any, *operands: Any, groups: list[list[int]], **params: Any) -> Any:
    """Emits the custom call: operands as rows of bytes, the result in the place of `output`."""
    operand, output, *indices = operands
    aval, out_aval, *index_avals = ctx.avals_in
    checked = checks_on()
    if params["batch"] > 1:
        shift = functools.partial(
            _absolute, aval.shape, out_aval.shape, batch=params["batch"], keep_bad=checked
        )
        inner = ctx.replace(avals_in=index_avals, avals_out=index_avals)
        indices = mlir.lower_fun(shift, multiple_results=True)(inner, *indices)
    # The sizes are known on the device alone, so there is nothing to choose by, or to predict.
    num_blocks = params["config"].num_comm_sms or 0
    return emit(
        ctx,
        OP,
        [operand, output, *indices],
        groups,
        cost_model.Choice("register", "simple", num_blocks, math.nan),
        {
            "row_bytes": np.int64(math.prod(aval.shape[1:]) * aval.dtype.itemsize),
            "checks": np.int64(checked),
        },
        aliases={1: 0},
    )


RULES = Rules(
    op=OP,
    abstract_eval=_abstract_eval,
    batch=_batch,
    reference=_composed,
    emit_cuda=_emit_cuda,
    alone=_composed,
)
define(ragged_all_to_all_p, RULES)
ad.primitive_jvps[ragged_all_to_all_p] = _jvp
ad.primitive_transposes[ragged_all_to_all_p] = _transpose
mlir.register_lowering(ragged_all_to_all_p, _lower, cacheable=False)

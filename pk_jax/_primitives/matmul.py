"""The primitive pk_matmul: the product of two matrices, either of which may lie transposed.

It is bilinear, and its transposes are products again, with flags instead of transposed copies.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pk_jax import _compat, _selection
from pk_jax._primitives.rules import fall_back, of_transpose
from pk_jax._reference import matmul as reference
from pk_jax._tuning import hardware, matmul_model
from pk_jax.config import Config, resolve

OP = "matmul"

# Rows of a matrix in memory begin at multiples of this many elements of two bytes, 16 bytes.
ALIGNMENT = 8

# The kernel counts rows and columns, those of a tile past the edge too, in 32 bits.
MOST_SIZE = 2**31 - 1 - 256

matmul_p = Primitive("pk_matmul")


def matmul(
    a: Any,
    b: Any,
    *,
    dtype: Any,
    precision: Any,
    implementation: str | None,
    config: Config,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> Any:
    """Binds pk_matmul to [m, k] and [k, n], or what lies transposed; the arguments are checked.

    `precision` is that of the reference, as in lax.dot_general.
    """
    return _bind(
        a,
        b,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        dtype=np.dtype(dtype),
        precision=precision,
        implementation=implementation,
        config=config,
    )


def _bind(a: Any, b: Any, **params: Any) -> Any:
    return matmul_p.bind(*_compat.vary_as_operands(a, b), **params)


def precision_of_call() -> Any:
    """As lax.dot_general takes it when it is called; None would ask again when it is lowered."""
    return jax.config.jax_default_matmul_precision or lax.Precision.DEFAULT


def why_partitioned(*operands: Any) -> str | None:
    """Why XLA is known to cut the operands into parts for several devices; None if it is not.

    Then their dimensions must stay what they are: XLA gathers an operand that is cut along a
    dimension which is folded with others, and refuses to where the types of arrays name the cut.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes:
        # Inside shard_map that mesh alone counts: what is closed over still names the one outside.
        left = _axes_left(mesh)
        return _selection.why_auto_axes(sorted(left, key=str)) if left else None
    shardings = [jax.typeof(x).sharding for x in operands]
    if any(map(_axes_left, (mesh, *(sharding.mesh for sharding in shardings)))):
        return _selection.PARTITIONED
    if any(axis for sharding in shardings for axis in _axes_of(sharding.spec)):
        return _selection.NAMED
    return None


def _axes_left(mesh: Any) -> set[Any]:
    """The axes, larger than 1, that are XLA's to cut along."""
    return {axis for axis in mesh.axis_names if mesh.shape[axis] > 1} - set(mesh.manual_axes)


def _axes_of(spec: Any) -> Iterator[Any]:
    for axes in spec:
        yield from axes if isinstance(axes, tuple) else () if axes is None else (axes,)


def why_not_dtypes(operands: Any, dtype: Any) -> str | None:
    """Why lax.dot_general has no product in `dtype` of operands of a dtype; None if it has."""
    matrix = ShapedArray((1, 1), operands)
    try:
        abstract_eval(matrix, matrix, transpose_a=False, transpose_b=False, dtype=dtype)
    except TypeError as error:
        return str(error)
    return None


def abstract_eval(a: Any, b: Any, **params: Any) -> Any:
    return lax.dot_general_p.abstract_eval(
        a,
        b,
        dimension_numbers=reference.dimension_numbers(params["transpose_a"], params["transpose_b"]),
        precision=None,
        preferred_element_type=params["dtype"],
        out_sharding=None,
    )


def _to_a(cotangent: Any, a: Any, b: Any, **params: Any) -> Any:
    """The cotangent of a, as a lies."""
    ta, tb = params["transpose_a"], params["transpose_b"]
    if ta:
        return _of_transpose(b, cotangent, tb, True, a.aval.dtype, params)
    return _of_transpose(cotangent, b, False, not tb, a.aval.dtype, params)


def _to_b(cotangent: Any, a: Any, b: Any, **params: Any) -> Any:
    """The cotangent of b, as b lies."""
    ta, tb = params["transpose_a"], params["transpose_b"]
    if tb:
        return _of_transpose(cotangent, a, True, ta, b.aval.dtype, params)
    return _of_transpose(a, cotangent, not ta, False, b.aval.dtype, params)


def _of_transpose(
    a: Any, b: Any, transpose_a: bool, transpose_b: bool, dtype: Any, params: dict[str, Any]
) -> Any:
    # Asking for "cuda", or for a tile, speaks of the op itself alone.
    return _bind(
        a,
        b,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        dtype=np.dtype(dtype),
        precision=params["precision"],
        implementation=of_transpose(params),
        config=resolve(OP, None),
    )


def _batch(operands: Any, dims: Any, **params: Any) -> Any:
    """A map over one operand makes its matrix longer; a map over both is lax's batched product."""
    (a, b), (da, db) = operands, dims
    if da is None:
        b, shape = longer(b, db, before=params["transpose_b"])
        result = matmul_p.bind(a, b, **params)
        return result.reshape(result.shape[0], *shape), 1
    if db is None:
        a, shape = longer(a, da, before=not params["transpose_a"])
        result = matmul_p.bind(a, b, **params)
        return result.reshape(*shape, result.shape[1]), 0
    if params["implementation"] == "cuda":
        raise NotImplementedError(
            f"{OP}: there are no kernels for a map over both operands; map one, or use "
            "implementation=None"
        )
    return jax.vmap(functools.partial(_reference, **params), (da, db))(a, b), 0


def longer(x: Any, d: int, *, before: bool) -> tuple[Any, tuple[int, int]]:
    """A mapped matrix as one matrix, its rows (or columns, unless `before`) times the map's.

    Returns:
        The matrix, and the sizes of the map and of the dimension that have become one.
    """
    x = jnp.moveaxis(x, d, 0 if before else 1)
    if before:
        size, rows, cols = x.shape
        return x.reshape(size * rows, cols), (size, rows)
    rows, size, cols = x.shape
    return x.reshape(rows, size * cols), (size, cols)


def _reference(a: Any, b: Any, *, implementation: Any, config: Any, **params: Any) -> Any:
    return reference.matmul(a, b, **params)


def lower(
    ctx: Any, *operands: Any, op: str, reference: Any, cuda: Any, most: int, **params: Any
) -> Any:
    """The lowering rule of products: the kernel or the reference, on the operands as they are.

    Args:
        ctx: the lowering context.
        operands: the two factors, then whatever else the op has.
        op: its name.
        reference: the op in jax.lax.
        cuda: the op by its kernel, on so many SMs (`num_sms`).
        most: the largest dimension that the kernel counts.
        params: those of the primitive.
    """
    rule = reference
    empty = any(0 in aval.shape for aval in (*ctx.avals_in, *ctx.avals_out))
    if params["implementation"] != "reference" and not empty:
        decision = _decide(op, ctx, most, params)
        if decision.path == "cuda":
            rule = functools.partial(cuda, num_sms=num_sms(ctx))
        else:
            fall_back(op, params["implementation"], decision)
    return mlir.lower_fun(rule, multiple_results=False)(ctx, *operands, **params)


def _decide(op: str, ctx: Any, most: int, params: dict[str, Any]) -> _selection.Decision:
    platforms = ctx.module_context.platforms
    if tuple(platforms) != ("cuda",):
        return _selection.Decision("reference", _selection.why_platform(op, *platforms))
    x, w, *_ = ctx.avals_in
    taken = (jnp.bfloat16, np.float16) if x.dtype == jnp.float8_e4m3fn else (x.dtype,)
    if x.dtype != w.dtype or params["dtype"] not in (*taken, np.float32):
        return _selection.Decision(
            "reference", _selection.why_mixed(op, x.dtype, w.dtype, params["dtype"])
        )
    largest = max(max(aval.shape) for aval in (*ctx.avals_in, *ctx.avals_out))
    if largest > most:
        return _selection.Decision("reference", _selection.why_too_long(op, largest, most))
    if params["implementation"] is None and params["config"].tile is None:
        return _selection.Decision("reference", _selection.SLOWER)
    if _compat.is_partitioned(ctx):
        return _selection.Decision("reference", _selection.PARTITIONED)
    devices = _compat.program_devices(ctx)
    alone = [[i] for i in range(len(devices or ()))]
    return _selection.decide(op, x.dtype, alone, devices, _compat.auto_axes(ctx))


def num_sms(ctx: Any) -> int:
    """The SMs that a plan may count on: those of the smallest device that may run the program."""
    devices = _compat.program_devices(ctx)
    found = _selection.num_sms(devices) if devices else None
    return found or hardware.lookup(devices[0].device_kind if devices else None).num_sms


def _cuda(a: Any, b: Any, *, num_sms: int, **params: Any) -> Any:
    m, n, k = _sizes(a, b, params["transpose_a"], params["transpose_b"])
    plan = matmul_model.choose(m, n, k, num_sms, params["config"].tile, a.dtype.itemsize)
    names = ("transpose_a", "transpose_b", "dtype")
    return call(a, b, plan=plan, **{name: params[name] for name in names})


def _sizes(a: Any, b: Any, transpose_a: bool, transpose_b: bool) -> tuple[int, int, int]:
    m, k = a.shape[::-1] if transpose_a else a.shape
    return m, b.shape[0] if transpose_b else b.shape[1], k


def call(
    a: Any,
    b: Any,
    *,
    bias: Any = None,
    activation: str | None = None,
    scale_x: Any = None,
    scale_w: Any = None,
    transpose_a: bool,
    transpose_b: bool,
    dtype: Any,
    plan: matmul_model.Plan,
) -> Any:
    """The custom call, on operands with rows of whole 16 bytes; the bias goes with the result's.

    Of float8 both operands lie with k contiguous, since tensor cores take no others, and a result
    in float16 is made in float32.
    """
    m, n, k = _sizes(a, b, transpose_a, transpose_b)
    made = dtype
    if a.dtype == jnp.float8_e4m3fn:
        a, b = a.T if transpose_a else a, b if transpose_b else b.T
        transpose_a, transpose_b = False, True
        made = np.float32 if dtype == np.float16 else dtype
        if bias is not None and bias.dtype != jnp.bfloat16:
            bias = lax.convert_element_type(bias, np.float32)
    more = [] if scale_x is None else [scale_x, scale_w]
    more += [] if bias is None else [padded(bias, ALIGNMENT)]
    result = jax.ShapeDtypeStruct((m, n + -n % ALIGNMENT), made)
    out = jax.ffi.ffi_call("pk_jax_matmul", result)(
        padded(a),
        padded(b),
        *more,
        scales=np.bool_(scale_x is not None),
        bias=np.bool_(bias is not None),
        activation=activation or "none",
        m=np.int64(m),
        n=np.int64(n),
        k=np.int64(k),
        transpose_a=np.bool_(transpose_a),
        transpose_b=np.bool_(transpose_b),
        tile=plan.tile,
        num_blocks=np.int64(plan.num_blocks),
        split_tiles=np.int64(plan.split_tiles),
        split=np.int64(plan.split),
    )
    return lax.convert_element_type(out if n % ALIGNMENT == 0 else out[:, :n], dtype)


def padded(x: Any, multiple: int | None = None) -> Any:
    """The matrices of an operand with rows of whole 16 bytes, zeros where there was nothing.

    Or of a multiple of so many elements.
    """
    missing = -x.shape[-1] % (multiple or 16 // x.dtype.itemsize)
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


matmul_p.def_impl(functools.partial(_compat.run_eagerly, matmul_p))
matmul_p.def_effectful_abstract_eval(abstract_eval)
ad.defbilinear(matmul_p, _to_a, _to_b)
batching.primitive_batchers[matmul_p] = _batch
mlir.register_lowering(
    matmul_p,
    functools.partial(lower, op=OP, reference=_reference, cuda=_cuda, most=MOST_SIZE),
)

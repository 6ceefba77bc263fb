"""Matrix products with a collective before or after them.

The pair of tensor parallelism: :func:`all_gather_matmul` enters a layer whose weights are cut by
columns, :func:`matmul_reduce_scatter` leaves one whose weights are cut by rows, and between layers
each rank has its rows of the activations (Korthikanti et al., arXiv:2205.05198). Where activations
are whole on every rank, :func:`matmul_all_reduce` is the way out. That the transfer can hide behind
the product is from Wang et al., "Overlap Communication with Dependent Computation via
Decomposition", ASPLOS 2023.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pk_jax import collectives
from pk_jax import config as _config
from pk_jax._primitives import checks, fused, product_checks, product_types
from pk_jax._primitives import collective_matmul as _collective
from pk_jax._primitives import matmul as _matmul
from pk_jax._tuning import few_rows_model
from pk_jax.config import Config
from pk_jax.local_matmul import matmul


def all_gather_matmul(
    x: Any,
    w: Any,
    axis_name: Any,
    *,
    axis: int = -2,
    preferred_element_type: Any = None,
    return_gathered: bool = False,
    save_gathered: bool = True,
    implementation: str | None = None,
    config: Config | None = None,
) -> Any:
    """The ranks' rows of x, times w: ``all_gather(x, axis_name, axis=axis, tiled=True) @ w``.

    Several weights share one gather. Products are accumulated in fp32 and rounded once. Where the
    cost model expects it to be faster one kernel gathers and multiplies, by the widest weight, as
    rows arrive; else the kernels, or ``jax.lax``, do so one after the other.

    The gradient of x is one :func:`matmul_reduce_scatter` with w transposed, whatever the number of
    weights. That of w reads the gathered x, which the forward pass has made: n * m * k elements are
    kept for it. With ``save_gathered=False`` x alone is kept, m * k elements, and gathered again.

    Args:
        x: [..., m, k], this rank's part along `axis`; its leading dimensions are rows too.
        w: [k, p], or a sequence of [k, p_i]. Each rank has its own columns, or all have the same.
        axis_name: the mesh axis or axes to gather over, n ranks in all.
        axis: the dimension of x that is gathered, any but the last.
        preferred_element_type: dtype of the products; None is that of ``jnp.result_type(x, w)``.
        return_gathered: also return the gathered x.
        save_gathered: keep the gathered x for the gradient of w.
        implementation: "cuda" runs the one kernel (float16 or bfloat16 operands of one dtype,
            products of that dtype or float32) or those of ``pk.all_gather`` and ``pk.matmul``;
            where they cannot run the reason is a NotImplementedError. "reference" is ``jax.lax``.
            None is the one kernel too; else it gathers by the kernel where that can run, and
            multiplies as ``pk.matmul`` does.
        config: the knobs ``schedule``, ``num_comm_sms`` and ``tile``. "inter_sm" (some SMs push
            rows to peers, the others multiply) and "intra_sm" (every SM does both) are one kernel,
            with tiles (128, 256) and (128, 128), where it can run; "sequential" is one after the
            other, with the tiles of ``pk.matmul``.

    Returns:
        [..., n * m, p]; for a sequence the tuple of them. With return_gathered a tuple in any case,
        with the gathered x, [..., n * m, k], last.

    Raises:
        TypeError: an operand is not an array of numbers, or they have no product of the dtype.
        ValueError: shapes that do not fit, a sequence of no weights, a dimension that is not one
            of rows, or a knob that the op does not have.
        NotImplementedError: an operand is typed as "reduced" or "unreduced" over the axis.

    The projections of attention, from rows that are cut over "tp"; each GPU has its heads::

        >>> @jax.shard_map(mesh=mesh, in_specs=(P("tp"), (P(None, "tp"),) * 3), out_specs=...)
        ... def f(x, w):                                 # x: [m, k], w: three of [k, p]
        ...     q, k, v = pk.all_gather_matmul(x, w, "tp")  # each [n * m, p]
    """
    op = "all_gather_matmul"
    axes, resolved = _resolve(op, axis_name, implementation, config)
    several = isinstance(w, (list, tuple))
    ws = list(w) if several else [w]
    if not ws:
        raise ValueError(f"{op}: w is an empty sequence; give one weight, or call all_gather")
    product_checks.check_operand(op, "x", x)
    at = product_checks.check_row_dimension(op, "axis", axis, x.shape)
    for i, each in enumerate(ws):
        name = f"w[{i}]" if several else "w"
        product_checks.check_operand(op, name, each)
        product_checks.check_factors(op, x, each, name, axes, "rows")
        product_checks.check_states(op, axes, x=x, **{name: each})
        product_checks.common_dtype(op, x=x, **{name: each})
    return_gathered = checks.check_flag(op, "return_gathered", return_gathered)
    save_gathered = checks.check_flag(op, "save_gathered", save_gathered)
    if axes and not _in_parts(op, implementation, resolved, x, *ws):
        gathered, *ys = _collective.all_gather_matmul(
            _in_rows(x, at),
            ws,
            axes,
            dtype=product_checks.result_dtype(op, x.dtype, preferred_element_type),
            precision=_matmul.precision_of_call(),
            save_gathered=save_gathered,
            strict=_is_strict(config),
            implementation=implementation,
            config=resolved,
        )
        shape = (*x.shape[:at], checks.bound_size(axes) * x.shape[at], *x.shape[at + 1 : -1])
        gathered, *ys = (lax.reshape(y, (*shape, y.shape[-1])) for y in (gathered, *ys))
    else:
        gathered, *ys = _gather_first(
            x, ws, axes, at, preferred_element_type, implementation, resolved
        )
    if return_gathered:
        return *ys, gathered
    return tuple(ys) if several else ys[0]


def matmul_reduce_scatter(
    x: Any,
    w: Any,
    axis_name: Any,
    *,
    scatter_dimension: int = -2,
    preferred_element_type: Any = None,
    implementation: str | None = None,
    config: Config | None = None,
) -> jax.Array:
    """This rank's rows of the sum of x @ w over ranks, which have parts of x and w along k.

    Equals ``psum_scatter(x @ w, axis_name, scatter_dimension=scatter_dimension, tiled=True)``. A
    product is accumulated in fp32 and rounded once, to the result's dtype or to
    ``config.reduce_dtype``, before it crosses the link; what has come is added in rank order in
    fp32, to an own part that may be unrounded, and the sum is rounded once. Where ``jax.lax`` sums
    on GPUs, because pk's kernels cannot run, it adds in an order of its own. Where the cost model
    expects it to be faster one kernel multiplies and sums, so that finished tiles travel while the
    next are made; else the kernels, or ``jax.lax``, do so one after the other.

    Its gradients share one :func:`all_gather_matmul`, of the cotangent with w transposed: the
    gradient of x is its product, that of w reads what it has gathered. x and w are kept for it.

    Args:
        x: [..., m, k], this rank's columns of a larger matrix; its leading dimensions are rows too.
        w: [k, p], the rows of the weights that go with them.
        axis_name: the mesh axis or axes to sum over, n ranks in all.
        scatter_dimension: the dimension of x of whose rows each rank keeps a part, any but the
            last; divisible by n.
        preferred_element_type: dtype of the result; None is that of ``jnp.result_type(x, w)``.
        implementation: "cuda" runs the one kernel (float16 or bfloat16, one dtype of operands,
            result and what crosses the link) or those of ``pk.matmul`` and ``pk.psum_scatter``;
            where they cannot run the reason is a NotImplementedError. "reference" is ``jax.lax``.
            None is the one kernel too; else it multiplies as ``pk.matmul`` does, and sums by the
            kernel where that can run.
        config: the knobs ``schedule``, ``num_comm_sms``, ``tile`` and ``reduce_dtype`` (of
            floating-point results alone). "intra_sm" (every SM multiplies, sends and sums) is the
            one kernel where it can run, with tiles of (128, 256), or (128, 64) for up to 128 rows
            in all, and no ``num_comm_sms``; "sequential" is one after the other, with the tiles of
            ``pk.matmul``.

    Returns:
        [..., m / n, p].

    Raises:
        TypeError: an operand is not an array of numbers, or they have no product or no sum of the
            dtype.
        ValueError: shapes that do not fit, rows that cannot be cut, operands that are typed as
            equal on all ranks, or a knob that the op does not have.
        NotImplementedError: an operand is typed as "reduced" or "unreduced" over the axis.

    The second half of a layer, whose first half is :func:`all_gather_matmul`::

        >>> @jax.shard_map(mesh=mesh, in_specs=(P(None, "tp"), P("tp")), out_specs=P("tp"))
        ... def f(h, w_down):                                  # h: [m, k], w_down: [k, p]
        ...     return pk.matmul_reduce_scatter(h, w_down, "tp")  # [m / n, p]
    """
    op = "matmul_reduce_scatter"
    axes, resolved = _resolve(op, axis_name, implementation, config)
    product_checks.check_operand(op, "x", x)
    at = product_checks.check_row_dimension(op, "scatter_dimension", scatter_dimension, x.shape)
    x, w, dtype = _summands(op, x, w, axes, preferred_element_type, config)
    product_checks.check_scattered(op, x.shape, at, axes)
    options = {"dtype": dtype, "implementation": implementation, "config": resolved}
    if not axes or _in_parts(op, implementation, resolved, x, w):
        scatter = {"scatter_dimension": at, "tiled": True}
        return _sum_last("psum_scatter", x, w, axes, scatter, **options)
    y = _collective.matmul_reduce_scatter(
        [_in_rows(x, at), w],
        axes,
        precision=_matmul.precision_of_call(),
        strict=_is_strict(config),
        **options,
    )
    rows = (*x.shape[:at], x.shape[at] // checks.bound_size(axes), *x.shape[at + 1 : -1])
    return lax.reshape(y, (*rows, w.shape[1]))


def matmul_all_reduce(
    x: Any,
    w: Any,
    axis_name: Any,
    *,
    preferred_element_type: Any = None,
    implementation: str | None = None,
    config: Config | None = None,
) -> jax.Array:
    """The sum of x @ w over ranks, on all of them: ``psum(x @ w, axis_name)``.

    Rounded and summed as :func:`matmul_reduce_scatter`; all ranks have the same bits. Its gradients
    are products alone under ``jax.shard_map(check_vma=True)``, where the cotangent is known to be
    the same on all ranks; with ``check_vma=False`` the cotangent is summed first, as that of
    ``jax.lax.psum`` is.

    Args:
        x: [..., k], this rank's columns of a larger matrix.
        w: [k, p], the rows of the weights that go with them.
        axis_name: the mesh axis or axes to sum over.
        preferred_element_type: dtype of the result; None is that of ``jnp.result_type(x, w)``.
        implementation: as in :func:`matmul_reduce_scatter`, with ``pk.psum``.
        config: the knobs of :func:`matmul_reduce_scatter`.

    Returns:
        [..., p], typed as equal on all ranks.

    Raises:
        TypeError: as in :func:`matmul_reduce_scatter`.
        ValueError: likewise; any number of rows will do.

    A step of decoding, whose few rows every GPU has::

        >>> @jax.shard_map(mesh=mesh, in_specs=(P(None, "tp"), P("tp")), out_specs=P())
        ... def f(h, w_down):                              # h: [m, k], w_down: [k, p]
        ...     return pk.matmul_all_reduce(h, w_down, "tp")  # [m, p], the same on every GPU
    """
    op = "matmul_all_reduce"
    axes, resolved = _resolve(op, axis_name, implementation, config)
    product_checks.check_operand(op, "x", x)
    x, w, dtype = _summands(op, x, w, axes, preferred_element_type, config)
    options = {"dtype": dtype, "implementation": implementation, "config": resolved}
    if not axes or _in_parts(op, implementation, resolved, x, w):
        return _sum_last("psum", x, w, axes, {}, **options)
    y = _collective.matmul_all_reduce(
        [_in_rows(x, 0), w],
        axes,
        precision=_matmul.precision_of_call(),
        strict=_is_strict(config),
        **options,
    )
    return lax.reshape(y, (*x.shape[:-1], w.shape[1]))


def _resolve(
    op: str, axis_name: Any, implementation: str | None, config: Config | None
) -> tuple[tuple[Any, ...], Config]:
    """The axes and the Config that an op runs with."""
    _config.check_implementation(op, implementation)
    resolved = _config.resolve(op, config)
    if config is not None and config.schedule == "sequential" and _has_few_rows_tile(config):
        raise ValueError(
            f"{op} cannot honour config.tile={config.tile} with schedule='sequential': that tile "
            "is the one of a single kernel for few rows; leave one of the two out"
        )
    return checks.check_axes(op, axis_name), resolved


def _is_strict(config: Config | None) -> bool:
    """Whether one kernel is asked for by the call itself: what is a default gives way."""
    return config is not None and (config.schedule is not None or _has_few_rows_tile(config))


def _has_few_rows_tile(config: Config) -> bool:
    return config.tile == few_rows_model.TILE


def _in_parts(op: str, implementation: str | None, config: Config, *operands: Any) -> bool:
    """Whether the collective and the product are bound apart, on the operands as they are."""
    dtypes = sorted({operand.dtype.name for operand in operands})
    reason = _matmul.why_partitioned(*operands)
    if len(dtypes) > 1:
        reason = f"the operands have dtypes {' and '.join(dtypes)}; convert them to one"
    if reason is not None:
        fused.refuse(op, implementation, config, reason)
    return reason is not None


def _in_rows(x: Any, at: int) -> Any:
    """An x as [outer, rows, k], the rows beginning with a dimension."""
    sizes = (math.prod(x.shape[:at]), math.prod(x.shape[at:-1]), x.shape[-1])
    return x if x.shape == sizes else lax.reshape(x, sizes)


def _summands(
    op: str, x: Any, w: Any, axes: tuple[Any, ...], preferred: Any, config: Config | None
) -> tuple[Any, Any, Any]:
    """The operands of a sum over ranks in one dtype, and the dtype of the sum; all are checked."""
    product_checks.check_operand(op, "w", w)
    product_checks.check_factors(op, x, w, "w", axes, "k")
    product_checks.check_states(op, axes, x=x, w=w)
    common = product_checks.common_dtype(op, x=x, w=w)
    dtype = product_checks.result_dtype(op, common, preferred)
    product_checks.check_summed(op, x, w, axes, dtype)
    wire = config.reduce_dtype if config is not None else None
    if wire is not None and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"{op} cannot honour config.reduce_dtype={wire!r} for a result of dtype {dtype}; it "
            "goes with floating-point results"
        )
    return lax.convert_element_type(x, common), lax.convert_element_type(w, common), dtype


def _gather_first(
    x: Any,
    ws: list[Any],
    axes: tuple[Any, ...],
    at: int,
    preferred: Any,
    implementation: str | None,
    config: Config,
) -> Any:
    """The gather, of x in its own dtype, and after it the products; dimensions stay as they are."""
    own: dict[str, Any] = {"implementation": implementation}
    if axes:
        part = _config.part_of(config, "all_gather")
        x = collectives.all_gather(x, axes, axis=at, tiled=True, config=part, **own)
    own |= {"config": _config.part_of(config, "matmul"), "preferred_element_type": preferred}
    return x, *(matmul(x, w, **own) for w in ws)


def _sum_last(
    op: str,
    x: Any,
    w: Any,
    axes: tuple[Any, ...],
    options: dict[str, Any],
    *,
    dtype: Any,
    implementation: str | None,
    config: Config,
) -> Any:
    """The product, and after it the sum; dimensions stay as they are."""
    part = matmul(
        x,
        w,
        preferred_element_type=dtype,
        implementation=implementation,
        config=_config.part_of(config, "matmul"),
    )
    if not axes:
        return part
    total = getattr(collectives, op)(
        lax.convert_element_type(part, product_types.wire_dtype(config, dtype)),
        axes,
        implementation=implementation,
        config=_config.part_of(config, op),
        **options,
    )
    return lax.convert_element_type(total, dtype)

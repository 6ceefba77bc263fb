"""The collectives, with jax.lax's signatures and semantics.

Every function runs inside ``jax.shard_map``, under ``jit``, ``grad``, ``vmap``, ``scan`` and
``remat``, on any axis of any mesh. ``axis_name`` is a name or a tuple of names; the ranks of a
tuple are in row-major order of the tuple as given. Beside lax's arguments all take

* ``implementation``: None runs the CUDA kernels where they can run and ``jax.lax`` elsewhere (the
  reason is logged once by the logger ``pk_jax``); "cuda" raises that reason as a
  NotImplementedError; "reference" is always ``jax.lax``.
* ``config``: a :class:`pk_jax.Config`. A knob that the op does not have, or a value of it, is a
  ValueError that names what there is.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pk_jax import config as _config
from pk_jax._primitives import checks, exchanges, gathers, ragged, reductions
from pk_jax._reference import collectives as reference
from pk_jax.config import Config

AxisName = Any
Groups = Sequence[Sequence[int]] | None

_TO = ("varying", "invarying", "reduced")


def all_gather(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    axis: int = 0,
    tiled: bool = False,
    to: str = "varying",
    implementation: str | None = None,
    config: Config | None = None,
) -> Any:
    """Gathers every rank's x on every rank, as ``jax.lax.all_gather`` does.

    Args:
        x: an array or a pytree of arrays, of any dtype.
        axis_name: the mesh axis or axes to gather over.
        axis_index_groups: lists of indices of the axis, all of one size and holding each index
            once; each gathers for itself.
        axis: where the ranks' parts lie in the result.
        tiled: concatenate the parts along the existing dimension `axis` instead of stacking them
            along a new one.
        to: the type of the result: "varying" over the axis, "invarying" (known to be equal on all
            ranks; the transpose is a slice) or "reduced".
        implementation: None, "cuda" or "reference".
        config: the knobs ``mechanism`` ("register", "tma" or "copy_engine") and ``num_comm_sms``.

    Returns:
        x with a new dimension of the size of the axis at `axis`, or with dimension `axis` that
        many times larger if tiled.

    Four GPUs that hold two rows each::

        >>> @jax.shard_map(mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
        ... def f(x):                                    # x: [2, 3]
        ...     return pk.all_gather(x, "tp", tiled=True)  # [8, 3], the same on every GPU
    """
    op = "all_gather"
    resolved = _resolve(op, implementation, config)
    if to not in _TO:
        raise ValueError(f"{op}: to must be one of {_TO}, got {to!r}")
    axes = checks.check_axes(op, axis_name)
    if not axes:
        return x
    groups = checks.check_groups(op, axis_index_groups, axes)
    if groups is not None and to != "varying":
        raise NotImplementedError(f"{op}: to={to!r} takes no axis_index_groups; use to='varying'")
    tiled = checks.check_flag(op, "tiled", tiled)

    def gather(leaf: Any) -> Any:
        return gathers.all_gather(
            leaf,
            axes,
            axis_index_groups=groups,
            axis=checks.check_dimension(op, "axis", axis, np.ndim(leaf) + (not tiled)),
            tiled=tiled,
            to=to,
            implementation=implementation,
            config=resolved,
            strict=_is_strict(implementation, config),
        )

    return jax.tree.map(gather, x)


def psum_scatter(
    x: Any,
    axis_name: AxisName,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Groups = None,
    tiled: bool = False,
    implementation: str | None = None,
    config: Config | None = None,
) -> Any:
    """Sums x over the ranks and leaves each its part, as ``jax.lax.psum_scatter`` does.

    Args:
        x: an array or a pytree of arrays.
        axis_name: the mesh axis or axes to sum over.
        scatter_dimension: the dimension of x of which each rank keeps a part.
        axis_index_groups: lists of indices of the axis, all of one size and holding each index
            once; each sums for itself.
        tiled: keep `scatter_dimension`, smaller by the number of ranks; without it the dimension
            must equal that number and is dropped.
        implementation: None, "cuda" or "reference".
        config: the knob ``num_comm_sms``.

    Returns:
        This rank's part of the sum.
    """
    op = "psum_scatter"
    resolved = _resolve(op, implementation, config)
    axes = checks.check_axes(op, axis_name)
    if not axes:
        return x
    groups = checks.check_groups(op, axis_index_groups, axes)
    tiled = checks.check_flag(op, "tiled", tiled)

    def scatter(leaf: Any) -> Any:
        return gathers.psum_scatter(
            leaf,
            axes,
            scatter_dimension=checks.check_dimension(
                op, "scatter_dimension", scatter_dimension, np.ndim(leaf)
            ),
            axis_index_groups=groups,
            tiled=tiled,
            implementation=implementation,
            config=resolved,
        )

    return jax.tree.map(scatter, x)


def psum(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    implementation: str | None = None,
    config: Config | None = None,
) -> Any:
    """Sums x over the ranks, as ``jax.lax.psum`` does.

    The kernels sum floating-point numbers in rank order, 16-bit ones in 32 bits and rounded once;
    the hierarchical path rounds between its levels.

    Args:
        x: a number, an array or a pytree of them; what is not traced gives a constant, so
            ``psum(1, axis_name)`` is the number of ranks. Booleans count as integers.
        axis_name: the mesh axis or axes to sum over.
        axis_index_groups: lists of indices of the axis, holding each index once; each sums for
            itself. Needs ``jax.shard_map(..., check_vma=False)``, as in lax. Groups of different
            sizes take the reference.
        implementation: None, "cuda" or "reference".
        config: the knob ``num_comm_sms``.

    Returns:
        The sum, of the shape of x.
    """
    return _reduce("psum", x, axis_name, axis_index_groups, implementation, config)


def pmean(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    implementation: str | None = None,
    config: Config | None = None,
) -> Any:
    """The mean of x over the ranks, as ``jax.lax.pmean`` does; arguments as :func:`psum`."""
    total = _reduce("pmean", x, axis_name, axis_index_groups, implementation, config)
    size = reference.psum(1, axis_name, axis_index_groups=axis_index_groups)
    return jax.tree.map(lambda leaf: leaf / size, total)


def pmax(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    implementation: str | None = None,
    config: Config | None = None,
) -> Any:
    """The largest x over the ranks, as ``jax.lax.pmax`` does; arguments as :func:`psum`."""
    return _reduce("pmax", x, axis_name, axis_index_groups, implementation, config)


def pmin(
    x: Any,
    axis_name: AxisName,
    *,
    axis_index_groups: Groups = None,
    implementation: str | None = None,
    config: Config | None = None,
) -> Any:
    """The smallest x over the ranks, as ``jax.lax.pmin`` does; arguments as :func:`psum`."""
    return _reduce("pmin", x, axis_name, axis_index_groups, implementation, config)


def all_to_all(
    x: Any,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Groups = None,
    tiled: bool = False,
    implementation: str | None = None,
    config: Config | None = None,
) -> Any:
    """Sends part i of x to rank i, as ``jax.lax.all_to_all`` does.

    Args:
        x: an array or a pytree of arrays.
        axis_name: the mesh axis or axes.
        split_axis: the dimension of x that is cut in one part per rank.
        concat_axis: the dimension of the result along which the received parts lie.
        axis_index_groups: lists of indices of the axis, all of one size and holding each index
            once; each exchanges for itself.
        tiled: cut `split_axis` in equal chunks and keep the number of dimensions; without it the
            dimension must equal the number of ranks and moves to `concat_axis`.
        implementation: None, "cuda" or "reference".
        config: the knobs ``mechanism`` ("register" or "tma") and ``num_comm_sms``.

    Returns:
        The received parts, joined along `concat_axis`.
    """
    op = "all_to_all"
    resolved = _resolve(op, implementation, config)
    axes = checks.check_axes(op, axis_name)
    groups = checks.check_groups(op, axis_index_groups, axes)
    tiled = checks.check_flag(op, "tiled", tiled)

    def exchange(leaf: Any) -> Any:
        return exchanges.all_to_all(
            leaf,
            axes,
            checks.check_dimension(op, "split_axis", split_axis, np.ndim(leaf)),
            checks.check_dimension(op, "concat_axis", concat_axis, np.ndim(leaf)),
            axis_index_groups=groups,
            tiled=tiled,
            implementation=implementation,
            config=resolved,
            strict=_is_strict(implementation, config),
        )

    return jax.tree.map(exchange, x)


def ppermute(
    x: Any,
    axis_name: AxisName,
    perm: Sequence[tuple[int, int]],
    *,
    implementation: str | None = None,
    config: Config | None = None,
) -> Any:
    """Sends x from rank to rank along `perm`, as ``jax.lax.ppermute`` does.

    Args:
        x: an array or a pytree of arrays.
        axis_name: the mesh axis, or axes in the order of the mesh's, as lax insists.
        perm: pairs (source, destination) of ranks, each rank at most once in either place.
        implementation: None, "cuda" or "reference".
        config: the knobs ``mechanism`` ("register" or "tma") and ``num_comm_sms``.

    Returns:
        What this rank received; zeros if it is no pair's destination.
    """
    op = "ppermute"
    resolved = _resolve(op, implementation, config)
    axes = checks.check_axes(op, axis_name, like_reduction=True, positions=False)
    pairs = checks.check_permutation(op, perm, axes)

    def permute(leaf: Any) -> Any:
        return exchanges.ppermute(
            leaf,
            axes,
            pairs,
            implementation=implementation,
            config=resolved,
            strict=_is_strict(implementation, config),
        )

    return jax.tree.map(permute, x)


def ragged_all_to_all(
    operand: Any,
    output: Any,
    input_offsets: Any,
    send_sizes: Any,
    output_offsets: Any,
    recv_sizes: Any,
    *,
    axis_name: AxisName,
    axis_index_groups: Groups = None,
    implementation: str | None = None,
    config: Config | None = None,
) -> Any:
    """Sends slices of different sizes to the ranks, as ``jax.lax.ragged_all_to_all`` does.

    Each rank sends k slices of the leading dimension of `operand` to each of the n ranks: slice i
    goes to rank i // k. On CPU, where XLA has no such operation, dense collectives stand for it.

    Args:
        operand: an array [N, ...].
        output: an array [M, ...] of the same dtype; rows where nothing arrives keep their values.
        input_offsets: integers [n * k], where the slices start in `operand`.
        send_sizes: integers [n * k], their rows; 0 sends nothing.
        output_offsets: integers [n * k], where they go in the `output` of their receivers.
        recv_sizes: integers [n * k], the rows that arrive: `send_sizes` after an all_to_all.
        axis_name: the mesh axis or axes.
        axis_index_groups: lists of indices of the axis, all of one size and holding each index
            once; each exchanges for itself.
        implementation: None, "cuda" or "reference".
        config: the knobs ``mechanism`` ("register" alone) and ``num_comm_sms``.

    Returns:
        `output` with the received slices in place. A row that is not in `operand`, or whose place
        is not in `output`, does not move (XLA's own operation does not look: CUDA without the
        kernels). Where slices overlap in `output`, one of them stays.

    WARNING: where slices overlap in `operand`, its gradient is WRONG, as in lax: the cotangent of
    one of the places that a row goes to, not their sum. Repeat such rows if you differentiate.

    With ``PK_JAX_CHECKS=1`` when the program is compiled, such a row is a run-time error that names
    it and its rank. Unlike lax's, the result varies wherever an operand does.
    """
    op = "ragged_all_to_all"
    resolved = _resolve(op, implementation, config)
    axes = checks.check_axes(op, tuple(axis_name) if isinstance(axis_name, list) else axis_name)
    return ragged.ragged_all_to_all(
        operand,
        output,
        input_offsets,
        send_sizes,
        output_offsets,
        recv_sizes,
        axis_name=axes,
        axis_index_groups=checks.check_groups(op, axis_index_groups, axes),
        implementation=implementation,
        config=resolved,
    )


def _resolve(op: str, implementation: str | None, config: Config | None) -> Config:
    """The Config that an op runs with; its two own arguments are checked."""
    _config.check_implementation(op, implementation)
    return _config.resolve(op, config, together=implementation != "reference")


def _is_strict(implementation: str | None, config: Config | None) -> bool:
    """Whether the call itself, and not a default, names a mechanism that may be used."""
    return implementation != "reference" and config is not None and config.mechanism is not None


def _reduce(
    op: str,
    x: Any,
    axis_name: AxisName,
    axis_index_groups: Groups,
    implementation: str | None,
    config: Config | None,
) -> Any:
    """The common body of psum, pmax and pmin, and the sum of pmean; groups may differ in size."""
    resolved = _resolve(op, implementation, config)
    axes = checks.check_axes(op, axis_name, like_reduction=True)
    if axis_index_groups is not None and any(isinstance(name, int) for name in axes):
        raise ValueError(f"{op}: axis_index_groups goes with named axes only, got {axes}")
    groups = checks.check_groups(op, axis_index_groups, axes, equal_sizes=False)
    reduction = "psum" if op == "pmean" else op
    if reduction == "psum":
        checks.check_typed_groups(op, x, groups)

    def reduce(leaf: Any) -> Any:
        return reductions.reduce(
            reduction,
            leaf,
            axes,
            asked=op,
            axis_index_groups=groups,
            implementation=implementation,
            config=resolved,
        )

    return jax.tree.map(reduce, x) if axes else x

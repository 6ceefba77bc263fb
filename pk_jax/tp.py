"""Dense layers of tensor parallelism: which product with a collective a layer begins or ends with.

Megatron-LM's pair (Shoeybi et al., arXiv:1909.08053) is a layer whose weights are cut by columns,
followed by one whose weights are cut by rows; between the two each rank has some of the hidden
units. Before and after the pair ranks have either their rows of the activations (sequence
parallelism, Korthikanti et al., arXiv:2205.05198) or all of them:

    sequence_dimension     column_parallel_dense     row_parallel_dense
    of the rows            all_gather_matmul         matmul_reduce_scatter
    None, all rows         matmul                    matmul_all_reduce

Both are functions of arrays, for the modules of any library, inside ``jax.shard_map``.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pk_jax import _compat
from pk_jax._primitives import checks, product_checks
from pk_jax._reference import matmul as reference
from pk_jax.collective_matmul import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from pk_jax.config import Config
from pk_jax.local_matmul import matmul


def column_parallel_dense(
    x: Any,
    w: Any,
    axis_name: Any,
    *,
    bias: Any = None,
    sequence_dimension: int | None = -2,
    preferred_element_type: Any = None,
    save_gathered: bool = True,
    implementation: str | None = None,
    config: Config | None = None,
) -> Any:
    """The product x @ w + bias for this rank's columns of w and bias, and all rows of x.

    With a `sequence_dimension` the rows are gathered by :func:`pk_jax.all_gather_matmul`, one
    gather for several weights. With None every rank has them, and nothing is communicated in the
    forward pass. The gradient of x is, in the first case, one :func:`pk_jax.matmul_reduce_scatter`;
    in the second one ``jax.lax.psum`` by JAX's own rule for what is equal on all ranks, or, under
    ``check_vma=False``, a part of it on each rank, which are summed where x came from; of parts
    that ``jax.grad`` makes inside of ``shard_map``, with a :func:`row_parallel_dense` to all rows
    behind them, the sum is n times too large, and the mean is the gradient.

    Args:
        x: [..., m, k], this rank's rows along `sequence_dimension`; or all of them, if that is
            None.
        w: [k, p], or a sequence of [k, p_i] (query, key and value, say): this rank's columns.
        axis_name: the mesh axis or axes that weights are cut over, n ranks in all.
        bias: [p], what goes with these columns, or a sequence of [p_i] or None for the weights; of
            the operands' dtype or float32. It is added after the product is rounded, and the sum is
            rounded again.
        sequence_dimension: the dimension of x of which ranks have parts, any but the last. None: x
            is the same on all ranks.
        preferred_element_type: dtype of the result; None is that of ``jnp.result_type(x, w)``.
        save_gathered: keep the gathered x, n * m * k elements, for the gradient of w; if not, it is
            gathered again. Without effect where `sequence_dimension` is None: nothing is gathered.
        implementation: as in :func:`pk_jax.all_gather_matmul`, or :func:`pk_jax.matmul`.
        config: the knobs of that op.

    Returns:
        [..., n * m, p], or [..., m, p] if every rank has all rows; for a sequence of weights the
        tuple of them.

    Raises:
        TypeError: an operand or a bias is not an array of numbers of a dtype that goes with the
            others; save_gathered is no flag.
        ValueError: shapes that do not fit; not as many biases as weights; x is typed as equal on
            all ranks although its rows are to be gathered, or as different although they are not;
            a knob that the op does not have.
        NotImplementedError: with ``implementation="cuda"``, why the kernels cannot run.

    The gated half of a feed-forward layer, from rows that are cut over "tp"::

        >>> gate, up = pk.tp.column_parallel_dense(x, (w_gate, w_up), "tp")  # each [n * m, p]
        >>> y = pk.tp.row_parallel_dense(jax.nn.silu(gate) * up, w_down, "tp")  # [m, k]
    """
    op = "column_parallel_dense"
    several = isinstance(w, (list, tuple))
    ws = list(w) if several else [w]
    if not ws:
        raise ValueError(f"{op}: w is an empty sequence; give one weight at least")
    axes = checks.check_axes(op, axis_name)
    _check_rows(op, x, axes, sequence_dimension)
    biases = _biases(op, ws, bias, several)
    save_gathered = checks.check_flag(op, "save_gathered", save_gathered)
    options: dict[str, Any] = {
        "preferred_element_type": preferred_element_type,
        "implementation": implementation,
        "config": config,
    }
    if sequence_dimension is None:
        for each in ws:
            product_checks.check_operand(op, "w", each)
        # Once, before the products: each would cast x itself, and have a psum of its own behind it.
        x, *_ = _compat.vary_as_operands(x, *ws)
        products = [matmul(x, each, **options) for each in ws]
    else:
        options |= {"axis": sequence_dimension, "save_gathered": save_gathered}
        products = all_gather_matmul(x, ws, axes, **options)
    for each, b in zip(ws, biases, strict=True):
        _check_bias(op, b, x, each, axes)
    ys = tuple(map(_add, products, biases))
    return ys if several else ys[0]


def row_parallel_dense(
    x: Any,
    w: Any,
    axis_name: Any,
    *,
    bias: Any = None,
    sequence_dimension: int | None = -2,
    preferred_element_type: Any = None,
    implementation: str | None = None,
    config: Config | None = None,
) -> jax.Array:
    """The sum over ranks of x @ w, which have parts of both along k, plus a bias that is whole.

    With a `sequence_dimension` each rank keeps its rows, by :func:`pk_jax.matmul_reduce_scatter`;
    with None all ranks have all of them, by :func:`pk_jax.matmul_all_reduce`. Gradients are those
    of these ops; that of the bias is summed over ranks by JAX where each has its rows.

    Args:
        x: [..., m, k], this rank's columns, as :func:`column_parallel_dense` returns them.
        w: [k, p], the rows of the weights that go with them.
        axis_name: the mesh axis or axes to sum over, n ranks in all.
        bias: [p], all of it and the same on every rank, or None; of the operands' dtype or float32.
            It is added after the sum is rounded, and the result is rounded again.
        sequence_dimension: the dimension of x of whose rows each rank keeps a part, any but the
            last, divisible by n. None: every rank keeps all of them.
        preferred_element_type: dtype of the result; None is that of ``jnp.result_type(x, w)``.
        implementation: as in :func:`pk_jax.matmul_reduce_scatter`.
        config: the knobs of that op.

    Returns:
        [..., m / n, p], or [..., m, p], typed as equal on all ranks.

    Raises:
        TypeError: an operand or a bias is not an array of numbers of a dtype that goes with the
            others.
        ValueError: shapes that do not fit, rows that cannot be cut, an x or a w that is typed as
            equal on all ranks, a bias that is typed as different, or a knob that the op does not
            have.
        NotImplementedError: with ``implementation="cuda"``, why the kernels cannot run.

    The way out of a layer whose activations are whole on every rank::

        >>> y = pk.tp.row_parallel_dense(h, w_down, "tp", bias=b, sequence_dimension=None)  # [m, p]
    """
    op = "row_parallel_dense"
    axes = checks.check_axes(op, axis_name)
    options: dict[str, Any] = {
        "preferred_element_type": preferred_element_type,
        "implementation": implementation,
        "config": config,
    }
    if sequence_dimension is None:
        y = matmul_all_reduce(x, w, axes, **options)
    else:
        y = matmul_reduce_scatter(x, w, axes, scatter_dimension=sequence_dimension, **options)
    # After the op, whose messages of sizes say more.
    _check_parts(op, x, w, axes)
    _check_bias(op, bias, x, w, axes, whole=True)
    return _add(y, bias)


def _check_rows(op: str, x: Any, axes: tuple[Any, ...], sequence_dimension: int | None) -> None:
    """Raises where the type of x says that its rows lie otherwise than the caller does."""
    product_checks.check_operand(op, "x", x)
    if not _compat.check_vma() or checks.bound_size(axes) == 1:
        return
    varying = _varying(x, axes)
    if sequence_dimension is None and varying:
        raise ValueError(
            f"{op}: x is typed as different on the ranks of {varying}, so that each may have a "
            "part of its rows: name their dimension by sequence_dimension; or, if each has all "
            "rows, call pk_jax.matmul(x, w, bias=bias)"
        )
    if sequence_dimension is not None and not varying:
        raise ValueError(
            f"{op}: x is typed as equal on all ranks of {axes}, so that there are no rows to "
            "gather; pass sequence_dimension=None"
        )


def _check_parts(op: str, x: Any, w: Any, axes: tuple[Any, ...]) -> None:
    """Raises where a type says that ranks have the same, not parts along k, though sizes fit.

    The ops let that pass, as jax.lax does: of an x of each rank and one w for all, or the other way
    round, there is a sum. But it is none of a layer whose weights are cut by rows.
    """
    spec = repr(axes[0] if len(axes) == 1 else axes)
    for name, each, cut in (("x", x, f"P(..., {spec})"), ("w", w, f"P({spec}, None)")):
        if equal := product_checks.equal_over(each, axes):
            raise ValueError(
                f"{op}: {name} is typed as equal on all ranks of {equal}, so that it is not cut "
                f"along k; give each rank its part, in_specs {cut}, or, if they are to have the "
                f"same, use jax.lax.pcast({name}, {tuple(equal)}, to='varying')"
            )


def _biases(op: str, ws: Sequence[Any], bias: Any, several: bool) -> list[Any]:
    """A bias, or None, for each weight."""
    if bias is None:
        return [None] * len(ws)
    found = f"{len(bias)} in a sequence" if isinstance(bias, (list, tuple)) else "one value"
    wanted = f"{len(ws)} in a sequence" if several else "one value"
    if found != wanted:
        raise ValueError(f"{op}: bias must be {wanted}, as w is, got {found}")
    return list(bias) if several else [bias]


def _check_bias(
    op: str, bias: Any, x: Any, w: Any, axes: tuple[Any, ...], *, whole: bool = False
) -> None:
    """Raises unless a bias goes with the columns of w, which are all columns if `whole`."""
    if bias is None:
        return
    product_checks.check_operand(op, "bias", bias)
    own, cols, size = bias.shape, w.shape[1], checks.bound_size(axes)
    spec = repr(axes[0] if len(axes) == 1 else axes)
    if size > 1 and not whole and own == (cols * size,):
        raise ValueError(
            f"{op}: bias has {own[0]} numbers for {cols} columns of w, it is whole; give each rank "
            f"its part: in_specs P({spec})"
        )
    if size > 1 and whole and own != (cols,) and own == (cols // size,):
        raise ValueError(
            f"{op}: bias has {own[0]} numbers for {cols} columns of w, it is cut; give all of it "
            "to every rank: in_specs P()"
        )
    product_checks.check_epilogue(op, bias, None, cols, jnp.result_type(x, w))
    if whole and (varying := _varying(bias, axes)):
        raise ValueError(
            f"{op}: bias is typed as different on the ranks of {varying}, of which each would add "
            "its own; give the same to every rank: in_specs P()"
        )


def _varying(x: Any, axes: tuple[Any, ...]) -> list[Any]:
    """The axes of more than one rank over which x is typed as different, as far as types say."""
    if not _compat.check_vma():
        return []
    return [a for a in axes if a in _compat.varying_axes(x) and checks.bound_size([a]) > 1]


def _add(y: Any, bias: Any) -> Any:
    """The sum with a bias, or none, made in fp32 (fp64 where either is that) and rounded once."""
    if bias is None:
        return y
    dtype = reference.accumulated(bias.dtype, y.dtype)
    return lax.convert_element_type(y.astype(dtype) + bias.astype(dtype), y.dtype)

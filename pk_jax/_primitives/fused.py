"""Products with a collective in one kernel: where it can run, what it should cost, and its call.

A candidate of `collective_matmul.py`, beside the composition of `unfused.py`. Of a sum over pairs
both make one product, joined along k.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax
from jax.interpreters import mlir

from pk_jax import _compat, _selection
from pk_jax._primitives import (
    all_gather_matmul_call,
    few_rows_call,
    matmul_reduce_call,
    unfused,
)
from pk_jax._primitives.rules import call_site, fall_back
from pk_jax._tuning import (
    all_gather_matmul_model,
    cost_model,
    few_rows_model,
    hardware,
    matmul_model,
    matmul_reduce_model,
)
from pk_jax.config import Config

GATHER = "all_gather_matmul"
REDUCE = "matmul_all_reduce"


class Fused(NamedTuple):
    """A fused kernel that can run.

    Attributes:
        seconds: the expected time.
        unfused_seconds: that of the composition.
        rule: the lowering rule.
    """

    seconds: float
    unfused_seconds: float
    rule: Callable[..., Any]


def nothing_moves(ctx: Any, params: dict[str, Any]) -> bool:
    """Whether there is nothing to hide: one rank, or no elements."""
    empty = any(0 in aval.shape for aval in (*ctx.avals_in, *ctx.avals_out))
    return empty or params["axis_size"] == 1


def refuse(op: str, implementation: str | None, config: Config, reason: str) -> None:
    """Says once why an op runs as its parts, if one kernel was asked for; raises it with "cuda".

    What asks for one kernel: a schedule, or the tile of few rows, which no part has.
    """
    if config.schedule not in (None, "sequential"):
        asked = f"schedule={config.schedule!r}"
    elif config.tile == few_rows_model.TILE:
        asked = f"tile={config.tile}"
    else:
        return
    if implementation != "reference":
        fall_back(f"{op} with {asked}", implementation, _selection.Decision("unfused", reason))


def find(ctx: Any, op: str, params: dict[str, Any]) -> Fused | str:
    """The fused kernel of an op that is being lowered for CUDA, or why there is none."""
    groups = _compat.rank_groups(ctx, params["axis_name"], None)
    devices = _compat.mesh_devices(ctx)
    sizes = _sizes(ctx, op, params)
    reason = _why_not(ctx, op, params, sizes)
    if reason is None:
        dtype = ctx.avals_in[0].dtype
        decision = _selection.decide(op, dtype, groups, devices, _compat.auto_axes(ctx))
        reason = None if decision.path == "cuda" else decision.reason
    if reason is not None:
        return reason
    record = hardware.lookup(devices[0].device_kind if devices else None)
    num_sms = (_selection.num_sms(devices) if devices else None) or record.num_sms
    place = _Place(groups, record, num_sms)
    if op == GATHER:
        return _gather(place, sizes, params)
    tiles = (few_rows_model.TILE, (matmul_reduce_model.TILE.rows, matmul_reduce_model.TILE.cols))
    config = params["config"]
    if config.tile not in (None, *tiles):
        return f"the fused {op} has tiles of {tiles[0]} and {tiles[1]}, not {config.tile}"
    if config.num_comm_sms is not None:
        return f"in the fused {op} every SM sends: there are no num_comm_sms"
    few = _few_rows(op, place, sizes, params)
    # That tile as a default gives way where there are more rows than it has.
    if config.tile == tiles[0] and (isinstance(few, Fused) or params["strict"]):
        return few
    many = _sum(op, place, sizes, params)
    if config.tile is None and isinstance(few, Fused) and few.seconds < many.seconds:
        return few
    return many


class _Place(NamedTuple):
    """Where an op runs."""

    groups: Sequence[Sequence[int]]
    record: hardware.Hardware
    num_sms: int


class _Sizes(NamedTuple):
    """Those of x, the columns of each w, and the ranks; pairs are one x and one w, joined."""

    outer: int
    m: int
    k: int
    widths: list[int]
    ranks: int


def _sizes(ctx: Any, op: str, params: dict[str, Any]) -> _Sizes:
    (outer, m, k), ws = ctx.avals_in[0].shape, ctx.avals_in[1:]
    if op != GATHER:
        k, ws = sum(x.shape[2] for x in ctx.avals_in[::2]), ws[:1]
    widths = [w.shape[0] if params["transpose_w"] else w.shape[1] for w in ws]
    return _Sizes(outer, m, k, widths, params["axis_size"])


def _why_not(ctx: Any, op: str, params: dict[str, Any], sizes: _Sizes) -> str | None:
    """Why the kernels do not take these sizes and dtypes; None if they do."""
    x, *others = ctx.avals_in
    outer, m, k, widths, ranks = sizes
    dtype = params["dtype"]
    for other in others:
        if other.dtype != x.dtype:
            return _selection.why_mixed(op, x.dtype, other.dtype, dtype)
    if op != GATHER:
        dtypes = (x.dtype, params["wire"], dtype)
        return matmul_reduce_call.why_not(outer * m, k, widths[0], ranks, dtypes, op == REDUCE)
    if dtype not in (x.dtype, np.dtype("float32")):
        return _selection.why_mixed(op, x.dtype, x.dtype, dtype)
    return all_gather_matmul_call.why_not(outer, m, k, widths, ranks)


def _gather(place: _Place, sizes: _Sizes, params: dict[str, Any]) -> Fused | str:
    groups, record, num_sms = place
    outer, m, k, widths, ranks = sizes
    config = params["config"]
    tiles = [(tile.rows, tile.cols) for tile in all_gather_matmul_model.TILES]
    if config.tile not in (None, *tiles):
        return f"the fused {GATHER} has tiles {tiles}, not {config.tile}"
    intra_sm, num_comm = config.schedule == "intra_sm", config.num_comm_sms
    if intra_sm and num_comm is not None:
        return f"with schedule='intra_sm' no SM communicates alone, not num_comm_sms={num_comm}"
    if num_comm is not None and num_comm >= num_sms:
        return f"num_comm_sms={num_comm} leaves none of {num_sms} SMs to multiply"
    choose = functools.partial(
        all_gather_matmul_model.choose,
        record,
        m,
        max(widths),
        k,
        ranks,
        outer=outer,
        num_sms=num_sms,
        tile=config.tile,
        num_comm_blocks=0 if intra_sm else num_comm,
        least_comm_blocks=int(config.schedule == "inter_sm"),
    )
    # Where somebody reads the gathered x the kernel copies a rank's own rows beside the product, if
    # that is long and hides them; further products read it in any case. Else XLA does, if anybody
    # does: what is hidden takes time too, by the power limit (decision 0013).
    plan, hurried = choose(own_rows=True), choose(own_rows=False)
    hidden = plan.seconds <= _HIDDEN * hurried.seconds
    own_rows = len(widths) > 1 or (params["reads_gathered"] and hidden)
    plan = plan if own_rows else hurried
    rows = outer * ranks * m
    products = [matmul_model.choose(rows, p, k, num_sms).seconds for p in widths]
    num_bytes = outer * m * k * _ITEMSIZE
    work = cost_model.Work("all_gather", num_bytes, ranks, num_bytes // outer)
    gather_s = cost_model.choose(record, work).seconds

    def call(x: Any, *ws: Any, site: Any) -> list[Any]:
        gathered, ys = all_gather_matmul_call.call(
            x,
            ws,
            site=site,
            plan=plan,
            transpose_w=params["transpose_w"],
            dtype=params["dtype"],
            num_sms=num_sms,
            own_rows=own_rows,
        )
        if not own_rows:
            at = lax.axis_index(params["axis_name"]) * m
            gathered = lax.dynamic_update_slice_in_dim(gathered, x, at, axis=1)
        return [gathered, *ys]

    seconds = plan.seconds + sum(products) - max(products)
    return Fused(seconds, gather_s + sum(products), _rule(call, groups, several=True))


def _sum(op: str, place: _Place, sizes: _Sizes, params: dict[str, Any]) -> Fused:
    groups, record, num_sms = place
    outer, rows, k, (p,), ranks = sizes
    m = outer * rows
    all_reduce = op == REDUCE
    plan = matmul_reduce_model.choose(
        record, m, p, k, ranks, all_reduce=all_reduce, num_sms=num_sms
    )
    # The kernel goes by whole tiles where several matrices lie; else their rows are copied first.
    in_place = outer > 1 and not all_reduce and rows // ranks % matmul_reduce_model.TILE.rows == 0
    strided = outer > 1 and not all_reduce and not in_place

    def call(*pairs: Any, site: Any) -> Any:
        x, w = unfused.joined(*pairs, transpose_w=params["transpose_w"])
        y = matmul_reduce_call.call(
            _by_owner(x, ranks) if strided else x.reshape(m, k),
            w,
            site=site,
            plan=plan,
            transpose_w=params["transpose_w"],
            all_reduce=all_reduce,
            outer=outer if in_place else 1,
        )
        return y.reshape(outer, rows if all_reduce else rows // ranks, p)

    seconds = plan.seconds + strided * _copy_seconds(m, k)
    unfused_seconds = _unfused_sum(place, sizes, all_reduce)
    return Fused(seconds, unfused_seconds, _rule(call, groups, several=False))


def _few_rows(op: str, place: _Place, sizes: _Sizes, params: dict[str, Any]) -> Fused | str:
    """The kernel that exchanges partials right out of registers."""
    groups, record, num_sms = place
    outer, rows, k, (p,), ranks = sizes
    m = outer * rows
    all_reduce = op == REDUCE
    plan = few_rows_model.choose(record, m, p, k, ranks, all_reduce=all_reduce, num_sms=num_sms)
    if plan is None:
        return str(few_rows_model.why_not(record, m, p, ranks, all_reduce))
    strided = outer > 1 and not all_reduce

    def call(*pairs: Any, site: Any) -> Any:
        x, w = unfused.joined(*pairs, transpose_w=params["transpose_w"])
        y = few_rows_call.call(
            _by_owner(x, ranks) if strided else x.reshape(m, k),
            w,
            site=site,
            plan=plan,
            transpose_w=params["transpose_w"],
            all_reduce=all_reduce,
        )
        return y.reshape(outer, rows if all_reduce else rows // ranks, p)

    seconds = plan.seconds + strided * _copy_seconds(m, k)
    # No part has this tile.
    forced = params["config"].tile == few_rows_model.TILE
    unfused_seconds = math.inf if forced else _unfused_sum(place, sizes, all_reduce)
    return Fused(seconds, unfused_seconds, _rule(call, groups, several=False))


def _by_owner(x: Any, ranks: int) -> Any:
    """The rows of several matrices, [outer, rows, k], as those of one, each rank's together."""
    outer, rows, k = x.shape
    return x.reshape(outer, ranks, rows // ranks, k).swapaxes(0, 1).reshape(outer * rows, k)


def _copy_seconds(m: int, k: int) -> float:
    return matmul_model.LAUNCH_S + 2 * m * k * _ITEMSIZE / matmul_model.HBM_BANDWIDTH


def _unfused_sum(place: _Place, sizes: _Sizes, all_reduce: bool) -> float:
    """What the product takes, and after it the sum."""
    _, record, num_sms = place
    outer, rows, k, (p,), ranks = sizes
    m = outer * rows
    num_bytes = m * p * _ITEMSIZE
    work = cost_model.Work("psum", num_bytes, ranks, num_bytes)
    if not all_reduce:
        work = cost_model.Work("psum_scatter", num_bytes, ranks, num_bytes // ranks)
    product_s = matmul_model.choose(m, p, k, num_sms).seconds
    return product_s + cost_model.choose(record, work).seconds


_ITEMSIZE = 2  # of what the kernels multiply
_HIDDEN = 1.02  # of a time: what takes no longer beside it than that


def _rule(call: Any, groups: Sequence[Sequence[int]], *, several: bool) -> Callable[..., Any]:
    def rule(ctx: Any, *operands: Any) -> Any:
        made = functools.partial(call, site=call_site(ctx, groups))
        return mlir.lower_fun(made, multiple_results=several)(ctx, *operands)

    return rule

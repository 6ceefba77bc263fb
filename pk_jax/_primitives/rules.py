"""What all primitives of pk_jax have in common: how one is defined, lowered and numbered."""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pk_jax import _compat, _selection

# Call sites of a module take turns on this many channels of a communicator.
NUM_CHANNELS = 16


class Rules(NamedTuple):
    """What the registration of a primitive needs to know of its op."""

    op: str
    abstract_eval: Callable[..., Any]
    transpose: Callable[..., Any]
    batch: Callable[..., Any]
    reference: Callable[..., Any]
    emit_cuda: Callable[..., Any] | None = None


def of_transpose(params: dict[str, Any]) -> str | None:
    """The implementation of the transpose: asking for "cuda" speaks of the op itself alone."""
    return "reference" if params["implementation"] == "reference" else None


def _lower(ctx: Any, x: Any, *, rules: Rules, **params: Any) -> Any:
    (out,) = ctx.avals_out
    if params["axis_size"] == 1 or 0 in out.shape:
        # A group of one, or no elements: nothing moves.
        return mlir.lower_fun(lambda x: lax.reshape(x, out.shape), multiple_results=False)(ctx, x)
    if params["implementation"] != "reference":
        platforms = ctx.module_context.platforms
        if tuple(platforms) == ("cuda",):
            groups = _compat.rank_groups(ctx, params["axis_name"], params["axis_index_groups"])
            devices = _compat.mesh_devices(ctx)
            dtype = ctx.avals_in[0].dtype
            auto = _compat.auto_axes(ctx)
            decision = _selection.decide(rules.op, dtype, groups, devices, auto)
            if decision.path == "cuda" and rules.emit_cuda is not None:
                return rules.emit_cuda(ctx, x, groups, **params)
        else:
            decision = _selection.Decision(
                "reference", _selection.why_platform(rules.op, *platforms)
            )
        if params["implementation"] == "cuda":
            named = "" if decision.reason.startswith(rules.op) else f"{rules.op}: "
            raise NotImplementedError(named + decision.reason)
        _selection.log_once(rules.op, decision)
    return mlir.lower_fun(rules.reference, multiple_results=False)(ctx, x, **params)


# For each module being built: members of a group -> channels given to its call sites. Lowering
# visits the equations of a program in one order in every process, so the ranks of a call site agree
# on its number without talking. The counter goes by call site, not by call: a site inside scan, or
# in a function that is called twice, keeps its channel, and its calls follow each other on the
# stream. Groups count apart, so that the axes of a mesh do not use up each other's channels; sites
# that share a group have different numbers.
_channels: weakref.WeakKeyDictionary[Any, dict[frozenset[int], int]] = weakref.WeakKeyDictionary()


def next_channel(ctx: Any, groups: Sequence[Sequence[int]]) -> int:
    """The channel of the call site being lowered: its number among its groups' call sites.

    Args:
        ctx: the lowering context.
        groups: logical ids of the ranks of each group; all groups of a site have its one channel.
    """
    counts = _channels.setdefault(_compat.module_of(ctx), {})
    keys = [frozenset(group) for group in groups]
    number = max(counts.get(key, 0) for key in keys)
    counts.update(dict.fromkeys(keys, number + 1))
    return number % NUM_CHANNELS


def define(primitive: Primitive, rules: Rules) -> None:
    """Registers with JAX everything it asks of a primitive that is linear in one operand."""
    primitive.def_effectful_abstract_eval(rules.abstract_eval)
    ad.deflinear2(primitive, rules.transpose)
    batching.fancy_primitive_batchers[primitive] = rules.batch
    # Not cacheable: JAX would lower equal equations once and call the result, and then two call
    # sites would share a channel. One rule for all platforms, which looks at the platform itself:
    # JAX cannot lower an uncacheable primitive that has several rules for several platforms.
    rule = functools.partial(_lower, rules=rules)
    mlir.register_lowering(primitive, rule, cacheable=False)

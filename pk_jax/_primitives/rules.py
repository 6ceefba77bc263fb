"""What all primitives of pk_jax have in common: how one is defined, lowered, numbered, emitted."""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pk_jax import _compat, _selection
from pk_jax._primitives import checks
from pk_jax._tuning import cost_model, hardware
from pk_jax.config import Config

# Call sites of a module take turns on this many channels of a communicator.
NUM_CHANNELS = 16


class Rules(NamedTuple):
    """What the registration of a primitive needs to know of its op.

    Attributes:
        op: its name.
        abstract_eval: type of the result, with effects.
        batch: the rule of `jax.vmap`, also for a mapped axis among those of the op.
        reference: the op in jax.lax, of one rank's operands.
        emit_cuda: (ctx, operands, groups, parameters) -> results of the custom call.
        transpose: of a primitive that is linear in its one operand; None if it has no derivative.
        alone: (operand, shape of the result, parameters) -> result in a group of one rank.
        across_hosts: (operand, inner axes, parameters) -> result, where the kernels can serve the
            inner axes and not all; None if the op cannot be composed so.
        needs_peers: whether a group of one rank has no kernel, which the log and
            implementation="cuda" then say; else nothing moves there and nothing is said.
    """

    op: str
    abstract_eval: Callable[..., Any]
    batch: Callable[..., Any]
    reference: Callable[..., Any]
    emit_cuda: Callable[..., Any] | None = None
    transpose: Callable[..., Any] | None = None
    alone: Callable[..., Any] = lambda x, shape, **_: lax.reshape(x, shape)
    across_hosts: Callable[..., Any] | None = None
    needs_peers: bool = False


def of_transpose(params: dict[str, Any]) -> str | None:
    """The implementation of the transpose: asking for "cuda" speaks of the op itself alone."""
    return "reference" if params["implementation"] == "reference" else None


def is_zero(tangent: Any) -> bool:
    """Whether a tangent or cotangent is symbolically zero."""
    return type(tangent) is ad.Zero


def no_tangent(out: Any) -> Any:
    """The zero tangent of a result."""
    return ad.Zero(jax.typeof(out).to_tangent_aval())


def axes_of(params: dict[str, Any]) -> tuple[Any, ...]:
    """The axes of a primitive; reductions have them under another name, as in lax."""
    return params["axes"] if "axes" in params else params["axis_name"]


def lower(ctx: Any, *operands: Any, rules: Rules, **params: Any) -> Any:
    """The lowering rule of all primitives, for all platforms."""
    (out,) = ctx.avals_out
    axes, index_groups = axes_of(params), params.get("axis_index_groups")
    op = params.get("asked", rules.op)
    groups = _compat.rank_groups(ctx, axes, index_groups)
    if 0 in out.shape or all(len(group) == 1 for group in groups):
        # No elements, or groups of one: nothing moves.
        if rules.needs_peers and 0 not in out.shape and params["implementation"] != "reference":
            alone = _selection.Decision("reference", _selection.ALONE)
            fall_back(op, params["implementation"], alone)
        alone = functools.partial(rules.alone, shape=out.shape)
        return mlir.lower_fun(alone, multiple_results=False)(ctx, *operands, **params)
    if params["implementation"] != "reference":
        platforms = ctx.module_context.platforms
        if tuple(platforms) == ("cuda",):
            devices = _compat.mesh_devices(ctx)
            dtype = ctx.avals_in[0].dtype
            auto = _compat.auto_axes(ctx)
            decision = _selection.decide(op, dtype, groups, devices, auto)
            if decision.path == "cuda" and rules.emit_cuda is not None:
                return rules.emit_cuda(ctx, *operands, groups=groups, **params)
            if rules.across_hosts is not None and index_groups is None:
                inner = _axes_inside(ctx, op, dtype, axes)
                if inner:
                    why = _selection.why_hierarchical(axes, inner, decision.reason)
                    _selection.log_once(op, _selection.Decision("hierarchical", why))
                    rule = functools.partial(rules.across_hosts, inner=inner)
                    return mlir.lower_fun(rule, multiple_results=False)(ctx, *operands, **params)
        else:
            decision = _selection.Decision("reference", _selection.why_platform(op, *platforms))
        fall_back(op, params["implementation"], decision)
    return mlir.lower_fun(rules.reference, multiple_results=False)(ctx, *operands, **params)


def fall_back(op: str, implementation: str | None, decision: _selection.Decision) -> None:
    """Says once why an op takes the reference; raises it if the kernels were asked for."""
    if implementation == "cuda":
        named = "" if decision.reason.startswith(f"{op} ") else f"{op}: "
        raise NotImplementedError(named + decision.reason)
    _selection.log_once(op, decision)


def _axes_inside(ctx: Any, op: str, dtype: Any, axes: tuple[Any, ...]) -> tuple[Any, ...]:
    """The axes among those of an op over which the kernels can run; none if there are none."""
    devices, auto = _compat.mesh_devices(ctx), _compat.auto_axes(ctx)

    def runs(some: tuple[Any, ...]) -> bool:
        groups = _compat.rank_groups(ctx, some, None)
        return _selection.decide(op, dtype, groups, devices, auto).path == "cuda"

    return _selection.inner_axes({axis: checks.bound_size([axis]) for axis in axes}, runs)


def inside(params: dict[str, Any]) -> dict[str, Any]:
    """What the parts of a composed op inside a host take over from its parameters."""
    names = ("implementation", "config")
    return {"axis_index_groups": None} | {name: params[name] for name in names}


def choose(ctx: Any, work: cost_model.Work, config: Config) -> cost_model.Choice:
    """How the call being lowered is to run, by the numbers of its devices and the knobs."""
    devices = _compat.mesh_devices(ctx)
    record = hardware.lookup(devices[0].device_kind if devices else None)
    return cost_model.choose(record, work, config.mechanism, config.num_comm_sms)


def possible(config: Config, work: cost_model.Work, dtype: Any, strict: bool) -> Config:
    """config, without its mechanism if that cannot move the operand and was only a default.

    Args:
        config: the resolved Config.
        work: the call.
        dtype: the operand's.
        strict: the mechanism was asked for in the call: if it cannot move the operand that is an
            error, where a mechanism that is only a default gives way.
    """
    if config.mechanism is None or _selection.why_not_dtype(dtype) is not None:
        return config
    try:
        cost_model.choose(hardware.lookup(), work, config.mechanism)
    except ValueError:
        if strict:
            raise
        return dataclasses.replace(config, mechanism=None)
    return config


def emit(
    ctx: Any,
    op: str,
    operands: Sequence[Any],
    groups: Sequence[Sequence[int]],
    choice: cost_model.Choice,
    attributes: Mapping[str, Any],
    aliases: dict[int, int] | None = None,
) -> list[Any]:
    """Emits the custom call of an op.

    Args:
        ctx: the lowering context; its results are those of the call.
        op: what the call's target is named after.
        operands: the operands.
        groups: logical ids of the ranks of each group.
        choice: how it is to run. Its scratch is one more result of the call, which is dropped:
            so XLA plans that memory with the rest of the program's.
        attributes: those of this op alone, of other names than those that all calls have.
        aliases: operands that give their memory to a result: numbers of both.
    """
    avals_out = list(ctx.avals_out)
    if choice.scratch_bytes:
        avals_out.append(ShapedArray((choice.scratch_bytes,), np.dtype(np.uint8)))
    common = call_site(ctx, groups) | {
        "mechanism": choice.mechanism,
        "protocol": choice.protocol,
        "num_blocks": np.int64(choice.num_blocks),
    }
    # Not as keywords, among which an attribute could have the name of a parameter.
    config = {key: mlir.ir_attribute(value) for key, value in (common | {**attributes}).items()}
    rule = jax.ffi.ffi_lowering(
        f"pk_jax_{op}", backend_config=config, operand_output_aliases=aliases
    )
    results = rule(ctx.replace(avals_out=avals_out), *operands)
    return list(results)[: len(ctx.avals_out)]


def call_site(ctx: Any, groups: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The attributes that say which ranks a call site spans, with a channel of its own.

    Args:
        ctx: the lowering context.
        groups: logical ids of the ranks of each group.
    """
    devices = _compat.mesh_devices(ctx)
    logical_ids = np.array(groups, np.int64).ravel()
    if devices:
        global_ids = np.array([device.id for device in devices], np.int64)[logical_ids]
    else:
        global_ids = logical_ids
    return {
        "groups": logical_ids,
        "devices": global_ids,
        "group_size": np.int64(len(groups[0])),
        "channel": np.int64(next_channel(ctx, groups)),
    }


# For each module being built: members of a group -> channels given to its call sites. Lowering
# visits the equations of a program in one order in every process, so the ranks of a call site agree
# on its number without talking. The counter goes by call site, not by call: a site inside scan, or
# in a function that is called twice, keeps its channel, and its calls follow each other on the
# stream. Groups count apart, so that the axes of a mesh do not use up each other's channels; sites
# that share a group have different numbers, whatever their ops.
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
    """Registers with JAX what it asks of a primitive with one result.

    One without a transpose gets no derivative: JAX then raises, or whoever defines it adds rules.
    """
    primitive.def_effectful_abstract_eval(rules.abstract_eval)
    if rules.transpose is not None:
        ad.deflinear2(primitive, rules.transpose)
    batching.fancy_primitive_batchers[primitive] = rules.batch
    # Not cacheable: JAX would lower equal equations once and call the result, and then two call
    # sites would share a channel. One rule for all platforms, which looks at the platform itself:
    # JAX cannot lower an uncacheable primitive that has several rules for several platforms.
    rule = functools.partial(lower, rules=rules)
    mlir.register_lowering(primitive, rule, cacheable=False)

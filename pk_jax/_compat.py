"""Everything pk_jax needs from JAX that JAX does not promise to keep.

The only file that imports ``jax._src`` or reads a version. One function or name for each thing
the rest of the package asks for, so that a new JAX release is a change to this file alone.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jaxlib.version
import numpy as np
from jax._src import config as _jax_config
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import distributed as _distributed
from jax._src import dtypes as _dtypes
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.interpreters import pxla as _pxla
from jax._src.lax import lax as _lax
from jax._src.lax import parallel as _parallel
from jax._src.sharding_impls import SPMDAxisContext as _SPMDAxisContext

# A jax.Device, which type checkers take for a variable.
Device = Any

# lax's own primitives. pk's take their typing from them (abstract eval: shape, manual axis type,
# NamedAxisEffect and the errors), so that the two cannot drift apart.
all_gather_p: Any = _parallel.all_gather_p
all_gather_invariant_p: Any = _parallel.all_gather_invariant_p
all_gather_reduced_p: Any = _parallel.all_gather_reduced_p
reduce_scatter_p: Any = _parallel.reduce_scatter_p
psum_p: Any = _parallel.psum_p
psum_invariant_p: Any = _parallel.psum_invariant_p
pmax_p: Any = _parallel.pmax_p
pmin_p: Any = _parallel.pmin_p
all_to_all_p: Any = _parallel.all_to_all_p
ppermute_p: Any = _parallel.ppermute_p
ragged_all_to_all_p: Any = _parallel.ragged_all_to_all_p
ragged_dot_general_p: Any = _lax.ragged_dot_general_p


# jax.lax's own collectives. pk_jax.jax_collectives() replaces the names in jax.lax, and what stands
# behind a pk op (its reference, its rules) must not come back to the op.
parallel: Any = _parallel


def _new_state(name: str, default: Any, meaning: str) -> Any:
    # Not string_or_object_state: that one also reads an environment variable of the same name.
    return _jax_config.State(
        name, default, meaning, include_in_jit_key=True, include_in_trace_context=True
    )


# States are thread-local like every JAX option, and a part of jit's cache key, so that a function
# traced under one value is not reused under another.
config_state: Any = _new_state(
    "pk_jax_config", None, "The pk_jax.Config that pk_jax.use_config has set."
)
redirect_state: Any = _new_state(
    "pk_jax_redirect", False, "Whether pk_jax.jax_collectives holds in this thread."
)


def jaxlib_version() -> tuple[int, ...]:
    """The running jaxlib's version: (0, 11, 2)."""
    digits = jaxlib.version.__version__.split(".")[:3]
    return tuple(int(part) for part in digits if part.isdigit())


def bound_axes() -> dict[Hashable, int]:
    """Name and size of each axis a collective may use here: manual mesh axes and vmap's."""
    return dict(_core.get_axis_env().axis_sizes)


def check_vma() -> bool:
    """Whether the enclosing shard_map types its values by the axes over which they vary."""
    return _jax_config._check_vma.value


def vary_over(axis_name: tuple[Hashable, ...], x: Any) -> Any:
    """x, cast to vary over the axes where it did not (as lax's collectives do with operands)."""
    return _parallel.insert_collective_pvary(axis_name, x)


def without_size_one_axes(axis_name: tuple[Hashable, ...]) -> tuple[Hashable, ...]:
    """The axes that a reduction goes over: all, unless JAX is set to leave those of size 1 out."""
    return _parallel._maybe_skip_one_sized_axes(axis_name)


def vary_alike(axis_name: tuple[Hashable, ...], *xs: Any) -> list[Any]:
    """The operands of one op, all cast to vary over its axes and over those of any of them."""
    names = set(axis_name) | varying_axes(*xs)
    return [vary_over(tuple(sorted(names, key=str)), x) for x in xs]


def varying_axes(*xs: Any) -> set[Hashable]:
    """The axes over which any of the operands is typed as varying."""
    return set().union(*(_core.typeof(x).mat.varying for x in xs))


def state_over(x: Any, axis_name: tuple[Hashable, ...], op: str) -> str:
    """How x is typed over the axes: "varying", "invarying", "reduced" or "unreduced".

    Raises:
        ValueError: differently over different axes.
    """
    return _parallel._get_from(_core.typeof(x), axis_name, op)


def bits_per_element(dtype: Any) -> int:
    return _dtypes.itemsize_bits(dtype)


def rank_groups(
    ctx: Any,
    axis_name: tuple[Hashable, ...],
    axis_index_groups: Sequence[Sequence[int]] | None,
) -> list[list[int]]:
    """The groups of a collective as logical ids (row-major positions in the mesh), in rank order.

    Rank order is row-major over axis_name as given: over ("b", "a") the last name moves fastest,
    whatever the order of the mesh's own axes.
    """
    groups = _pxla.axis_groups(ctx.module_context.axis_context, axis_name)
    if axis_index_groups is not None:
        groups = [[group[i] for i in chosen] for group in groups for chosen in axis_index_groups]
    return [[int(i) for i in group] for group in groups]


def mesh_devices(ctx: Any) -> list[Device] | None:
    """The devices of the mesh being lowered for, by logical id; None when it has none."""
    axis_context = ctx.module_context.axis_context
    if not isinstance(axis_context, _SPMDAxisContext):
        return None
    mesh = axis_context.mesh
    return list(mesh.devices.flat) if isinstance(mesh, jax.sharding.Mesh) else None


def type_like(x: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """The type of an array that varies as one of type x does."""
    sharding = x.sharding.update(spec=jax.sharding.PartitionSpec(*(None for _ in shape)))
    return x.update(shape=shape, dtype=np.dtype(dtype), weak_type=False, sharding=sharding)


def vary_as_operands(*xs: Any) -> list[Any]:
    """The operands of one op without axes, cast to vary alike just as those of lax's ops are."""
    return list(_core.auto_insert_reshard(*xs))


def canonicalize_precision(precision: Any) -> Any:
    """A precision as lax's products keep it; None is the default that holds where it is called."""
    return _lax.canonicalize_precision(precision)


def run_eagerly(primitive: Any, *operands: Any, **params: Any) -> Any:
    """What a primitive does outside of jit, as JAX does it: a compiled call, cached."""
    return _dispatch.apply_primitive(primitive, *operands, **params)


def when_read(primitive: Any, params_of: Callable[[list[bool]], dict[str, Any]]) -> None:
    """Has JAX tell a primitive which of its results are read, where it drops what is not.

    That is before a program is lowered, and where derivatives, remat and scan divide one.
    `params_of(which are read)` are the parameters that say so.
    """

    def rule(used: list[bool], *more: Any) -> Any:
        eqn = more[-1]  # before it jax 0.12 has which operands are live
        some = any(used)
        kept = eqn.replace(params=eqn.params | params_of(used)) if some else None
        return [some] * len(eqn.invars), kept

    _partial_eval.dce_rules[primitive] = rule


def is_partitioned(ctx: Any) -> bool:
    """Whether XLA cuts the program being lowered into parts for several devices by itself."""
    axis_context = ctx.module_context.axis_context
    return not isinstance(axis_context, _SPMDAxisContext) and axis_context.num_devices > 1


def program_devices(ctx: Any) -> list[Device] | None:
    """Devices of which each runs the program being lowered on operands of its own.

    Those of a mesh. A program of one device does not say which: it is one of this process's GPUs.
    None where there are none, as where one lowers for another machine.
    """
    if isinstance(ctx.module_context.axis_context, _SPMDAxisContext):
        return mesh_devices(ctx)
    try:
        return list(jax.local_devices(backend="cuda"))
    except RuntimeError:
        return None


def auto_axes(ctx: Any) -> tuple[Hashable, ...]:
    """Axes of the mesh, larger than 1, that XLA and not the user partitions where ctx lowers."""
    axis_context = ctx.module_context.axis_context
    if not isinstance(axis_context, _SPMDAxisContext):
        return ()
    sizes = axis_context.mesh.shape
    manual = axis_context.manual_axes
    return tuple(name for name in sizes if name not in manual and sizes[name] > 1)


def module_of(ctx: Any) -> Any:
    """The MLIR module being built: one object for all of a lowering, inner functions included."""
    return ctx.module_context.module


def distributed_client() -> Any | None:
    """The key-value store client of jax.distributed; None in a single-process run."""
    return _distributed.global_state.client

"""From a program to a jitted function, with pk_jax's collectives or with jax.lax's."""

import contextlib
import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import pk_jax as pk

from .cases import Case, Program
from .transforms import loss, num_floats, transform_of


@dataclasses.dataclass
class Side:
    """What one of the two libraries made of a program.

    Attributes:
        errors: exceptions by number of the case.
        types: for each other case structure and types of its results, as shard_map sees them.
        results: its results, stacked by rank.
        calls: numbers of custom calls of pk_jax in the lowered program, by op.
    """

    errors: dict[int, Exception] = dataclasses.field(default_factory=dict)
    types: dict[int, Any] = dataclasses.field(default_factory=dict)
    results: dict[int, list[np.ndarray]] = dataclasses.field(default_factory=dict)
    calls: dict[str, int] = dataclasses.field(default_factory=dict)


def mesh_of(program: Program, devices: Any) -> Mesh:
    places = np.array([devices[i] for i in program.order])
    return Mesh(places.reshape(program.sizes), program.names)


def function(program: Program, module: Any, mesh: Mesh, side: Side, run_not: Any) -> Any:
    """Operands of all cases -> results of those that can be traced; notes the others' errors."""

    def run(operands: list[list[Any]]) -> dict[int, Any]:
        results = {}
        for i, (case, arrays) in enumerate(zip(program.cases, operands, strict=True)):
            if i in side.errors or i in run_not:
                continue
            try:
                results[i] = _mapped(program, case, module, mesh, side.types, i)(arrays)
            except Exception as error:  # every kind is compared
                side.errors[i] = error
        return results

    return run


def _mapped(program: Program, case: Case, module: Any, mesh: Mesh, types: Any, i: int) -> Any:
    def op(*leaves):
        return call(case, module, leaves)

    def body(arrays):
        rank = lax.axis_index(program.names)
        results = transform_of(case)(op, case, [x[0] for x in arrays], rank)
        types[i] = jax.tree.structure(results), [_type(y) for y in jax.tree.leaves(results)]
        return [jnp.asarray(y)[None] for y in jax.tree.leaves(results)]

    varying = P(case.varying) if case.varying else P()
    everywhere = P(program.names)
    count = len(case.shapes)

    def run(arrays):
        specs = [varying if i < count else everywhere for i in range(len(arrays))]
        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=(specs,), out_specs=everywhere, check_vma=case.check_vma
        )
        if case.transform != "outer_grad":
            return mapped(arrays)
        floats, rest = arrays[: num_floats(case)], arrays[num_floats(case) :]
        return jax.grad(lambda floats: loss(mapped([*floats, *rest]), 0))(floats)

    return run


def call(case: Case, module: Any, leaves: Any) -> Any:
    """The op itself."""
    op, kwargs = getattr(module, case.op), case.kwargs
    defaults = contextlib.nullcontext()
    if module is pk and case.mechanism is not None:
        defaults = pk.use_config(mechanism=case.mechanism)
    with defaults:
        if case.op == "ragged_all_to_all":
            return op(*leaves, axis_name=case.axis_name, **kwargs)
        x = leaves[0] if len(leaves) == 1 else {"b": leaves[0], "a": (leaves[1],)}
        if case.constant is not None:
            x = case.constant
        if case.op == "all_to_all":
            # Positional in lax.
            rest = {k: v for k, v in kwargs.items() if k not in ("split_axis", "concat_axis")}
            return op(x, case.axis_name, kwargs["split_axis"], kwargs["concat_axis"], **rest)
        return op(x, case.axis_name, **kwargs)


def _type(y: Any) -> tuple[Any, ...]:
    if not isinstance(y, jax.Array):
        return (type(y).__name__,)
    aval = jax.typeof(y)
    return y.shape, y.dtype.name, tuple(sorted(map(str, aval.mat.varying))), aval.weak_type


def lowered(
    program: Program,
    module: Any,
    devices: Any,
    operands: Any,
    side: Side,
    run_not: Collection[int] = (),
) -> Any:
    """Traces and lowers, and leaves out what fails alone; None if nothing is left.

    Args:
        program: the cases.
        module: pk_jax or jax.lax.
        devices: the mesh is made of these.
        operands: of all cases.
        side: where errors and types go.
        run_not: cases that are only traced, each alone.
    """
    mesh = mesh_of(program, devices)
    for i in run_not:
        try:
            alone = _mapped(program, program.cases[i], module, mesh, side.types, i)
            traced = jax.jit(alone).trace(operands[i])
            if program.cases[i].op == "ppermute":  # lax checks its permutation there
                traced.lower()
        except Exception as error:
            side.errors[i] = error
    while True:
        before = set(side.errors)
        traced = jax.jit(function(program, module, mesh, side, run_not)).trace(operands)
        left = [i for i in range(len(program.cases)) if i not in side.errors and i not in run_not]
        try:
            low = traced.lower() if left else None
        except Exception as error:
            if len(left) == 1:
                side.errors[left[0]] = error
            else:
                for i in left:
                    alone = Side()
                    lowered(program.only(i), module, devices, [operands[i]], alone)
                    if alone.errors:
                        side.errors[i] = alone.errors[0]
            if set(side.errors) == before:
                raise
            continue
        for i in side.errors:
            side.types.pop(i, None)
        return low

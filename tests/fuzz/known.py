"""Where pk_jax differs from jax.lax on purpose, and what lax cannot run: each with the reason."""

from typing import Any

from jax import lax

from .build import Side
from .cases import REDUCTIONS, Case, Program
from .transforms import DIFFERENTIATES, UNROLLED


def reason(program: Program, case: Case, theirs: Side, ours: Side, i: int) -> str | None:
    """Why errors and types of the two may differ in case i; for values, see `other_values`."""
    lax_error, pk_error = theirs.errors.get(i), ours.errors.get(i)
    if isinstance(pk_error, ValueError) and not case.run:
        if "exactly once" in str(pk_error) or "must all have one size" in str(pk_error):
            return "lax does not check groups, and XLA ends the process over some of them"
        if "names an axis twice" in str(pk_error):
            return "lax does not notice, and XLA ends the process"
    if isinstance(pk_error, NameError) and isinstance(lax_error, ValueError) and not case.run:
        return "lax may ask whether the operand varies over an axis before whether there is one"
    if case.axis_name is None and isinstance(pk_error, TypeError):
        return "lax looks None up as if it were a name: NameError"
    if not case.check_vma and case.kwargs.get("to", "varying") != "varying":
        return "without types there is one all_gather, which takes and gives everything"
    if case.op in REDUCTIONS and case.check_vma and "axis_index_groups" in case.kwargs:
        return "lax has no types for these, and says so in several ways"
    if isinstance(case.axis_name, list):
        return "lax takes a list for some ops; pk_jax for all that have no order of ranks"
    if case.op == "psum_scatter" and "bool" in case.dtypes and pk_error is None:
        return "over an axis of size 1 nothing is added"
    if isinstance(lax_error, NotImplementedError) and pk_error is None:
        return "pk_jax does what lax does not"
    if misplaces(case) and lax_error is None and pk_error is None:
        return "lax puts the mapped dimension two places too far"
    if isinstance(lax_error, NotImplementedError) and "axis size doesn't match" in str(pk_error):
        return "neither goes over a vmapped axis and others at once; a part's own error comes first"
    if isinstance(lax_error, NotImplementedError) and case.kwargs.get("to") == "reduced":
        return "lax does not map such a gather; its result then cannot leave shard_map"
    if case.op == "ppermute" and "v" in case.axis_name and len(case.axis_name) > 1:
        return "lax drops one of the axes from the permutation"
    if case.op == "all_to_all" and pk_error is None and "cotangent" in str(lax_error):
        return "lax's transpose swaps split_axis and concat_axis also where it has inserted one"
    if case.op == "ragged_all_to_all" and pk_error is None:
        if lax_error is None and len(case.varying) < len(program.axes):
            return "lax types the result as varying like `output`, whatever is moved into it"
        if lax_error is not None and case.transform in DIFFERENTIATES:
            return "lax's transpose forgets the groups, and that the zeros it makes vary"
    return None


def misplaces(case: Case) -> bool:
    """Whether lax may map a case wrongly, so that only a call for each element shows what is right.

    Where the mapped dimension comes after the scattered one, which an untiled psum_scatter removes,
    lax's batching rule adds one to it instead of taking one away.
    """
    if case.op != "psum_scatter" or case.kwargs.get("tiled") or case.transform not in UNROLLED:
        return False
    at = case.kwargs["scatter_dimension"] % len(case.shapes[0])
    dims = case.options.get("in_axes", (case.options.get("in_axis"),))
    return any(d is not None and d > at for d in dims)


def other_values(case: Case) -> str | None:
    """Why the values of the two may differ, though both have some."""
    untyped = not case.check_vma and case.kwargs.get("to", "varying") != "varying"
    if untyped and case.transform in DIFFERENTIATES:
        return "without types there is one all_gather, whose transpose sums"
    return None


def cannot(case: Case, module: Any) -> bool:
    """Whether a library cannot run a valid case, which is then traced only."""
    if module is lax and case.op == "ragged_all_to_all":
        return True  # XLA has none on CPU
    typed = case.kwargs.get("to", "varying") != "varying"
    if case.op in ("all_gather", "psum_scatter") and case.kwargs.get("tiled"):
        # MLIR refuses parts without elements, and its verifier may wait for the GIL forever.
        # Derivatives of gathers of another type are lax's.
        axis = case.kwargs.get("axis", case.kwargs.get("scatter_dimension"))
        return (module is lax or typed) and case.shapes[0][axis] == 0
    return False

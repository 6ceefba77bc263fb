"""Whether pk_jax and jax.lax did the same."""

from typing import Any

import numpy as np

from . import model
from .cases import MOVES, SUMS, Case, Program
from .transforms import KEEPS_BITS

# Errors that lax means; anything else it raises is an accident.
MEANT = (NotImplementedError, ValueError, TypeError, NameError)


def kind(error: Exception | None) -> type[Exception] | None:
    """The class of an error that was meant."""
    # MLIR's, of something that JAX lowered wrongly; Python's.
    if "verifier errors" in str(error) or "values to unpack" in str(error):
        return None
    return next((kind for kind in MEANT if isinstance(error, kind)), None)


def errors_differ(theirs: Exception | None, ours: Exception | None) -> str | None:
    """What is wrong with the errors of a case, if anything."""
    if theirs is None and ours is None:
        return None
    if theirs is None:
        return f"pk_jax raises, lax does not: {_text(ours)}"
    if kind(theirs) is None:
        # lax's accident: any meant error will do, and so will a result.
        if ours is None or kind(ours) is not None or type(ours) is type(theirs):
            return None
        return f"lax raises {_text(theirs)} and pk_jax by accident {_text(ours)}"
    if ours is None:
        return f"lax raises, pk_jax does not: {_text(theirs)}"
    if kind(ours) is not kind(theirs):
        return f"lax raises {_text(theirs)}, pk_jax {_text(ours)}"
    return None


def types_differ(theirs: Any, ours: Any) -> str | None:
    if theirs == ours:
        return None
    return f"types (shape, dtype, varying, weak): lax {theirs}, pk_jax {ours}"


def results_differ(
    program: Program,
    case: Case,
    operands: list[np.ndarray],
    theirs: list[np.ndarray] | None,
    ours: list[np.ndarray],
    strict: bool = False,
) -> str | None:
    """What is wrong with our results.

    Args:
        program: the mesh.
        case: the case.
        operands: what it ran on.
        theirs: lax's results; None if it has none.
        ours: pk_jax's.
        strict: sums of 16-bit floats are made in 32 bits, and moves keep all bits of a NaN.
    """
    if case.op == "ragged_all_to_all":
        theirs = model.ragged(program, case, operands)
    rounds = case.constant is None and all(x.dtype.kind not in "iub" for x in operands)
    if case.op in SUMS and case.data == "normal" and rounds:
        pairs = zip(reversed(operands), ours, strict=True)  # a dict's leaves go by its keys
        problems = [_sum_differs(program, case, x, got, strict) for x, got in pairs]
        return next(filter(None, problems), None)
    if theirs is None:
        return None
    for want, got in zip(theirs, ours, strict=True):
        if want.shape != got.shape or want.dtype != got.dtype:
            return f"results: {want.dtype}{want.shape} and {got.dtype}{got.shape}"
        problem = _differ(case, want, got, strict)
        if problem:
            return problem
    return None


def _differ(case: Case, want: np.ndarray, got: np.ndarray, strict: bool) -> str | None:
    # XLA on CPU may widen narrow floats on their way, which quiets a NaN.
    widened = want.dtype.kind not in "iubc" and want.dtype.itemsize < 4 and not strict
    if case.op in MOVES and case.transform in KEEPS_BITS and not widened:
        same = _bits(want) == _bits(got)
    elif case.op == "pmean":
        # A quotient, which a compiler may turn into a product with the reciprocal.
        wide = np.complex128 if np.iscomplexobj(want) else np.float64
        scale = np.maximum(np.abs(want.astype(wide)), np.abs(got.astype(wide)))
        error = np.abs(want.astype(wide) - got.astype(wide))
        same = error <= 4 * epsilon(want.dtype) * scale
    else:
        # Neither the sign of a zero nor the bits of a NaN is an answer.
        with np.errstate(invalid="ignore"):
            same = (want == got) | ((want != want) & (got != got))
    return None if np.all(same) else _where(same, want, got)


def _sum_differs(
    program: Program, case: Case, x: np.ndarray, got: np.ndarray, strict: bool
) -> str | None:
    exact = model.exact_sum(program, case, x)
    if exact is None:
        return None
    want, magnitude, n = exact
    eps = epsilon(got.dtype)
    sum_eps = np.finfo(np.float32).eps if strict and eps > 1e-5 else eps
    error = np.abs(got.astype(want.dtype) - want)
    same = error <= eps * np.abs(want) + n * sum_eps * magnitude + 1e-7 * eps
    return None if np.all(same) else _where(same, want, got)


def epsilon(dtype: np.dtype) -> float:
    import ml_dtypes

    return 0.0 if dtype.kind in "iub" else float(ml_dtypes.finfo(dtype).eps)


def _bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x)[..., None].view(np.uint8)


def _where(same: np.ndarray, want: np.ndarray, got: np.ndarray) -> str:
    wrong = np.argwhere(~same)
    at = tuple(int(i) for i in wrong[0])[: want.ndim]
    return (
        f"results: {len(wrong)} of {same.size} wrong, first at [rank, ...] = {at}: "
        f"want {want[at]!r}, got {got[at]!r}"
    )


def _text(error: Exception | None) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"

"""The numbers of a case.

Kinds of data: "bits" is any bits at all (NaNs with payloads, signed zeros), for what is only moved;
"integers" small whole numbers, whose sums are exact in any order; "normal" rounds; "special" mixes
infinities and zeros of both signs into them. (What XLA's reductions over ranks make of a NaN
depends on the platform and on the rank that has it.)
"""

import math

import ml_dtypes
import numpy as np

from . import model
from .cases import Case, Program
from .transforms import DIFFERENTIATES, added_dimensions

_EXTRA = {
    name: np.dtype(getattr(ml_dtypes, name))
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")
}


def numpy_dtype(name: str) -> np.dtype:
    return _EXTRA.get(name) or np.dtype(name)


def operands(program: Program, case: Case) -> list[np.ndarray]:
    """The arrays of a case: [places on the axes over which it varies, ...]."""
    rng = np.random.default_rng(case.seed)
    sizes = dict(program.axes)
    places = math.prod(sizes[name] for name in case.varying)
    arrays = []
    for i, (shape, dtype) in enumerate(zip(case.shapes, case.dtypes, strict=True)):
        full = (places, *added_dimensions(case, i, shape))
        arrays.append(_values(rng, case, full, numpy_dtype(dtype)))
    if case.op == "ragged_all_to_all":
        arrays += _indices(program, case, rng)
    return arrays


def _values(rng, case: Case, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    whole = dtype.kind in "iu"
    if (whole and case.data != "integers") or case.data == "bits":
        return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]
    if case.data == "integers":
        # bfloat16 counts to 256, and a gradient squares, doubles and sums over eight ranks.
        largest = 1 if case.transform in DIFFERENTIATES else 3
        low = 0 if dtype.kind == "u" else -largest
        values = rng.integers(low, largest, shape, endpoint=True)
        if dtype.kind == "c":
            return (values + 1j * rng.integers(-1, 1, shape, endpoint=True)).astype(dtype)
        return values.astype(dtype)
    values = rng.standard_normal(shape)
    if dtype.kind == "c":
        values = values + 1j * rng.standard_normal(shape)
    if case.data == "special":
        drawn = rng.integers(0, 12, shape)
        for i, special in enumerate((np.inf, -np.inf, 0.0, -0.0)):
            values = np.where(drawn == i, special, values)
    return values.astype(dtype)


def _indices(program: Program, case: Case, rng) -> list[np.ndarray]:
    """Offsets and sizes: one of each for every step of a scan and place of a vmap."""
    disjoint = case.transform in DIFFERENTIATES
    (count,) = added_dimensions(case, 2, ()) or (None,)
    if count is None:
        return model.ragged_indices(program, case, rng, disjoint=disjoint)
    drawn = [model.ragged_indices(program, case, rng, disjoint=disjoint) for _ in range(count)]
    return [np.stack(arrays, 1) for arrays in zip(*drawn, strict=True)]

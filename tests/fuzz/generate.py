"""Draws programs: mostly valid cases, and some that lax refuses, since those must fail alike."""

import dataclasses
import math
from typing import Any

from .cases import MOVES, OPS, REDUCTIONS, SUMS, Case, Program
from .draws import Draw
from .spoil import spoiled
from .transforms import DIFFERENTIATES, KEEPS_BITS, TRANSFORMS

MESHES = (
    *((n,) for n in (2, 4, 8, 3, 1, 5, 7, 6)),
    *((1, 2), (2, 1), (2, 4), (4, 2), (2, 2), (1, 4), (3, 2), (1, 8), (1, 1), (7, 1)),
    *((2, 2, 2), (1, 2, 1), (2, 1, 3)),
)
DIMENSIONS = (2, 1, 3, 4, 5, 7, 8, 0, 13, 33)
LONG = (1025, 257, 511, 128)

FLOATS = ("float32", "bfloat16", "float16")
INTEGERS = ("int32", "int8", "uint8", "int16", "uint16", "uint32", "bool")
WIDE = ("float64", "int64", "uint64", "complex128")
ONLY_MOVED = ("float8_e4m3fn", "float8_e5m2")


@dataclasses.dataclass(frozen=True)
class Machine:
    """What cases are drawn for.

    Attributes:
        num_devices: the largest mesh.
        long: lengths that a dimension may take in large operands.
        limit: elements of a large operand.
        mechanisms: defaults of use_config to try.
    """

    num_devices: int = 8
    long: tuple[int, ...] = LONG
    limit: int = 4096
    mechanisms: tuple[str | None, ...] = (None,)


def program(draw: Draw, machine: Machine, num_cases: int) -> Program:
    """A mesh and so many cases."""
    meshes = [sizes for sizes in MESHES if math.prod(sizes) <= machine.num_devices]
    sizes = draw.choice(meshes)
    count = math.prod(sizes)
    devices = list(range(machine.num_devices))
    if draw.chance(3):
        devices = draw.shuffled(devices)
    axes = tuple(zip("abc", sizes, strict=False))
    x64 = draw.chance(4)
    cases = [_case(draw, machine, axes, x64) for _ in range(num_cases)]
    return Program(axes, tuple(devices[:count]), x64, cases)


def _case(draw: Draw, machine: Machine, axes: tuple[tuple[str, int], ...], x64: bool) -> Case:
    op = draw.choice(OPS)
    names = tuple(name for name, _ in axes)
    transform = draw.choice(TRANSFORMS[op])
    size_of = dict(axes)
    chosen = draw.shuffled(names)[: draw.integer(1, len(names))]
    options: dict[str, Any] = {}
    if transform in ("vmap_named", "vmap_named_grad"):
        size_of["v"] = options["size"] = draw.choice((2, 3, 1))
        chosen = draw.shuffled(["v", *chosen]) if draw.chance(2) else ["v"]
    n = math.prod(size_of[name] for name in chosen)
    case = Case(op, chosen[0] if len(chosen) == 1 and not draw.chance(4) else tuple(chosen))
    case.transform, case.options = transform, options
    case.check_vma = draw.chance(2) and "v" not in chosen
    case.varying = names if not draw.chance(5) else names[: draw.integer(0, len(names) - 1)]
    case.seed = draw.integer(0, 1 << 20)
    case.mechanism = draw.choice(machine.mechanisms)
    if draw.chance(4) and op != "ppermute":
        n = _draw_groups(draw, case, n)
    _draw_arguments(draw, machine, case, n)
    _draw_dtypes(draw, case, x64)
    _draw_options(draw, case)
    if op in ("psum", "pmax", "pmin") and draw.chance(12) and case.shapes[0]:
        position = draw.integer(0, len(case.shapes[0]) - 1)
        case.axis_name = (*chosen, position)
        case.check_vma = case.check_vma and draw.chance(4)
    if op in REDUCTIONS and draw.chance(16):
        constants = (1, 2.5, True, 3j)
        # Over the largest of complex numbers XLA's compiler for GPUs ends the process.
        case.constant = draw.choice(constants[:3] if op in ("pmax", "pmin") else constants)
    return spoiled(draw, case, n) if draw.chance(10) and "v" not in chosen else case


def _draw_groups(draw: Draw, case: Case, n: int) -> int:
    """Gives the case groups of the axis; their size."""
    ranks = draw.shuffled(range(n))
    if case.op in REDUCTIONS:
        # lax has no types for sums over groups.
        case.check_vma = case.check_vma and draw.chance(6)
        if draw.chance(3) and n > 1:
            cut = draw.integer(1, n - 1)
            case.kwargs["axis_index_groups"] = [ranks[:cut], ranks[cut:]]
            return cut
    size = draw.choice([d for d in range(1, n + 1) if n % d == 0][::-1])
    groups = [ranks[i : i + size] for i in range(0, n, size)]
    case.kwargs["axis_index_groups"] = groups
    return size


def _draw_shape(draw: Draw, machine: Machine, minimum: int = 0) -> list[int]:
    ndim = max(draw.choice((1, 2, 0, 3, 4)), minimum)
    shape = [draw.choice(DIMENSIONS) for _ in range(ndim)]
    if shape and draw.chance(6):
        shape[draw.integer(0, ndim - 1)] = draw.choice(machine.long)
    while math.prod(shape) > machine.limit:
        shape[shape.index(max(shape))] //= 3
    return shape


def _signed(draw: Draw, dimension: int, ndim: int) -> int:
    return dimension - ndim if draw.chance(4) else dimension


def _draw_arguments(draw: Draw, machine: Machine, case: Case, n: int) -> None:
    """Shapes and arguments that go with ranks in groups of n."""
    op, kwargs = case.op, case.kwargs
    if op == "ragged_all_to_all":
        _draw_ragged(draw, machine, case, n)
        return
    scattered = op in ("psum_scatter", "all_to_all")
    shape = _draw_shape(draw, machine, minimum=scattered)
    ndim = len(shape)
    if op != "ppermute" and op not in REDUCTIONS:
        kwargs["tiled"] = draw.chance(2) if op != "all_gather" or ndim else False
    if op == "all_gather":
        last = ndim - kwargs["tiled"]
        kwargs["axis"] = _signed(draw, draw.integer(0, last), last + 1)
        if draw.chance(8):
            kwargs["to"] = draw.choice(("invarying", "varying", "reduced"))
    elif scattered:
        at = draw.integer(0, ndim - 1)
        shape[at] = n * draw.choice((1, 2, 3, 0, 5)) if kwargs["tiled"] else n
        if op == "psum_scatter":
            kwargs["scatter_dimension"] = _signed(draw, at, ndim)
        else:
            kwargs["split_axis"] = _signed(draw, at, ndim)
            kwargs["concat_axis"] = _signed(draw, draw.integer(0, ndim - 1), ndim)
    elif op == "ppermute":
        count = n if draw.chance(2) or case.transform.startswith("vmap_named") else None
        pairs = zip(draw.shuffled(range(n)), draw.shuffled(range(n)), strict=True)
        kwargs["perm"] = list(pairs)[: draw.integer(0, n) if count is None else count]
    case.shapes = (tuple(shape),)
    if draw.chance(5) and case.transform == "plain":
        case.shapes *= 2  # a pytree of two


def _draw_ragged(draw: Draw, machine: Machine, case: Case, n: int) -> None:
    updates = draw.choice((1, 2, 3))
    rows, features = draw.choice((4, 1, 16, 7, 64)), _draw_shape(draw, machine)[:2]
    case.shapes = ((rows, *features), (draw.choice((5, 1, 16, 64)), *features))
    case.options |= {"updates": updates, "group": n, "index": draw.choice(("int32", "int64"))}


def _draw_dtypes(draw: Draw, case: Case, x64: bool) -> None:
    if case.op == "ragged_all_to_all" and not x64:
        case.options["index"] = "int32"
    floats = (*FLOATS, "complex64", *(("float64", "complex128") if x64 else ()))
    if case.transform == "vmap_named_grad":
        # Sums over several axes: small integers stay exact in the wider types only.
        options = ("float32",)
    elif case.transform in DIFFERENTIATES:
        options = floats
    else:
        options = (*FLOATS, *INTEGERS, "complex64", *(WIDE if x64 else ()))
        if case.op in MOVES:
            options = (*options, *ONLY_MOVED)
        if case.op in ("pmax", "pmin"):
            options = tuple(dtype for dtype in options if "complex" not in dtype)
    case.dtypes = tuple(draw.choice(options) for _ in case.shapes)
    if case.op == "ragged_all_to_all":
        case.dtypes = (case.dtypes[0],) * 2
    case.data = "integers"
    if case.transform in KEEPS_BITS and case.op in MOVES:
        case.data = draw.choice(("bits", "integers"))
    elif case.op in SUMS and case.transform == "plain" and draw.chance(3):
        case.data = "normal"
    elif case.op in ("pmax", "pmin") and case.transform in KEEPS_BITS:
        case.data = draw.choice(("special", "integers"))


def _draw_options(draw: Draw, case: Case) -> None:
    """The arguments of the transform."""
    options, ndim = case.options, min(len(shape) for shape in case.shapes)
    if case.transform in ("vmap", "vmap_named", "vmap_named_grad", "vmap_grad"):
        options.setdefault("size", draw.choice((2, 1, 3)))
        options["in_axis"] = None if draw.chance(6) else draw.integer(0, ndim)
        options["out_axis"] = draw.choice((0, -1))
    elif case.transform == "vmap2":
        options["sizes"] = (draw.choice((2, 1)), draw.choice((3, 2)))
        options["in_axes"] = (draw.integer(0, ndim + 1), draw.integer(0, ndim))
    elif case.transform == "scan":
        options["length"] = draw.choice((2, 1, 3))
    elif case.transform == "remat":
        options["policy"] = draw.choice(("nothing_saveable", "everything_saveable", None))

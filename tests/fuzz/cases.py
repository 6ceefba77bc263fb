"""What is drawn: a program is a mesh and several cases, each one op with its arguments.

Both are literals of Python when printed, so that one line reproduces a failure.
"""

import ast
import dataclasses
import math
from typing import Any

REDUCTIONS = ("psum", "pmax", "pmin", "pmean")
SUMS = ("psum", "pmean", "psum_scatter")
MOVES = ("all_gather", "all_to_all", "ppermute", "ragged_all_to_all")
OPS = ("all_gather", *REDUCTIONS, "psum_scatter", "all_to_all", "ppermute", "ragged_all_to_all")


@dataclasses.dataclass
class Case:
    """One op, its operands and what is done with it.

    Attributes:
        op: its name.
        axis_name: as the op gets it.
        kwargs: the op's other arguments.
        shapes: of a rank's operands, without the dimensions that a transform adds.
        dtypes: theirs.
        varying: axes of the mesh over which the operands vary.
        check_vma: of the shard_map.
        transform: name of a function in `transforms`.
        options: that function's arguments.
        data: kind of values, see `operands`.
        seed: of the values.
        constant: an operand that is not traced, instead of arrays.
        mechanism: default mechanism under which pk_jax runs.
        run: whether there is more to compare than errors and types. Arguments that lax does not
            check can make XLA end the process.
    """

    op: str
    axis_name: Any
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    shapes: tuple[tuple[int, ...], ...] = ((),)
    dtypes: tuple[str, ...] = ("float32",)
    varying: tuple[str, ...] = ()
    check_vma: bool = True
    transform: str = "plain"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    data: str = "integers"
    seed: int = 0
    constant: Any = None
    mechanism: str | None = None
    run: bool = True

    def literal(self) -> dict[str, Any]:
        """The fields that are not at their defaults."""
        values = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            default = (
                field.default_factory()
                if field.default_factory is not dataclasses.MISSING
                else field.default
            )
            if default is dataclasses.MISSING or repr(value) != repr(default):
                values[field.name] = value
        return values


@dataclasses.dataclass
class Program:
    """Cases that run in one jitted function on one mesh.

    Attributes:
        axes: names and sizes of the mesh's axes.
        order: device of each place of the mesh, row-major.
        x64: whether types of 64 bits are enabled.
        cases: what runs.
    """

    axes: tuple[tuple[str, int], ...]
    order: tuple[int, ...]
    x64: bool
    cases: list[Case]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes)

    def only(self, index: int) -> "Program":
        """The same with one of the cases alone."""
        return dataclasses.replace(self, cases=[self.cases[index]])

    def __str__(self) -> str:
        """A literal that `parse` reads."""
        cases = [case.literal() for case in self.cases]
        return repr({"axes": self.axes, "order": self.order, "x64": self.x64, "cases": cases})

    __repr__ = __str__

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """How hypothesis prints it."""
        printer.text(str(self))


def parse(text: str) -> Program:
    """The program that str() printed."""
    values = ast.literal_eval(text)
    cases = [Case(**case) for case in values.pop("cases")]
    return Program(cases=cases, **values)

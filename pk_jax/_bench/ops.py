"""What the harness needs to know of each collective, one small class an op.

Of every result element an op says which element of which rank it is (`source`). All of it is
elementwise in the element's coordinates, so that a check is one fused kernel of any size.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from pk_jax._bench import data
from pk_jax._tuning.collective_cases import CollectiveCase as Case

AXIS = "x"
Call = Callable[..., jax.Array]


class Op:
    """A collective. `ranks` is the number of ranks, `me` this one's, `c` result coordinates."""

    name: ClassVar[str]
    hlo: ClassVar[str]  # what lax's call compiles to
    mechanisms: ClassVar[tuple[str, ...]] = ()
    summed: ClassVar[bool] = False
    # Whether the result takes the place of an operand, the last argument.
    carried: ClassVar[bool] = False

    @property
    def target(self) -> str:
        """The custom call that the CUDA implementation lowers to."""
        return f"pk_jax_{self.name}"

    def fit(self, case: Case, ranks: int) -> Case:
        """The case with the dimension that is cut rounded up to a multiple of the ranks."""
        return case

    def link_bytes(self, case: Case, ranks: int) -> float:
        """Bytes that a rank receives over the link; for psum what the best algorithm needs."""
        raise NotImplementedError

    def arguments(self, case: Case, ranks: int) -> tuple[np.ndarray, ...]:
        """What the call takes between the operand and the carried result, [ranks, ...] each."""
        return ()

    def result_shape(self, case: Case, ranks: int) -> tuple[int, ...]:
        """Shape of one rank's result."""
        raise NotImplementedError

    def call(self, module: Any, case: Case, ranks: int, **options: Any) -> Call:
        """The call of `module`, jax.lax or pk_jax, as a function of the operand and the rest."""
        raise NotImplementedError

    def expected(self, case: Case, ranks: int, me: Any, c: list[Any], data_set: Any) -> jax.Array:
        """This rank's result, from its coordinates."""
        rank, position = self.source(case, ranks, me, c)
        return data.value(rank, data_set, position, self.summed)

    def source(self, case: Case, ranks: int, me: Any, c: list[Any]) -> tuple[Any, jax.Array]:
        """(rank, flat position in its operand) of each element of the result."""
        raise NotImplementedError

    def dependent(self, case: Case) -> bool:
        """Whether there is a chain in which each call sends `step` of the result before."""
        return type(self).step is not Op.step

    def step(self, case: Case, y: jax.Array) -> jax.Array:
        """The next operand, by one elementwise kernel that keeps the magnitude."""
        raise NotImplementedError

    def after(
        self, case: Case, ranks: int, me: Any, c: list[Any], num_calls: int
    ) -> tuple[Any, jax.Array]:
        """`source` of the last result of a dependent chain, up to its sign."""
        return self.source(case, ranks, me, c)


class AllGather(Op):
    """all_gather, tiled, along any dimension."""

    name, hlo = "all_gather", "all-gather"
    mechanisms = ("register", "tma", "copy_engine")

    def link_bytes(self, case: Case, ranks: int) -> float:
        return (ranks - 1) * case.nbytes

    def result_shape(self, case: Case, ranks: int) -> tuple[int, ...]:
        return _scaled(case.shape, case.axis, ranks)

    def call(self, module: Any, case: Case, ranks: int, **options: Any) -> Call:
        return lambda x: module.all_gather(x, AXIS, axis=case.axis, tiled=True, **options)

    def source(self, case: Case, ranks: int, me: Any, c: list[Any]) -> tuple[Any, jax.Array]:
        width = jnp.uint32(case.shape[case.axis])
        rank, inside = c[case.axis] // width, c[case.axis] % width
        return rank, data.flat(_replaced(c, case.axis, inside), case.shape)

    def step(self, case: Case, y: jax.Array) -> jax.Array:
        return -lax.slice_in_dim(y, 0, case.shape[case.axis], axis=case.axis)

    def after(
        self, case: Case, ranks: int, me: Any, c: list[Any], num_calls: int
    ) -> tuple[Any, jax.Array]:
        return 0, self.source(case, ranks, me, c)[1]


class Psum(Op):
    """psum of one array."""

    name, hlo, summed = "psum", "all-reduce", True

    def link_bytes(self, case: Case, ranks: int) -> float:
        return 2 * (ranks - 1) / ranks * case.nbytes

    def result_shape(self, case: Case, ranks: int) -> tuple[int, ...]:
        return case.shape

    def call(self, module: Any, case: Case, ranks: int, **options: Any) -> Call:
        return lambda x: module.psum(x, AXIS, **options)

    def expected(self, case: Case, ranks: int, me: Any, c: list[Any], data_set: Any) -> jax.Array:
        return _sum(ranks, data_set, data.flat(c, case.shape))

    def step(self, case: Case, y: jax.Array) -> jax.Array:
        return jnp.where(lax.axis_index(AXIS) == 0, -y, jnp.zeros_like(y))


class PsumScatter(Op):
    """psum_scatter, tiled, along any dimension."""

    name, hlo, summed = "psum_scatter", "reduce-scatter", True

    def fit(self, case: Case, ranks: int) -> Case:
        return _fitted(case, ranks)

    def link_bytes(self, case: Case, ranks: int) -> float:
        return (ranks - 1) / ranks * case.nbytes

    def result_shape(self, case: Case, ranks: int) -> tuple[int, ...]:
        return _cut(case.shape, case.axis, ranks)

    def call(self, module: Any, case: Case, ranks: int, **options: Any) -> Call:
        return lambda x: module.psum_scatter(
            x, AXIS, scatter_dimension=case.axis, tiled=True, **options
        )

    def expected(self, case: Case, ranks: int, me: Any, c: list[Any], data_set: Any) -> jax.Array:
        part = jnp.uint32(case.shape[case.axis] // ranks)
        there = _replaced(c, case.axis, c[case.axis] + me.astype(jnp.uint32) * part)
        return _sum(ranks, data_set, data.flat(there, case.shape))


class AllToAll(Op):
    """all_to_all, tiled, split along `axis` and joined along `concat_axis`."""

    name, hlo = "all_to_all", "all-to-all"
    mechanisms = ("register", "tma")

    def fit(self, case: Case, ranks: int) -> Case:
        return _fitted(case, ranks)

    def link_bytes(self, case: Case, ranks: int) -> float:
        return (ranks - 1) / ranks * case.nbytes

    def result_shape(self, case: Case, ranks: int) -> tuple[int, ...]:
        return _scaled(_cut(case.shape, case.axis, ranks), case.concat_axis, ranks)

    def call(self, module: Any, case: Case, ranks: int, **options: Any) -> Call:
        return lambda x: module.all_to_all(
            x, AXIS, case.axis, case.concat_axis, tiled=True, **options
        )

    def source(self, case: Case, ranks: int, me: Any, c: list[Any]) -> tuple[Any, jax.Array]:
        part = _cut(case.shape, case.axis, ranks)
        width = jnp.uint32(part[case.concat_axis])
        rank = c[case.concat_axis] // width
        there = _replaced(c, case.concat_axis, c[case.concat_axis] % width)
        cut = jnp.uint32(part[case.axis])
        there = _replaced(there, case.axis, there[case.axis] + me.astype(jnp.uint32) * cut)
        return rank, data.flat(there, case.shape)

    def step(self, case: Case, y: jax.Array) -> jax.Array:
        return -y

    def dependent(self, case: Case) -> bool:
        return case.axis == case.concat_axis  # elsewhere the shapes change

    def after(
        self, case: Case, ranks: int, me: Any, c: list[Any], num_calls: int
    ) -> tuple[Any, jax.Array]:
        if num_calls % 2:
            return self.source(case, ranks, me, c)
        return me, data.flat(c, case.shape)  # twice there and back


class Ppermute(Op):
    """ppermute, from each rank to the next."""

    name, hlo = "ppermute", "collective-permute"
    mechanisms = ("register", "tma")

    def link_bytes(self, case: Case, ranks: int) -> float:
        return case.nbytes

    def result_shape(self, case: Case, ranks: int) -> tuple[int, ...]:
        return case.shape

    def call(self, module: Any, case: Case, ranks: int, **options: Any) -> Call:
        ring = [(i, (i + 1) % ranks) for i in range(ranks)]
        return lambda x: module.ppermute(x, AXIS, ring, **options)

    def source(self, case: Case, ranks: int, me: Any, c: list[Any]) -> tuple[Any, jax.Array]:
        return (me - 1) % ranks, data.flat(c, case.shape)

    def step(self, case: Case, y: jax.Array) -> jax.Array:
        return -y

    def after(
        self, case: Case, ranks: int, me: Any, c: list[Any], num_calls: int
    ) -> tuple[Any, jax.Array]:
        return (me - num_calls) % ranks, data.flat(c, case.shape)


class RaggedAllToAll(Op):
    """ragged_all_to_all of rows, with shares that differ: rank i sends j a weight 1 + (i + j) % n.

    Its result is an operand too, so calls of a chain write one after another into one array.
    """

    name, hlo, carried = "ragged_all_to_all", "ragged-all-to-all", True

    def sizes(self, case: Case, ranks: int) -> np.ndarray:
        """[source, destination, update]: rows of each slice."""
        weights = 1 + np.add.outer(np.arange(ranks), np.arange(ranks)) % ranks
        edges = np.cumsum(np.pad(weights, ((0, 0), (1, 0))), 1) * case.shape[0] // weights[0].sum()
        shares = np.diff(edges, axis=1)
        updates = np.arange(case.updates + 1)
        return np.diff(shares[..., None] * updates // case.updates, axis=2)

    def link_bytes(self, case: Case, ranks: int) -> float:
        rows = self.sizes(case, ranks).sum(2)
        received = (rows * (1 - np.eye(ranks, dtype=int))).sum(0).max()
        return float(received) * case.nbytes / case.shape[0]

    def arguments(self, case: Case, ranks: int) -> tuple[np.ndarray, ...]:
        sent = self.sizes(case, ranks)
        starts = _starts(sent.reshape(ranks, -1))
        received = np.swapaxes(sent, 0, 1)  # [destination, source, update]
        landing = _starts(received.reshape(ranks, -1)).reshape(received.shape)
        there = np.swapaxes(landing, 0, 1)  # where each slice goes, known to its sender
        parts = (starts, sent, there, received)
        return tuple(np.ascontiguousarray(p.reshape(ranks, -1), np.int32) for p in parts)

    def result_shape(self, case: Case, ranks: int) -> tuple[int, ...]:
        return (int(self.sizes(case, ranks).sum((0, 2)).max()), *case.shape[1:])

    def call(self, module: Any, case: Case, ranks: int, **options: Any) -> Call:
        def call(x: jax.Array, *rest: jax.Array) -> jax.Array:
            *offsets_and_sizes, output = rest
            return module.ragged_all_to_all(
                x, output, *offsets_and_sizes, axis_name=AXIS, **options
            )

        return call

    def expected(self, case: Case, ranks: int, me: Any, c: list[Any], data_set: Any) -> jax.Array:
        starts, sent, _, _ = (a.reshape(ranks, ranks, -1) for a in self.arguments(case, ranks))
        received = np.swapaxes(sent.sum(2), 0, 1)
        first = _starts(received)  # [destination, source]: where a source's rows begin
        row, result = c[0], jnp.zeros((), data.DTYPE)  # rows past the last keep their zeros
        for rank in range(ranks):  # the slices of one source follow each other on both sides
            begin, count = (jnp.asarray(a, jnp.uint32)[me, rank] for a in (first, received))
            there = row - begin + jnp.asarray(starts[:, :, 0], jnp.uint32)[rank, me]
            position = data.flat(_replaced(c, 0, there), case.shape)
            arrived = data.value(rank, data_set, position, self.summed)
            result = jnp.where((row >= begin) & (row < begin + count), arrived, result)
        return result


OPS: dict[str, Op] = {
    op.name: op
    for op in (AllGather(), Psum(), PsumScatter(), AllToAll(), Ppermute(), RaggedAllToAll())
}


def row_major(call: Call) -> Call:
    """`call` with operand and result in row-major order.

    XLA would otherwise pass on the layout that NCCL reads or writes, once for all calls of a chain,
    and never pay for the transposes that a producer and a consumer need. pk's are row-major always.
    """

    def fixed(x: jax.Array, *rest: jax.Array) -> jax.Array:
        y = call(with_layout_constraint(x, Layout(tuple(range(x.ndim)))), *rest)
        return with_layout_constraint(y, Layout(tuple(range(y.ndim))))

    return fixed


def _sum(ranks: int, data_set: Any, position: jax.Array) -> jax.Array:
    terms = [data.value(rank, data_set, position, True) for rank in range(ranks)]
    return sum(terms[1:], terms[0])


def _scaled(shape: tuple[int, ...], axis: int, factor: int) -> tuple[int, ...]:
    return (*shape[:axis], shape[axis] * factor, *shape[axis + 1 :])


def _cut(shape: tuple[int, ...], axis: int, parts: int) -> tuple[int, ...]:
    return (*shape[:axis], shape[axis] // parts, *shape[axis + 1 :])


def _fitted(case: Case, ranks: int) -> Case:
    size = -(-case.shape[case.axis] // ranks) * ranks
    shape = (*case.shape[: case.axis], size, *case.shape[case.axis + 1 :])
    return dataclasses.replace(case, shape=shape)


def _replaced(c: list[Any], axis: int, value: Any) -> list[Any]:
    return [*c[:axis], value, *c[axis + 1 :]]


def _starts(counts: np.ndarray) -> np.ndarray:
    """Where each of a row of slices begins when they lie one after another."""
    return np.cumsum(counts, 1) - counts

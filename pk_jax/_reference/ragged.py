"""ragged_all_to_all composed of dense collectives, for XLA has no such operation on CPU.

The sender decides: rank r's row `input_offsets[i] + t`, for each t in 0..send_sizes[i] - 1, goes to
row `output_offsets[i] + t` of rank i // k, where k slices go to each rank. A row that is not in
`operand`, or whose place is not in `output`, does not move. Rows of `output` that nothing moves to
keep their values; where slices overlap, one of them stays, and it is not said which.

Every rank gathers every operand and picks its rows: n times the memory of the operand, and no
gathering by rows that differ from rank to rank, which is all that dense collectives allow.

`batch` operands may lie one after another in `operand` and in `output`, each of an equal number of
rows, as vmap puts them there. The index arrays then hold a value for each of them, the element last
(slice, element), and offsets count from the start of the element.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pk_jax import _compat
from pk_jax._reference import collectives
from pk_jax._reference.collectives import AxisNames, Groups

INDEX_NAMES = ("input_offsets", "send_sizes", "output_offsets", "recv_sizes")


def ragged_all_to_all(
    operand: Any,
    output: Any,
    input_offsets: Any,
    send_sizes: Any,
    output_offsets: Any,
    recv_sizes: Any,
    *,
    axis_name: AxisNames,
    axis_index_groups: Groups = None,
    batch: int = 1,
    checks: bool = False,
) -> Any:
    """The ragged_all_to_all of `batch` operands; with checks, unsound slices raise.

    The error is raised on all ranks of the mesh, since a rank that goes on alone would wait for
    the others in the next collective. So with checks all of them must make the call.
    """
    slices = jnp.stack([input_offsets, send_sizes, output_offsets])
    arrived = _exchange(slices, axis_name, axis_index_groups)
    num_rows, num_places = operand.shape[0] // batch, output.shape[0] // batch

    # Each row of an element against each slice that comes to it: [3][batch, 1, slices].
    first, size, place = jnp.moveaxis(arrived.reshape(3, -1, batch), -1, 1)[:, :, None]
    step = jnp.arange(num_places, dtype=arrived.dtype)[None, :, None] - place
    row = first + step
    covers = (step >= 0) & (step < size) & (row >= 0) & (row < num_rows)
    if checks:
        faults = _faults(slices, arrived[1], recv_sizes, covers, num_rows, num_places)
        rank = _rank(axis_name, axis_index_groups)
        sound = _raise_everywhere(faults, rank, batch, (num_rows, num_places))
        # Into values that no compiler can know beforehand, and into both parts of the result: what
        # nothing needs is dropped, and the callback with it.
        covers &= sound
        output = jnp.where(sound, output, jnp.ones_like(output))
    if 0 in operand.shape or 0 in output.shape:
        return output

    which = jnp.argmax(covers, axis=-1, keepdims=True)
    row = jnp.where(covers.any(-1), jnp.take_along_axis(row, which, -1)[..., 0], 0)
    parts = operand[None]
    if axis_name:
        parts = collectives.all_gather(operand, axis_name, axis_index_groups=axis_index_groups)
    source = which[..., 0] // (covers.shape[2] // parts.shape[0])
    parts = parts.reshape(-1, batch, num_rows, *operand.shape[1:])
    moved = parts[source, jnp.arange(batch)[:, None], row].reshape(output.shape)
    covered = lax.expand_dims(covers.any(-1).ravel(), range(1, output.ndim))
    return jnp.where(covered, moved, output)


def _exchange(slices: Any, axis_name: AxisNames, axis_index_groups: Groups = None) -> Any:
    """Columns of index arrays [m, slices] of the senders, as their receivers see them."""
    if not axis_name:
        return slices
    return collectives.all_to_all(
        slices, axis_name, 1, 1, axis_index_groups=axis_index_groups, tiled=True
    )


def written(arrived: Any, num_rows: int, num_places: int, batch: int) -> Any:
    """Which rows of the result slices [input_offsets, send_sizes, output_offsets] are moved to."""
    _, size, place = absolute(arrived, num_rows, num_places, batch, keep_bad=False)
    # One more row, for slices that end with the array.
    edges = jnp.zeros(num_places * batch + 1, arrived.dtype)
    edges = edges.at[place].add((size > 0).astype(arrived.dtype))
    edges = edges.at[place + size].add(-(size > 0).astype(arrived.dtype))
    return jnp.cumsum(edges)[:-1] > 0


def absolute(slices: Any, num_rows: int, num_places: int, batch: int, *, keep_bad: bool) -> Any:
    """The offsets of [input_offsets, send_sizes, output_offsets], from the start of the arrays.

    A slice is cut to what lies in its element, or would reach into the next one. With keep_bad a
    slice that would be cut is moved out of the arrays instead, for a check of their bounds to find.

    Args:
        slices: [3, slices * batch].
        num_rows: rows of an element of `operand`.
        num_places: rows of an element of `output`.
        batch: the number of elements.
        keep_bad: make a slice out of range of its element one out of range of the arrays.
    """
    first, size, place = slices
    element = jnp.arange(first.shape[0], dtype=slices.dtype) % batch
    if keep_bad:
        bad = _bad_rows(first, size, num_rows)[0] | _bad_rows(place, size, num_places)[0]
        past_end = jnp.where(bad, batch, element)
        return jnp.stack(
            [
                jnp.where(bad, jnp.abs(first), first) + past_end * num_rows,
                size,
                jnp.where(bad, jnp.abs(place), place) + past_end * num_places,
            ]
        )
    # Far offsets first, so that no sum below overflows.
    limit = jnp.iinfo(slices.dtype).max // 4
    size = jnp.where((jnp.abs(first) > limit) | (jnp.abs(place) > limit), 0, size)
    first, place = jnp.clip(first, -limit, limit), jnp.clip(place, -limit, limit)
    start = jnp.maximum(0, jnp.maximum(-first, -place))
    stop = jnp.minimum(size, jnp.minimum(num_rows - first, num_places - place))
    kept = stop > start
    return jnp.stack(
        [
            jnp.where(kept, first + start, 0) + element * num_rows,
            jnp.where(kept, stop - start, 0),
            jnp.where(kept, place + start, 0) + element * num_places,
        ]
    )


def _bad_rows(offset: Any, size: Any, num_rows: int) -> tuple[Any, Any]:
    """Which slices reach out of an array of num_rows rows, and at which row."""
    bad = (size > 0) & ((offset < 0) | (offset > num_rows - size))
    return bad, jnp.where(offset < 0, offset, jnp.maximum(offset, num_rows))


def _faults(
    slices: Any, arriving: Any, recv_sizes: Any, covers: Any, num_rows: int, num_places: int
) -> list[tuple[Any, ...]]:
    """By kind: which index is at fault, the row to name, the value there and the slice's size."""
    first, size, place = slices
    bad_in, row_in = _bad_rows(first, size, num_rows)
    bad_out, row_out = _bad_rows(place, size, num_places)
    twice = covers.sum(-1).ravel() > 1
    rows = jnp.arange(twice.shape[0], dtype=slices.dtype)
    return [
        (size < 0, size, first, size),
        (bad_in, row_in, first, size),
        (bad_out, row_out, place, size),
        (recv_sizes != arriving, arriving, recv_sizes, size),
        (twice, rows, rows, rows),
    ]


def _raise_everywhere(
    faults: list[tuple[Any, ...]], rank: Any, batch: int, bounds: tuple[int, int]
) -> Any:
    """True, which the result must depend on; but if any rank found a fault, an error on all."""
    dtype = faults[0][1].dtype
    records = []
    for kind, (bad, *values) in enumerate(faults):
        if bad.size:
            at = jnp.argmax(bad)
            found = [bad.any(), jnp.full((), kind), rank, at, *(x[at] for x in values)]
            records.append(jnp.stack([x.astype(dtype) for x in found]))
    records = jnp.stack(records)
    # Not only over the op's axes: see ragged_all_to_all.
    # Axis by axis: lax gathers over a vmapped axis only by itself.
    for axis in _compat.bound_axes():
        records = _compat.parallel.all_gather(records, axis, tiled=True)
    record = records[jnp.argmax(records[:, 0])]

    def complain(record: Any) -> Any:
        if record[0]:
            raise ValueError(f"ragged_all_to_all: {_words(np.asarray(record), batch, bounds)}")
        return np.zeros((), np.int32)

    # The callback only where something is wrong: callbacks of the ranks would take turns.
    sound = lax.cond(
        record[0] == 0,
        lambda record: jnp.int32(0),
        lambda record: jax.pure_callback(
            complain, jax.ShapeDtypeStruct((), jnp.int32), record, vmap_method="sequential"
        ),
        record,
    )
    return sound == 0


def _rank(axis_name: AxisNames, axis_index_groups: Groups) -> Any:
    if not axis_name:
        return jnp.int32(0)
    index = lax.axis_index(axis_name)
    if axis_index_groups is None:
        return index
    places = {i: rank for group in axis_index_groups for rank, i in enumerate(group)}
    return jnp.array([places[i] for i in range(len(places))], jnp.int32)[index]


def _words(record: Any, batch: int, bounds: tuple[int, int]) -> str:
    kind, rank, at, row, value, size = record.tolist()[1:]
    if kind == 4:
        element, row = divmod(at, max(bounds[1], 1))
        of = f" of batch element {element}" if batch > 1 else ""
        return (
            f"several slices come to row {row} of `output`{of} on rank {rank} (in a gradient: they "
            "leave that row of `operand`, and one cotangent would be kept)"
        )
    at, element = divmod(at, batch)
    of = f" of batch element {element}" if batch > 1 else ""
    if kind == 0:
        return f"rank {rank} has send_sizes[{at}] = {size}{of}, which is negative"
    if kind == 3:
        return f"rank {rank} has recv_sizes[{at}] = {value}{of}, and {row} rows are sent there"
    array, offsets = ("operand", "input_offsets") if kind == 1 else ("output", "output_offsets")
    return (
        f"row {row} of `{array}`{of} is out of range: it has {bounds[kind - 1]} rows, and rank "
        f"{rank} sends {size} rows with {offsets}[{at}] = {value}"
    )

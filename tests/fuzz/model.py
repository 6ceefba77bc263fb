"""The collectives in NumPy, for what lax cannot say: exact sums, and ragged_all_to_all on CPU."""

from typing import Any

import numpy as np

from .cases import Case, Program


def groups_of(program: Program, case: Case) -> list[list[int]] | None:
    """Ranks of each group of the case's op, in rank order; None if its axes are not the mesh's."""
    names = case.axis_name if isinstance(case.axis_name, (tuple, list)) else (case.axis_name,)
    if not names or not set(names) <= set(program.names) or len(set(names)) < len(names):
        return None
    ranks = np.arange(program.num_ranks).reshape(program.sizes)
    places = [program.names.index(name) for name in names]
    rows = np.moveaxis(ranks, places, range(-len(places), 0))
    rows = rows.reshape(-1, np.prod([program.sizes[i] for i in places], dtype=int))
    chosen = case.kwargs.get("axis_index_groups") or [range(rows.shape[1])]
    try:
        return [[int(row[i]) for i in group] for row in rows for group in chosen]
    except (TypeError, IndexError):
        return None


def by_rank(program: Program, case: Case, x: np.ndarray) -> np.ndarray:
    """The operand of each rank, from that of each place on the axes over which it varies."""
    varying = [name for name in program.names if name in case.varying]
    sizes = [dict(program.axes)[name] for name in varying]
    x = x.reshape(*sizes, *x.shape[1:])
    for i, name in enumerate(program.names):
        if name not in varying:
            x = np.expand_dims(x, i)
    shape = x.shape[len(program.names) :]
    return np.broadcast_to(x, (*program.sizes, *shape)).reshape(program.num_ranks, *shape)


def exact_sum(
    program: Program, case: Case, x: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int] | None:
    """What psum, pmean or psum_scatter of x is, in 64 bits, by rank.

    Returns:
        The result, the sum of magnitudes in the same places, which bounds what rounding can do, and
        the ranks in a group.
    """
    groups = groups_of(program, case)
    if groups is None:
        return None
    wide = np.complex128 if np.iscomplexobj(x) else np.float64
    x = by_rank(program, case, x).astype(wide)
    results = []
    for terms in (x, np.abs(x)):
        result = [None] * program.num_ranks
        for group in groups:
            total = terms[group].sum(0)
            parts = [total] * len(group)
            if case.op == "pmean":
                parts = [total / len(group)] * len(group)
            elif case.op == "psum_scatter":
                at = case.kwargs["scatter_dimension"]
                parts = np.split(total, len(group), at)
                if not case.kwargs["tiled"]:
                    parts = [np.squeeze(part, at) for part in parts]
            for rank, part in zip(group, parts, strict=True):
                result[rank] = part
        results.append(np.stack(result))
    return results[0], results[1], len(groups[0])


def ragged(program: Program, case: Case, operands: list[np.ndarray]) -> list[np.ndarray] | None:
    """What the case's function gives on each rank for ragged_all_to_all, transforms included."""
    groups = groups_of(program, case)
    if groups is None:
        return None
    operand, output = (by_rank(program, case, x) for x in operands[:2])
    indices = operands[2:]
    if case.transform == "scan":
        steps = [
            _ragged(groups, operand[:, i], output[:, i], [x[:, i] for x in indices])
            for i in range(case.options["length"])
        ]
        return [np.stack(steps, 1)]
    if case.transform == "vmap":
        at, size = case.options["in_axis"], case.options["size"]
        if at is None:
            parts = [_ragged(groups, operand, output, indices)] * size
        else:
            parts = [
                _ragged(
                    groups,
                    operand.take(i, at + 1),
                    output.take(i, at + 1),
                    [x[:, i] for x in indices],
                )
                for i in range(size)
            ]
        out = case.options["out_axis"]
        return [np.stack(parts, out + 1 if out >= 0 else out)]
    if case.transform == "jit":
        return [
            _ragged(groups, operand, output, indices),
            _ragged(groups, operand[:, ::-1], output, indices),
        ]
    if case.transform in ("grad", "remat"):
        result = _ragged(groups, operand, output, indices)
        cotangent = 2 * result * _weights(program, result)
        grads = _ragged_transpose(groups, operand, cotangent, indices)
        return [_summed(program, case, x) for x in grads]
    return [_ragged(groups, operand, output, indices)]


def _summed(program: Program, case: Case, x: np.ndarray) -> np.ndarray:
    """A gradient by rank; that of an operand typed as equal over some axes is added over them."""
    if not case.check_vma:
        return x
    at = tuple(i for i, name in enumerate(program.names) if name not in case.varying)
    by_axis = x.reshape(*program.sizes, *x.shape[1:])
    total = by_axis.sum(at, keepdims=True, dtype=x.dtype)
    return np.broadcast_to(total, by_axis.shape).reshape(x.shape)


def _moved(groups: list[list[int]], indices: list[np.ndarray]):
    """(sender, receiver, its rows there, the rows here) of each slice."""
    input_offsets, send_sizes, output_offsets, _ = indices
    for group in groups:
        updates = send_sizes.shape[1] // len(group)
        for source in group:
            for i in range(send_sizes.shape[1]):
                size = int(send_sizes[source, i])
                start, to = int(input_offsets[source, i]), int(output_offsets[source, i])
                receiver = group[i // updates]
                yield source, receiver, slice(start, start + size), slice(to, to + size)


def _ragged(groups, operand, output, indices) -> np.ndarray:
    result = output.copy()
    for source, receiver, rows, place in _moved(groups, indices):
        result[receiver, place] = operand[source, rows]
    return result


def _ragged_transpose(groups, operand, cotangent, indices) -> list[np.ndarray]:
    to_operand, to_output = np.zeros_like(operand), cotangent.copy()
    for source, receiver, rows, place in _moved(groups, indices):
        to_operand[source, rows] += cotangent[receiver, place]
        to_output[receiver, place] = 0
    return [to_operand, to_output]


def _weights(program: Program, result: np.ndarray) -> np.ndarray:
    """The weights of `transforms`, by rank."""
    ramp = np.arange(result[0].size).reshape(result.shape[1:]) * 7
    ranks = np.arange(program.num_ranks).reshape(-1, *[1] * ramp.ndim)
    return ((ramp + ranks) % 3 - 1).astype(result.dtype)


def ragged_indices(
    program: Program, case: Case, rng: np.random.Generator, *, disjoint: bool
) -> list[Any]:
    """Offsets and sizes of slices that fit and do not overlap where they arrive, by rank.

    Args:
        program: the mesh.
        case: the op.
        rng: randomness.
        disjoint: also keep apart the slices that a rank sends.
    """
    length = case.options["updates"] * case.options["group"]
    arrays = np.zeros((4, program.num_ranks, length), case.options["index"])
    groups = groups_of(program, case)
    if groups is None or length % len(groups[0]):
        return list(arrays)
    input_offsets, send_sizes, output_offsets, recv_sizes = arrays
    rows, room = case.shapes[0][0], case.shapes[1][0]
    updates = length // len(groups[0])
    for group in groups:
        sent = dict.fromkeys(group, 0)
        for j, receiver in enumerate(group):
            used = 0
            slices = [(i, u) for i in range(len(group)) for u in range(updates)]
            for i, u in rng.permutation(slices):
                source, at = group[i], j * updates + u
                limit = min(rows - sent[source] if disjoint else rows, room - used)
                size = int(rng.integers(0, max(limit // 2, min(limit, 1)) + 1))
                start = sent[source] if disjoint else int(rng.integers(0, rows - size + 1))
                gap = int(rng.integers(0, min(2, room - used - size) + 1))
                input_offsets[source, at] = start
                send_sizes[source, at] = size
                output_offsets[source, at] = used + gap
                recv_sizes[receiver, i * updates + u] = size
                used += gap + size
                sent[source] += size if disjoint else 0
    return list(arrays)

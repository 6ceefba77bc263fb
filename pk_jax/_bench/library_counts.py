"""What the compiled library counts of its communicators: their launches and their memory."""

from pk_jax import _registry


def launches() -> dict[tuple[int, int, int], int] | None:
    """Executions of pk's handlers so far, by (device, rank, ranks); None where nobody counts."""
    if _registry.library is None:
        return None
    counts: dict[tuple[int, int, int], int] = {}
    for one in _registry.library.communicators():
        key = (one["device"], one["rank"], one["num_ranks"])
        counts[key] = counts.get(key, 0) + one["launches"]
    return counts


def launches_a_call(
    before: dict[tuple[int, int, int], int] | None,
    after: dict[tuple[int, int, int], int] | None,
    num_calls: int,
) -> int | None:
    """Launches of a rank for each of `num_calls` calls run between two counts.

    None where nobody counts, where the calls launched nothing of pk's, or where ranks or calls
    differ, which no number could describe.
    """
    if before is None or after is None:
        return None
    launched = {count - before.get(key, 0) for key, count in after.items()} - {0}
    if len(launched) != 1:
        return None
    total = launched.pop()
    return None if total % num_calls else total // num_calls


def workspace_bytes() -> int | None:
    """Bytes a GPU holds for the communicators of the run so far; None where there are none."""
    library = _registry.library
    alive = library.communicators() if library is not None else []
    per_device: dict[int, int] = {}
    for one in alive:
        per_device[one["device"]] = per_device.get(one["device"], 0) + one["workspace_bytes"]
    return max(per_device.values(), default=None)

"""Timelines of kernels: what the warps of each GPU did, and when, as the device recorded it.

A library that is built with PK_JAX_TIMELINE leaves a record at the end of each thing that a warp
does (cuda/tile/timeline.cuh). Here the records become laps with a beginning and an end, on one
clock for all devices, and a trace that chrome://tracing and Perfetto show. `timeline_plot.py` draws
them.

The clocks of two devices are microseconds or more apart, and drift. So the host asks each for its
time before and after the run, a few hundred times, and believes the answer that came fastest; a
device's times become the host's by the line through the two.
"""

import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pk_jax import _registry

# As the device writes them: see cuda/tile/timeline.h.
EVENT = np.dtype(
    [
        ("ns", "<u4"),
        ("id", "<u4"),
        ("bytes", "<u4"),
        ("did", "u1"),
        ("warp", "u1"),
        ("peer", "u1"),
        ("unused", "u1"),
    ]
)
HEAD = np.dtype(
    [
        ("sm", "<u4"),
        ("block", "<u4"),
        ("grid", "<u4"),
        ("dropped", "<u4"),
        ("began", "<u8"),
        ("unused", "<u8"),
    ]
)
NOBODY = 255
NO_ID = 0xFFFFFFFF
BLOCK_BYTES = 1 << 16
LAP = np.dtype(
    [
        ("rank", "i4"),
        ("sm", "i4"),
        ("block", "i4"),
        ("warp", "i4"),
        ("did", "i4"),
        ("id", "u4"),
        ("peer", "i4"),
        ("bytes", "i8"),
        ("begin", "f8"),  # microseconds, on the clock that all ranks share
        ("end", "f8"),
    ]
)
# What a warp is called after, the first of these that it did.
ROLES = {
    "multiply": "consumer",
    "load": "mover",
    "wait for rows": "mover",
    "wait for flags": "watcher",
    "push": "pusher",
    "copy own": "pusher",
    "send": "storer",
    "store": "storer",
}


class Reading(NamedTuple):
    """What a device's clock said, and the host's within `error_ns` of that; in nanoseconds."""

    device_ns: int
    host_ns: int
    error_ns: int


class Clock(NamedTuple):
    """A device's clock on the host's, by a reading before the run and one after it."""

    before: Reading
    after: Reading

    def host_ns(self, device_ns: np.ndarray) -> np.ndarray:
        """The host's time, since that of the first reading, of times of the device."""
        passed = device_ns.astype(np.int64) - self.before.device_ns
        whole = self.after.device_ns - self.before.device_ns
        rate = (self.after.host_ns - self.before.host_ns) / whole if whole else 1.0
        return passed * rate

    @property
    def error_ns(self) -> int:
        """The most that a time may be wrong by."""
        return max(self.before.error_ns, self.after.error_ns)


class Recording(NamedTuple):
    """What one device left.

    Attributes:
        blocks: the records as they are in memory.
        blocks_dropped: thread blocks that found no room.
        clock: the device's.
    """

    blocks: bytes
    blocks_dropped: int
    clock: Clock


class Timeline(NamedTuple):
    """One launch of an op on all ranks.

    Attributes:
        laps: of LAP; microseconds since the first block of any rank began.
        names: what `did` means.
        about: of the run, for titles and the trace: case, shape, gpu, and the like; with what was
            dropped, and how far to trust the clocks.
    """

    laps: np.ndarray
    names: Sequence[str]
    about: dict[str, Any]

    def names_in(self, laps: np.ndarray) -> list[str]:
        """What was done in some laps."""
        return [self.names[int(did)] for did in np.unique(laps["did"])]

    def of(self, *names: str) -> np.ndarray:
        """The laps in which one of these was done."""
        return self.laps[np.isin(self.laps["did"], [self.names.index(name) for name in names])]


def why_missing() -> str | None:
    """Why nothing can be recorded here; None if it can."""
    library = _registry.library
    if library is None:
        return _registry.why_missing()
    if library.build_info()["timeline"]:
        return None
    return (
        "this build of pk_jax records no timelines; build it with "
        "-C cmake.define.PK_JAX_TIMELINE=ON (pip) or -DPK_JAX_TIMELINE=ON (CMake)"
    )


def record(run: Callable[[], Any], devices: Sequence[int]) -> tuple[list[Recording], list[str]]:
    """Runs `run`, which must wait for its own end, and gives what each device recorded.

    Args:
        run: the program; warm, for the first run of a kernel is not what anybody wants to see.
        devices: ordinals of local devices, by rank.

    Returns:
        The recordings, by rank, and the names of what was done.

    Raises:
        RuntimeError: the library records nothing.
    """
    reason = why_missing()
    if reason is not None:
        raise RuntimeError(reason)
    library = _registry.library
    layout = library.timeline_layout()
    assert layout["event_bytes"] == EVENT.itemsize, layout
    before = [Reading(*library.timeline_clock(device)) for device in devices]
    started = []
    try:
        for device in devices:
            library.timeline_start(device)
            started.append(device)
        run()
    finally:
        taken = [library.timeline_take(device) for device in started]
    after = [Reading(*library.timeline_clock(device)) for device in devices]
    clocks = map(Clock, before, after)
    recordings = [
        Recording(blocks, dropped, clock)
        for (blocks, dropped), clock in zip(taken, clocks, strict=True)
    ]
    return recordings, layout["names"]


def timeline(
    recordings: Sequence[Recording],
    names: Sequence[str],
    about: dict[str, Any],
    block_bytes: int = BLOCK_BYTES,
) -> Timeline:
    """The last launch of each rank, beside each other.

    Args:
        recordings: by rank.
        names: what was done, by number.
        about: what to say of the run.
        block_bytes: of a thread block's records.

    Raises:
        ValueError: there is no whole launch, or launches overlapped.
    """
    start = min(one.clock.before.host_ns for one in recordings)
    found, dropped, steps = [], 0, []
    for rank, one in enumerate(recordings):
        blocks = last_launch(np.frombuffer(one.blocks, np.uint8).reshape(-1, block_bytes))
        heads = blocks[:, : HEAD.itemsize].copy().view(HEAD)[:, 0]
        dropped += int(heads["dropped"].sum())
        laps, ns = laps_of(blocks, heads, rank)
        offset = one.clock.before.host_ns - start
        for side in ("begin", "end"):
            laps[side] = (one.clock.host_ns(ns[side]) + offset) / 1e3
        found.append(laps)
        steps.append(resolution(np.unique(np.concatenate([ns["begin"], ns["end"]]))))
    laps = np.concatenate(found)
    if len(laps):
        first = laps["begin"].min()
        laps["begin"] -= first
        laps["end"] -= first
    more = {
        "ranks": len(recordings),
        "events_dropped": dropped,
        "blocks_dropped": sum(one.blocks_dropped for one in recordings),
        "clock_error_ns": max(one.clock.error_ns for one in recordings),
        "resolution_ns": max(steps),
        "us": float(laps["end"].max()) if len(laps) else 0.0,
    }
    return Timeline(laps, list(names), about | more)


def last_launch(blocks: np.ndarray) -> np.ndarray:
    """The blocks of the last whole launch: launches follow each other, each as large as its grid.

    Raises:
        ValueError: there is none, or blocks of different grids are mixed.
    """
    grids = blocks[:, : HEAD.itemsize].copy().view(HEAD)[:, 0]["grid"].astype(int)
    at, last = 0, None
    while at < len(blocks):
        end = at + grids[at]
        if end > len(blocks):
            break
        if (grids[at:end] != grids[at]).any():
            raise ValueError(f"launches of {sorted(set(grids[at:end].tolist()))} blocks overlap")
        at, last = end, slice(at, end)
    if last is None:
        raise ValueError(f"no whole launch among the {len(blocks)} blocks that were recorded")
    return blocks[last]


def laps_of(blocks: np.ndarray, heads: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The laps of some blocks, and their times on the device's clock as "begin" and "end".

    A warp's lap begins where the one before ended, the first one where its block began.
    """
    events = blocks[:, HEAD.itemsize :].copy().view(EVENT)
    which, _ = np.nonzero(events["did"])
    kept = events[events["did"] != 0]
    order = np.lexsort((np.arange(len(kept)), kept["warp"], which))  # of a warp as they came
    which, kept = which[order], kept[order]
    laps = np.zeros(len(kept), LAP)
    laps["rank"] = rank
    for name in ("sm", "block"):
        laps[name] = heads[name][which]
    for name in ("warp", "did", "id", "bytes"):
        laps[name] = kept[name]
    laps["peer"] = np.where(kept["peer"] == NOBODY, -1, kept["peer"].astype(int))
    ns = np.zeros(len(kept), [("begin", "i8"), ("end", "i8")])
    began = heads["began"].astype(np.int64)[which]
    ns["end"] = began + kept["ns"]
    same = (which[1:] == which[:-1]) & (kept["warp"][1:] == kept["warp"][:-1])
    ns["begin"] = began
    ns["begin"][1:][same] = ns["end"][:-1][same]
    return laps, ns


def resolution(times: np.ndarray) -> int:
    """The step of a clock, from times that it gave; 0 for fewer than two."""
    return int(np.gcd.reduce(np.diff(times))) if len(times) > 1 else 0


def role(names: Sequence[str]) -> str:
    """What a warp that did these things is called."""
    return next((title for name, title in ROLES.items() if name in names), "warp")


def chrome_trace(found: Timeline) -> dict[str, Any]:
    """The timeline in Chrome's trace format: a process a GPU, a thread a warp, an event a lap."""
    events: list[dict[str, Any]] = []
    for rank in range(found.about["ranks"]):
        named = {"name": f"GPU {rank}"}
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": named})
        mine = found.laps[found.laps["rank"] == rank]
        for block, warp in np.unique(mine[["block", "warp"]]).tolist():
            its = mine[(mine["block"] == block) & (mine["warp"] == warp)]
            title = role(found.names_in(its))
            named = {"name": f"SM {its['sm'][0]} block {block} {title} {warp}"}
            where = {"pid": rank, "tid": thread(block, warp)}
            events.append({"ph": "M", "name": "thread_name", **where, "args": named})
            events += [event(lap, found.names) for lap in its]
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": found.about}


def thread(block: int, warp: int) -> int:
    """The number of a warp's thread in the trace."""
    return block * 32 + warp


def event(lap: np.void, names: Sequence[str]) -> dict[str, Any]:
    """One lap in the trace."""
    name, number = names[int(lap["did"])], int(lap["id"])
    args: dict[str, Any] = {}
    if name == "multiply" and lap["peer"] < 0 and number != NO_ID:
        args["tile"] = [number >> 16, number & 0xFFFF]  # its row, and its column
    elif number != NO_ID:
        args["id"] = number
    if lap["peer"] >= 0:
        args["peer"] = int(lap["peer"])
    if lap["bytes"]:
        args["bytes"] = int(lap["bytes"])
    return {
        "ph": "X",
        "name": name,
        "cat": role([name]),
        "pid": int(lap["rank"]),
        "tid": thread(int(lap["block"]), int(lap["warp"])),
        "ts": round(float(lap["begin"]), 3),
        "dur": round(float(lap["end"] - lap["begin"]), 3),
        "args": args,
    }


def save(found: Timeline, path: pathlib.Path) -> None:
    """Writes the trace as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(chrome_trace(found), separators=(",", ":")) + "\n")


def sent(laps: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Bytes that crossed the link in each bin, spread evenly over the laps that sent them."""
    total = np.zeros(len(edges))
    moving = laps[laps["bytes"] > 0]
    for block, warp in np.unique(moving[["block", "warp"]]).tolist():
        its = laps[(laps["block"] == block) & (laps["warp"] == warp)]
        so_far = np.cumsum(its["bytes"], dtype=float)
        before = so_far - its["bytes"]
        times = np.stack([its["begin"], its["end"]], 1).ravel()
        total += np.interp(edges, times, np.stack([before, so_far], 1).ravel(), left=0.0)
    return np.diff(total)


def busy(laps: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """The time, over all blocks, in which one of a block's warps did what these laps are of."""
    total = np.zeros(len(edges))
    for block in np.unique(laps["block"]):
        its = np.sort(laps[laps["block"] == block], order="begin")
        ends = np.maximum.accumulate(its["end"])
        begins = np.maximum(its["begin"], np.concatenate([[0.0], ends[:-1]]))
        lasted = np.maximum(ends - begins, 0.0)
        so_far = np.cumsum(lasted)
        times = np.stack([np.minimum(begins, ends), ends], 1).ravel()
        total += np.interp(edges, times, np.stack([so_far - lasted, so_far], 1).ravel(), left=0.0)
    return np.diff(total)

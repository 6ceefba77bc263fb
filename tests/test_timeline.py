"""Timelines: made-up records become laps on one clock, a trace and a picture."""

import itertools
import json
import pathlib
import runpy

import numpy as np
import pytest

from pk_jax import _registry
from pk_jax._bench import collective_matmul, fused_bench, harness, timeline, timeline_plot
from pk_jax._bench.ops import AXIS
from pk_jax._bench.timeline import Clock, Reading
from pk_jax._tuning.fused_cases import GatherCase, ReduceCase

NAMES = ["nothing", "enter", "wait for operands", "multiply", "push", "wait for flags", "send"]
ROOT = pathlib.Path(__file__).resolve().parents[1]
ROOM = 12  # events of a block
BLOCK_BYTES = timeline.HEAD.itemsize + ROOM * timeline.EVENT.itemsize
# What is recorded on GPUs.
SMALL = {
    "all_gather_matmul": GatherCase("small", 2048, 1024, 512),
    "matmul_reduce_scatter": ReduceCase("small", 2048, 1024, 512),
    "matmul_all_reduce": ReduceCase("small", 2048, 1024, 512, all_reduce=True),
}


def block(number, grid, began, *events, sm=0, dropped=0):
    """A block's records; an event is (ns since it began, warp, name, and id, peer and bytes)."""
    head = np.zeros(1, timeline.HEAD)
    head[0] = (sm or number + 50, number, grid, dropped, began, 0)
    rows = np.zeros(ROOM, timeline.EVENT)
    for i, (ns, warp, name, *more) in enumerate(events):
        identity, peer, count = [*more, *(0, timeline.NOBODY, 0)[len(more) :]]
        rows[i] = (ns, identity, count, NAMES.index(name), warp, peer, 0)
    return head.tobytes() + rows.tobytes()


def steady(device_ns, host_ns, error_ns=300):
    """A clock that goes as the host's."""
    before = Reading(device_ns, host_ns, error_ns)
    return Clock(before, Reading(device_ns + 10_000, host_ns + 10_000, error_ns))


def recording(*blocks, clock=None, dropped=0):
    return timeline.Recording(b"".join(blocks), dropped, clock or steady(0, 0))


def read(*recordings, **about):
    return timeline.timeline(recordings, NAMES, about, BLOCK_BYTES)


def two_ranks():
    """A computing and a moving block on each of two ranks, whose clocks differ by a second."""
    made = []
    for rank, device_ns in enumerate((5_000, 1_000_005_000)):
        compute = block(
            1, 2, device_ns + 1000,
            (4000, 0, "wait for operands"), (2000, 9, "wait for flags", 3 << 16 | 7),
            (9000, 0, "multiply", 3 << 16 | 7), (11000, 0, "wait for operands"),
            (15000, 0, "multiply", 4 << 16 | 7),
        )  # fmt: skip
        pushes = [(3000 + 2000 * i, 1, "push", i, 1 - rank, 4096) for i in range(4)]
        move = block(0, 2, device_ns + 500, (1000, 1, "enter"), *pushes)
        made.append(recording(move, compute, clock=steady(device_ns, 77_000 + 200 * rank)))
    return read(*made, op="all_gather_matmul", case="tiny", shape=[2, 3, 4])


def test_a_lap_begins_where_the_one_before_ended():
    found = two_ranks()
    mine = found.laps[(found.laps["rank"] == 0) & (found.laps["block"] == 1)]
    consumer = mine[mine["warp"] == 0]
    assert [NAMES[i] for i in consumer["did"]] == ["wait for operands", "multiply"] * 2
    # From the first block's beginning, which was 0.5 us before this one's.
    np.testing.assert_allclose(consumer["begin"], [0.5, 4.5, 9.5, 11.5])
    np.testing.assert_allclose(consumer["end"], [4.5, 9.5, 11.5, 15.5])
    watcher = mine[mine["warp"] == 9]
    assert watcher[["begin", "end"]].tolist() == [(0.5, 2.5)]
    assert set(mine["sm"]) == {51} and set(mine["peer"]) == {-1}


def test_ranks_are_put_on_one_clock():
    found = two_ranks()
    first = [found.laps["begin"][found.laps["rank"] == r].min() for r in (0, 1)]
    np.testing.assert_allclose(first, [0.0, 0.2])  # by the host's clock; the devices' say 1 s
    assert found.about["us"] == pytest.approx(15.7)
    assert found.about["clock_error_ns"] == 300 and found.about["resolution_ns"] == 500


def test_a_clock_that_drifts_is_corrected():
    clock = Clock(Reading(100, 1000, 5), Reading(1100, 3000, 9))
    np.testing.assert_allclose(clock.host_ns(np.array([100, 600, 1100])), [0, 1000, 2000])
    assert clock.error_ns == 9


def test_the_last_whole_launch_is_taken():
    def launch(ns, *numbers):
        return [block(n, 2, ns, (10, 0, "multiply")) for n in numbers]

    found = read(recording(*launch(0, 0, 1), *launch(1000, 1, 0), *launch(2000, 1)))
    assert found.laps["block"].tolist() == [1, 0] and found.about["us"] == pytest.approx(0.01)
    with pytest.raises(ValueError, match="no whole launch among the 1 blocks"):
        read(recording(*launch(0, 0)))
    mixed = [*launch(0, 0), block(0, 3, 0, (10, 0, "multiply")), *launch(0, 1)]
    with pytest.raises(ValueError, match=r"launches of \[2, 3\] blocks overlap"):
        read(recording(*mixed))


def test_what_was_dropped_is_told():
    full = block(0, 1, 0, *[(10 * i, 0, "multiply") for i in range(ROOM)], dropped=4)
    found = read(recording(full, dropped=3))
    assert len(found.laps) == ROOM
    assert (found.about["events_dropped"], found.about["blocks_dropped"]) == (4, 3)
    assert "DROPPED: 4 events, 3 blocks" in timeline_plot.title(found.about)


def test_the_trace_is_chromes(tmp_path):
    found = two_ranks()
    timeline.save(found, tmp_path / "new" / "t.json")
    trace = json.loads((tmp_path / "new" / "t.json").read_text())
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["otherData"]["case"] == "tiny" and trace["otherData"]["ranks"] == 2
    spans, named = {}, {}
    for event in trace["traceEvents"]:
        if event["ph"] == "M":
            named[event["pid"], event.get("tid")] = event["args"]["name"]
            continue
        assert set(event) == {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"}
        assert event["ph"] == "X" and event["name"] in NAMES and event["dur"] >= 0
        spans.setdefault((event["pid"], event["tid"]), []).append(event)
    assert sum(map(len, spans.values())) == len(found.laps) == 20
    assert set(named) == set(spans) | {(0, None), (1, None)}
    assert named[0, None] == "GPU 0" and named[1, 32] == "SM 51 block 1 consumer 0"
    assert spans[0, 32][1]["args"] == {"tile": [3, 7]}
    assert spans[0, 1][1]["args"] == {"id": 0, "peer": 1, "bytes": 4096}
    for lane in spans.values():
        for one, then in itertools.pairwise(lane):
            assert one["ts"] + one["dur"] <= then["ts"] + 2e-3


def test_bytes_and_busy_time_are_spread_over_their_laps():
    found = two_ranks()
    mine = found.laps[found.laps["rank"] == 0]
    edges = np.array([0.0, 1.5, 2.5, 9.5, 20.0])
    # Four pieces between 1 us and 9 us, 2 us each.
    np.testing.assert_allclose(timeline.sent(mine, edges), [1024, 2048, 13312, 0], atol=1e-6)
    multiplied = found.of("multiply")
    busy = timeline.busy(multiplied[multiplied["rank"] == 0], edges)
    np.testing.assert_allclose(busy, [0, 0, 5, 4], atol=1e-9)


def test_two_consumers_at_once_are_busy_once():
    events = [(0, 0, "enter"), (3000, 4, "enter"), (6000, 0, "multiply"), (8000, 4, "multiply")]
    found = read(recording(block(0, 1, 0, *events)))
    busy = timeline.busy(found.of("multiply"), np.array([0.0, 4.0, 10.0]))
    np.testing.assert_allclose(busy, [4, 4])


def test_a_picture(tmp_path):
    found = two_ranks()
    timeline_plot.draw(found, tmp_path / "new" / "t.png")
    assert (tmp_path / "new" / "t.png").read_bytes().startswith(b"\x89PNG")
    title = timeline_plot.title(found.about)
    assert "all_gather_matmul tiny 2x3x4: 16 us, 2 GPUs" in title and "DROPPED" not in title
    parts = {"way": "sequential", "kernels": "all_gather, matmul"}
    title = timeline_plot.title(found.about | parts)
    assert "2x3x4 (sequential): 16 us" in title
    assert "the last that records of all_gather, matmul" in title
    lanes = timeline_plot.lanes_of(found, 1, 8, 2)
    assert [label for label, _ in lanes] == ["mover SM 50", "SM 51"]
    assert timeline_plot.spread(np.arange(124), 8).tolist()[::7] == [0, 123]


def test_the_library_says_what_is_read_here():
    if _registry.library is None:
        pytest.skip("no compiled library")
    layout = _registry.library.timeline_layout()
    assert layout["event_bytes"] == timeline.EVENT.itemsize
    assert layout["head_bytes"] == timeline.HEAD.itemsize
    assert layout["block_bytes"] == timeline.BLOCK_BYTES
    assert set(layout["names"]) == set(timeline_plot.COLOURS) | {"nothing"}
    assert set(timeline.ROLES) < set(layout["names"])


@pytest.mark.skipif(timeline.why_missing() is None, reason="this library records")
def test_a_library_that_does_not_record_says_how_to_build_one():
    with pytest.raises(RuntimeError, match=r"PK_JAX_TIMELINE=ON|pip install|from source"):
        timeline.record(lambda: None, [0])
    if _registry.library is not None:
        for function in ("timeline_start", "timeline_take", "timeline_clock"):
            with pytest.raises(RuntimeError, match="PK_JAX_TIMELINE=ON"):
                getattr(_registry.library, function)(0)


def program(monkeypatch):
    script = ROOT / "benchmarks" / "timeline.py"
    if not script.is_file():
        pytest.skip("needs the checkout, not just the tests")
    monkeypatch.syspath_prepend(script.parent)
    return runpy.run_path(str(script))


def test_the_program_names_the_cases(monkeypatch, tmp_path):
    arguments = ["--op", "all_gather_matmul", "--case", "nonsense", "--out", str(tmp_path)]
    with pytest.raises(SystemExit, match="no case 'nonsense'; they are agmm-70b-qkv"):
        program(monkeypatch)["main"](arguments)


@pytest.mark.skipif(timeline.why_missing() is None, reason="this library records")
def test_the_program_says_what_it_lacks(monkeypatch, tmp_path, capsys):
    arguments = ["--op", "matmul_all_reduce", "--case", "mmar-70b-o", "--out", str(tmp_path)]
    assert program(monkeypatch)["main"](arguments) == 1
    assert "REFUSED: " in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_program_writes_a_trace_and_a_picture(monkeypatch, tmp_path):
    """The chain runs on CPUs, where what it recorded has to be made up."""
    lengths = []

    def record(run, devices):
        lengths.append(len(run()))
        full = block(0, 1, 0, (10, 0, "multiply")).ljust(timeline.BLOCK_BYTES, b"\0")
        return [recording(full) for _ in devices], NAMES

    monkeypatch.setattr(timeline, "why_missing", lambda: None)
    monkeypatch.setattr(timeline, "record", record)
    monkeypatch.setattr(fused_bench, "config_of", lambda *_: {"kernels": "all_gather, matmul"})
    monkeypatch.setattr(collective_matmul, "CASES", collective_matmul.ON_CPU)
    main = program(monkeypatch)["main"]
    arguments = ["--op", "all_gather_matmul", "--case", "agmm-tiny", "--out", str(tmp_path)]
    assert main(arguments) == main([*arguments, "--way", "sequential"]) == 0
    assert lengths == [3, 3]
    stems = ["timeline_agmm-tiny", "timeline_agmm-tiny_sequential"]
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == sorted(stem + suffix for stem in stems for suffix in (".json", ".png"))
    about = json.loads((tmp_path / f"{stems[1]}.json").read_text())["otherData"]
    assert (about["op"], about["way"]) == ("all_gather_matmul", "sequential")
    assert (about["shape"], about["kernels"]) == ([64, 16, 40], "all_gather, matmul")


def test_the_program_names_the_ways(monkeypatch):
    recorded = program(monkeypatch)["recorded"]
    (case,) = collective_matmul.ON_CPU["matmul_reduce_scatter"]
    with pytest.raises(SystemExit, match=r"no way 'xla'; they are default, .*, intra_sm 128x64$"):
        recorded("matmul_reduce_scatter", case, "xla", None)
    with pytest.raises(SystemExit, match=r"mmrs-tiny default: nothing is recorded of jax\.lax"):
        recorded("matmul_reduce_scatter", case, "default", None)


@pytest.mark.parametrize("op", SMALL)
def test_ways_of_one_kernel_record(op, monkeypatch, mesh_of, can_run, calls):
    """Each schedule and plan is, for CUDA, one call of a kernel that the program knows."""
    assert op in program(monkeypatch)["RECORDING"]
    kind = collective_matmul.kind_of(op, SMALL[op])
    bench = fused_bench.Bench(mesh_of(**{AXIS: 2}), kind, SMALL[op], 1)
    for name, way in kind.ways(SMALL[op], 2, harness.Method(plans=True)).items():
        if way.kind == "pk" and name not in ("default", "sequential"):
            traced = bench.chain(way, 1).trace(bench.xs, bench.ws)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
            assert [call["op"] for call in calls(text)] == [op], name


@pytest.mark.needs_gpus(2)
@pytest.mark.parametrize(
    ("op", "way"),
    [
        ("all_gather_matmul", "intra_sm"),
        ("all_gather_matmul", "inter_sm 128x256/8"),
        ("matmul_reduce_scatter", "intra_sm"),
    ],
)
def test_a_call_on_gpus(op, way, tmp_path, monkeypatch):
    """All tiles and all bytes are there, and nobody has a piece before it was sent."""
    if (reason := timeline.why_missing()) is not None:
        pytest.skip(reason)
    m, p, k = SMALL[op].shape
    found = program(monkeypatch)["recorded"](op, SMALL[op], way, None)
    assert found.about["kernels"] == op
    ranks, error_us = found.about["ranks"], found.about["clock_error_ns"] / 1e3
    assert found.about["events_dropped"] == found.about["blocks_dropped"] == 0
    assert 10 < found.about["us"] < 10_000
    moved = {"all_gather_matmul": 2 * m * k // ranks, "matmul_reduce_scatter": 2 * m * p // ranks}
    for rank in range(ranks):
        mine = found.laps[found.laps["rank"] == rank]
        assert mine["bytes"].sum() == moved[op] * (ranks - 1)
        assert set(mine["peer"][mine["bytes"] > 0]) == set(range(ranks)) - {rank}
    # A lap is noted a little after what it tells of: a peer may be faster to see that.
    moves, waits = found.laps[found.laps["bytes"] > 0], found.of("wait for flags")
    for rank in range(ranks):
        first = moves["end"][moves["rank"] != rank].min()
        assert waits["end"][waits["rank"] == rank].min() > first - 2 * error_us - 5
    timeline.save(found, tmp_path / "t.json")
    timeline_plot.draw(found, tmp_path / "t.png")

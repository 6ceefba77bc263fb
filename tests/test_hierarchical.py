"""Ops over axes that cross hosts: any split of the axes gives what jax.lax gives over all of them.

The split is forced here, on CPU devices; which split a job gets is asked of the selection with
hosts made up, and looked up in the lowered module. The last test runs in two real processes.
"""

import functools
import logging
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import pk_jax as pk
from pk_jax import _paths, _selection
from pk_jax._primitives import hierarchical
from pk_jax._tuning import hardware

WORKER = Path(__file__).with_name("hierarchical_process.py")

MESHES = {
    "outer-inner": ({"a": 2, "b": 4}, ("a", "b"), ("b",)),
    "inner-outer": ({"a": 2, "b": 4}, ("a", "b"), ("a",)),
    "turned": ({"a": 2, "b": 4}, ("b", "a"), ("b",)),
    "turned, other": ({"a": 2, "b": 4}, ("b", "a"), ("a",)),
    "three, last": ({"a": 2, "b": 2, "c": 2}, ("a", "b", "c"), ("c",)),
    "three, middle": ({"a": 2, "b": 2, "c": 2}, ("a", "b", "c"), ("b",)),
    "three, two apart": ({"a": 2, "b": 2, "c": 2}, ("a", "b", "c"), ("a", "c")),
    "three, mixed order": ({"a": 2, "b": 2, "c": 2}, ("c", "a", "b"), ("c", "b")),
    "two of three": ({"a": 2, "b": 3, "c": 1}, ("b", "c", "a"), ("b", "c")),
}
split = pytest.mark.parametrize("name", MESHES)
typed = pytest.mark.parametrize("check_vma", [True, False])

INSIDE = {
    "reduce_inside": pk.psum,
    "scatter_inside": pk.psum_scatter,
    "gather_inside": pk.all_gather,
}


def operand(ranks, *shape):
    """Whole numbers, so that sums are exact in any order."""
    count = ranks * int(np.prod(shape))
    numbers = np.random.default_rng(0).permutation(count).reshape(ranks, *shape) % 1009
    return numbers.astype(np.float32)


@split
@typed
@pytest.mark.parametrize("axis, tiled", [(0, True), (1, True), (0, False), (1, False), (2, False)])
def test_all_gather(name, check_vma, axis, tiled, mesh_of, per_rank):
    sizes, axes, inner = MESHES[name]
    mesh, how = mesh_of(**sizes), {"axis": axis, "tiled": tiled}
    x = operand(mesh.size, 3, 2)
    ours = functools.partial(
        hierarchical.all_gather, axis_name=axes, inner=inner, gather_inside=pk.all_gather, **how
    )
    theirs = functools.partial(lax.all_gather, axis_name=axes, **how)
    np.testing.assert_array_equal(
        per_rank(mesh, ours, x, check_vma=check_vma), per_rank(mesh, theirs, x)
    )


@split
@typed
@pytest.mark.parametrize("dimension, tiled", [(0, True), (1, True), (0, False), (1, False)])
def test_psum_scatter(name, check_vma, dimension, tiled, mesh_of, per_rank):
    sizes, axes, inner = MESHES[name]
    mesh, how = mesh_of(**sizes), {"scatter_dimension": dimension, "tiled": tiled}
    shape = [3, 5]
    shape[dimension] = mesh.size * (2 if tiled else 1)
    x = operand(mesh.size, *shape)
    ours = functools.partial(
        hierarchical.psum_scatter,
        axis_name=axes,
        inner=inner,
        scatter_inside=pk.psum_scatter,
        **how,
    )
    theirs = functools.partial(lax.psum_scatter, axis_name=axes, **how)
    np.testing.assert_array_equal(
        per_rank(mesh, ours, x, check_vma=check_vma), per_rank(mesh, theirs, x)
    )


@split
@typed
@pytest.mark.parametrize("op", ["psum", "pmax", "pmin"])
@pytest.mark.parametrize("large", [True, False])
def test_reductions(name, check_vma, op, large, mesh_of, monkeypatch):
    monkeypatch.setattr(hardware, "ACROSS_IN_PARTS_BYTES", 0 if large else 1 << 20)
    sizes, axes, inner = MESHES[name]
    mesh = mesh_of(**sizes)
    x = operand(mesh.size, 5, 3).reshape(-1, 3)  # which no size of a group divides

    def run(f):
        # The result is known to be equal on all ranks: out_specs name none of the axes.
        mapped = jax.shard_map(
            f, mesh=mesh, in_specs=P(mesh.axis_names), out_specs=P(), check_vma=check_vma
        )
        return jax.jit(mapped)(x)

    inside = INSIDE | {"reduce_inside": getattr(pk, op)}
    got = run(lambda x: hierarchical.reduce(op, x, axes, inner, **inside))
    np.testing.assert_array_equal(got, run(lambda x: getattr(lax, op)(x, axes)))


def test_large_sums_cross_in_parts(mesh_of):
    def across(count):
        def f(x):
            return hierarchical.reduce("psum", x, ("a", "b"), ("b",), **INSIDE)

        mapped = jax.shard_map(
            f, mesh=mesh_of(a=2, b=4), in_specs=P(("a", "b")), out_specs=P(), check_vma=False
        )
        text = str(jax.make_jaxpr(mapped)(jax.ShapeDtypeStruct((8 * count,), jnp.float32)))
        (line,) = [line for line in text.splitlines() if " psum[" in line]
        return line

    limit = hardware.ACROSS_IN_PARTS_BYTES // 4
    assert f"f32[{limit - 1}] = psum[" in across(limit - 1)
    assert f"f32[{limit // 4}] = psum[" in across(limit)
    assert f"f32[{limit // 4 + 1}] = psum[" in across(limit + 1)


# Which axes go inside.


def test_the_most_ranks_go_inside():
    sizes = {"pod": 2, "dp": 2, "one": 1, "tp": 4}
    runs = {("tp",), ("dp",), ("dp", "tp"), ("pod",)}
    asked = []

    def can(some):
        asked.append(some)
        return some in runs

    assert _selection.inner_axes(sizes, can) == ("dp", "tp")
    runs.remove(("dp", "tp"))
    assert _selection.inner_axes(sizes, can) == ("tp",)
    runs.remove(("tp",))
    assert _selection.inner_axes(sizes, can) == ("dp",)  # the later of two equal ones
    assert _selection.inner_axes(sizes, lambda _: False) == ()
    assert all("one" not in some and len(some) < 3 for some in asked)
    assert _selection.inner_axes({"tp": 8}, lambda _: True) == ()


@pytest.fixture
def hosts_of_four(monkeypatch):
    """The selection as on hosts of four devices each."""

    def decide(op, dtype, groups, devices, auto_axes):
        reason = _selection.why_not_dtype(dtype, op) or _selection.why_not_sizes(groups)
        for group in groups:
            if len({devices[i].id // 4 for i in group}) > 1:
                reason = "the axis crosses hosts: made up"
        return _selection.Decision("cuda" if reason is None else "reference", reason or "")

    monkeypatch.setattr(_selection, "decide", decide)
    monkeypatch.setattr(_selection, "_logged", set())


@pytest.fixture
def lowered_over(hosts_of_four, mesh_of, lowered):
    """The module of f over hosts a of two by GPUs b of four, as in a job of two hosts."""

    def lower(f, shape=(16, 4), check_vma=True):
        mapped = jax.shard_map(
            lambda x: f(x[0])[None],
            mesh=mesh_of(a=2, b=4),
            in_specs=P(("a", "b")),
            out_specs=P(("a", "b")),
            check_vma=check_vma,
        )
        return lowered(mapped, jax.ShapeDtypeStruct((8, *shape), jnp.float32))

    return lower


def gather(x, **kwargs):
    return pk.all_gather(x, ("a", "b"), tiled=True, **kwargs)


def total(x, **kwargs):
    return pk.psum(x, ("a", "b"), **kwargs)


COMPOSED = {
    # f, the custom calls, the operation across
    "all_gather": (gather, ["all_gather"], "all_gather"),
    "psum": (total, ["psum"], "all_reduce"),
    "large psum": (total, ["psum_scatter", "all_gather"], "all_reduce"),
    "pmean": (lambda x, **kw: pk.pmean(x, ("b", "a"), **kw), ["psum"], "all_reduce"),
    "pmax": (lambda x, **kw: pk.pmax(x, ("a", "b"), **kw), ["psum"], "all_reduce"),
    "large pmin": (
        lambda x, **kw: pk.pmin(x, ("a", "b"), **kw),
        ["psum", "all_gather"],
        "all_reduce",
    ),
    "psum_scatter": (
        lambda x, **kw: pk.psum_scatter(x, ("a", "b"), tiled=True, **kw),
        ["psum_scatter"],
        "reduce_scatter",
    ),
}


@typed
@pytest.mark.parametrize("implementation", [None, "cuda"])
@pytest.mark.parametrize("name", COMPOSED)
def test_custom_calls_stay_inside(name, implementation, check_vma, lowered_over, calls):
    f, ops, across = COMPOSED[name]
    shape = (1 << 19, 2) if "large" in name else (16, 4)
    text = lowered_over(lambda x: f(x, implementation=implementation), shape, check_vma)
    found = calls(text)
    assert [call["op"] for call in found] == ops
    for call in found:
        assert call["group_size"] == 4 and call["groups"] == list(range(8))
    assert text.count(f'"stablehlo.{across}"') == 1
    others = {"all_gather", "all_reduce", "reduce_scatter"} - {across}
    assert not any(f'"stablehlo.{op}"' in text for op in others)


def test_knobs_reach_the_calls_inside(lowered_over, calls):
    config = pk.Config(num_comm_sms=3)
    found = calls(lowered_over(lambda x: total(x, config=config), (1 << 19, 2)))
    assert [call["num_blocks"] for call in found] == [3, 3]


def test_what_is_not_composed(lowered_over, calls):
    def exchange(x, **kwargs):
        return pk.all_to_all(x, ("a", "b"), 0, 0, tiled=True, **kwargs)

    assert not calls(lowered_over(exchange))
    with pytest.raises(NotImplementedError, match="all_to_all: the axis crosses hosts"):
        lowered_over(lambda x: exchange(x, implementation="cuda"))
    # Nor what has one axis, or groups of its own.
    assert not calls(lowered_over(lambda x: pk.all_gather(x, "a")))
    groups = [[0, 4, 1, 5], [2, 6, 3, 7]]
    assert not calls(lowered_over(lambda x: gather(x, axis_index_groups=groups)))
    assert not calls(lowered_over(lambda x: gather(x, implementation="reference")))


def test_the_path_is_logged(lowered_over, caplog):
    with caplog.at_level(logging.INFO, "pk_jax"):
        lowered_over(lambda x: gather(gather(x)))
    (record,) = [r for r in caplog.records if r.name == "pk_jax"]
    assert record.message == (
        "all_gather takes the hierarchical path: CUDA over ('b',) and jax.lax over ('a',), since "
        "the axis crosses hosts: made up"
    )


def test_the_doctor_knows(monkeypatch):
    crosses = _selection.Decision("reference", "the axis crosses hosts: devices 1 and 2")
    monkeypatch.setattr(_selection, "decide", lambda *_: crosses)
    monkeypatch.setattr(_selection, "GPU_PLATFORMS", ("cpu",))
    for row in _paths.paths(jax.devices("cpu")):
        assert ("the op is hierarchical" in row.reason) == (row.op in _selection.HIERARCHICAL_OPS)


def test_gradients_are_composed_too(lowered_over, calls):
    text = lowered_over(lambda x: jax.grad(lambda x: jnp.sum(gather(x) ** 2))(x))
    assert [call["op"] for call in calls(text)] == ["all_gather", "psum_scatter"]


def test_two_processes():
    """Two processes with four devices each: what is inside a process, and what crosses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-W", "error", str(WORKER), port]
    processes = [
        subprocess.Popen(
            [*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (stdout, stderr) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, stderr
        # Among the words of XLA's own transport.
        checked = re.findall(r"^equal: (\w+)$", stdout, re.MULTILINE)
        assert checked == ["all_gather", "psum_scatter", "psum", "large", "pmax"]

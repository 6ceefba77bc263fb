"""all_gather: every candidate, the default choice and NCCL, from 1 KiB to 1 GiB a rank.

Every rank can compute every rank's shard (a hash of rank and position). So the check compares each
rank's result with what it must be, bit by bit, without a communication that could be wrong itself.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import library_counts
import numpy as np
import records
import timing
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pk_jax as pk
from pk_jax._tuning.cases import all_gather_cases

AXIS = "x"
TARGET = "pk_jax_all_gather"
MECHANISMS = ("register", "tma", "copy_engine")
SMALL_BYTES = 256 << 10
SMALL_CALLS = 60
L2_BYTES = 60 << 20
DTYPE = jnp.bfloat16


class Case(NamedTuple):
    """A shape a rank, bf16, gathered along `axis` with tiled=True."""

    id: str
    shape: tuple[int, ...]
    axis: int
    tags: frozenset[str]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * 2


def cases() -> list[Case]:
    """The sizes along the leading axis, then shapes whose gathered axis is another one."""
    return [
        Case(named.name, named.shape, named.axis, frozenset(named.tags))
        for tag in ("bench", "strided")
        for named in all_gather_cases(tag)
    ]


def shard_of(rank: Any, data_set: Any, shape: tuple[int, ...]) -> jax.Array:
    """The shard of `rank`: random sign and mantissa, magnitude in [0.5, 1).

    A hash of the position, in integers alone: the same bits in every program that computes it, and
    far quicker to compile than a generator of jax.random.
    """
    seed = _mixed(jnp.asarray(rank, jnp.uint32) * 64 + jnp.asarray(data_set, jnp.uint32) + 1)
    bits = _mixed(lax.iota(jnp.uint32, math.prod(shape)).reshape(shape) ^ seed)
    return lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16) & 0x807F | 0x3F00, DTYPE)


def _mixed(x: jax.Array) -> jax.Array:
    """Two rounds of multiply and shift: every bit of the result hangs on every bit of x."""
    for _ in range(2):
        x = (x ^ (x >> 16)) * np.uint32(0x9E3779B1)
        x = (x ^ (x >> 15)) * np.uint32(0x85EBCA77)
    return x ^ (x >> 16)


class Bench:
    """The mesh of one run with what all cases share."""

    def __init__(self, mesh: jax.sharding.Mesh):
        self.mesh = mesh
        self.ranks = mesh.size
        self.on_gpu = mesh.devices.flat[0].platform == "gpu"

    def sharded(self, fn: Callable[..., Any], num_args: int) -> Any:
        """`fn` on every rank's own part, as a jit."""
        # check_vma has no effect on what is compiled, and NCCL's result would be typed otherwise.
        return jax.jit(
            jax.shard_map(
                fn,
                mesh=self.mesh,
                in_specs=(P(AXIS),) * num_args,
                out_specs=P(AXIS),
                check_vma=False,
            )
        )

    def operands(self, case: Case, count: int) -> list[jax.Array]:
        """`count` data sets, made on the devices, every rank its own shard."""
        make = jax.jit(
            jax.shard_map(
                lambda data_set: shard_of(lax.axis_index(AXIS), data_set, case.shape),
                mesh=self.mesh,
                in_specs=P(),
                out_specs=P(AXIS),
                check_vma=False,
            ),
            out_shardings=NamedSharding(self.mesh, P(AXIS)),
        )
        return [make(np.int32(i)) for i in range(count)]

    def wrong_elements(
        self, case: Case, result: jax.Array, data_set: int, negated: bool = False
    ) -> int:
        """Elements, over all ranks, that are not what all_gather of `data_set` gives.

        With `negated`: that are not the negative of rank 0's shard, the end of a dependent chain.
        """
        return int(self._checker(case, negated)(result, np.int32(data_set)))

    @functools.cache  # noqa: B019  (one Bench a run)
    def _checker(self, case: Case, negated: bool) -> Any:
        def count(y: jax.Array, data_set: jax.Array) -> jax.Array:
            wrong = jnp.zeros((), jnp.float32)
            for rank in range(self.ranks):
                expected = shard_of(0 if negated else rank, data_set, case.shape)
                width = case.shape[case.axis]
                part = lax.slice_in_dim(y, rank * width, (rank + 1) * width, axis=case.axis)
                wrong += jnp.sum(
                    bits(part) != bits(-expected if negated else expected), dtype=jnp.float32
                )
            return lax.psum(wrong, AXIS)

        def bits(x: jax.Array) -> jax.Array:
            return lax.bitcast_convert_type(x, jnp.uint16)

        return jax.jit(
            jax.shard_map(
                count, mesh=self.mesh, in_specs=(P(AXIS), P()), out_specs=P(), check_vma=False
            )
        )


def pk_call(case: Case, mechanism: str | None) -> Callable[[Any], Any]:
    """pk.all_gather as the default chooses, or with a mechanism forced (then with no fallback)."""
    if mechanism is None:
        return lambda x: pk.all_gather(x, AXIS, axis=case.axis, tiled=True)
    config = pk.Config(mechanism=mechanism)
    return lambda x: pk.all_gather(
        x, AXIS, axis=case.axis, tiled=True, implementation="cuda", config=config
    )


def nccl_call(case: Case) -> Callable[[Any], Any]:
    """lax.all_gather; away from the leading axis with its result asked for in row-major order.

    XLA would otherwise leave it in the layout that NCCL wrote and never pay for the transpose that
    a consumer needs. pk's result is row-major always.
    """

    def call(x: jax.Array) -> jax.Array:
        y = lax.all_gather(x, AXIS, axis=case.axis, tiled=True)
        return y if case.axis == 0 else with_layout_constraint(y, Layout(tuple(range(y.ndim))))

    return call


def plan_of(stablehlo: str) -> dict[str, Any]:
    """What the first pk all_gather of a lowered program is going to do: its call's attributes."""
    found = re.search(rf"@{TARGET}\(.*", stablehlo)
    if found is None:
        return {"implementation": "reference"}
    plan: dict[str, Any] = {"implementation": "cuda"}
    for name in ("mechanism", "protocol"):
        value = re.search(rf'{name} = "(\w+)"', found.group(0))
        plan[name] = value.group(1) if value else None
    blocks = re.search(r"num_blocks = (\d+)", found.group(0))
    plan["num_blocks"] = int(blocks.group(1)) if blocks else None
    return plan


def chain_length(case: Case, ranks: int) -> int:
    """60 for small messages; for large ones as many as take at least 20 ms, and never under 8."""
    if case.nbytes <= SMALL_BYTES:
        return SMALL_CALLS
    return max(8, min(SMALL_CALLS, math.ceil(20e3 / expected_us(case, ranks))))


def expected_us(case: Case, ranks: int) -> float:
    """A rough time of a call, for the length of samples only: the same in every process."""
    return 4.0 + (ranks - 1) * case.nbytes / 300e3


def num_data_sets(case: Case) -> int:
    """So many operands that a large one comes from memory and not from the L2; else a few."""
    if case.nbytes <= SMALL_BYTES:
        return 4
    return max(2, min(16, math.ceil(2 * L2_BYTES / case.nbytes)))


class Built(NamedTuple):
    """A checked chain, what its calls do, and how often a rank launched for a call of it."""

    program: timing.Program
    plan: dict[str, Any]
    launches: int | None


class CheckError(RuntimeError):
    """A result was wrong: no time is printed for it."""


def build(
    bench: Bench, case: Case, name: str, call: Callable[[Any], Any], operands: list[jax.Array]
) -> Built:
    """Compiles the chain of `call`, proves what it holds, runs it and checks its results."""
    num_calls = chain_length(case, bench.ranks)
    keep_all = not bench.on_gpu
    fn = bench.sharded(
        lambda *xs: timing.chain(call, num_calls, xs, keep_all), len(operands)
    ).lower(*operands)
    plan = plan_of(fn.as_text())
    compiled = fn.compile()
    cuda = plan["implementation"] == "cuda"
    # Away from the leading axis NCCL needs transposes around it: its price, and no accident.
    exact = frozenset() if cuda or case.axis == 0 else None
    timing.check_calls(
        compiled.as_text(),
        TARGET if cuda else "all-gather",
        num_calls,
        exact if bench.on_gpu else None,
    )

    def check(result: Any, which: int, what: str) -> None:
        wrong = bench.wrong_elements(case, result, which % len(operands))
        if wrong:
            raise CheckError(f"{case.id} {name}: {wrong} wrong elements in {what}")

    launches = None
    for turn in range(3):  # uncaptured, captured, replayed
        before = library_counts.launches() if turn == 0 else None
        out = jax.block_until_ready(compiled(*operands))
        if turn == 0:  # later runs replay a graph, which passes no handler
            launches = library_counts.launches_a_call(before, library_counts.launches(), num_calls)
        check(
            out[-1] if keep_all else out, num_calls - 1, f"the last call of run {turn} of the chain"
        )
    if (
        case.nbytes <= SMALL_BYTES
    ):  # small ones have slots and epochs that only a middle call would get wrong
        every = bench.sharded(lambda *xs: timing.chain(call, num_calls, xs, True), len(operands))
        for i, y in enumerate(every(*operands)):
            check(y, i, f"call {i} of the chain")
    return Built(timing.Program(compiled, operands, num_calls), plan, launches)


def build_dependent(
    bench: Bench, case: Case, name: str, call: Callable[[Any], Any], operand: jax.Array
) -> timing.Program:
    """A chain with an elementwise kernel between calls: rank 0's part, negated, is sent next."""

    def step(y: jax.Array) -> jax.Array:
        return -lax.slice_in_dim(y, 0, case.shape[case.axis], axis=case.axis)

    # An even number of calls, so an odd number of negations.
    fn = bench.sharded(lambda x: timing.dependent_chain(call, SMALL_CALLS, x, step), 1)
    compiled = fn.lower(operand).compile()
    for _ in range(3):
        wrong = bench.wrong_elements(case, compiled(operand), 0, negated=True)
        if wrong:
            raise CheckError(
                f"{case.id} {name}: {wrong} wrong elements with an elementwise op between calls"
            )
    return timing.Program(compiled, [operand], SMALL_CALLS)


def run(
    mesh: jax.sharding.Mesh,
    selected: list[Case],
    sample_ms: float,
    samples: int,
    stamp: dict[str, Any],
) -> Iterator[tuple[records.Record, list[str]]]:
    """Checks, then times each case; yields its record and the failures, whose times stay out."""
    bench = Bench(mesh)
    for case in selected:
        yield run_case(bench, case, sample_ms, samples, stamp)


def run_case(
    bench: Bench, case: Case, sample_ms: float, samples: int, stamp: dict[str, Any]
) -> tuple[records.Record, list[str]]:
    operands = bench.operands(case, num_data_sets(case))
    programs: dict[str, timing.Program] = {}
    built: dict[str, Built] = {}
    skipped: dict[str, str] = {}
    failures: list[str] = []
    calls = {"nccl": nccl_call(case), "default": pk_call(case, None)}
    calls |= {mechanism: pk_call(case, mechanism) for mechanism in MECHANISMS}
    for name, call in calls.items():
        try:
            built[name] = build(bench, case, name, call, operands)
            programs[name] = built[name].program
        except (
            ValueError,
            NotImplementedError,
        ) as error:  # this variant does not exist for this case
            skipped[name] = str(error).splitlines()[0]
        except (CheckError, timing.ChainError) as error:
            skipped[name] = f"refused: {error}"
            failures.append(str(error))
    if case.nbytes <= SMALL_BYTES:
        for name in [n for n in ("nccl", "default") if n in programs]:
            try:
                dependent = build_dependent(bench, case, name, calls[name], operands[0])
                programs[f"{name}+elementwise"] = dependent
            except CheckError as error:
                failures.append(str(error))
    runs = timing.runs_per_sample(
        chain_length(case, bench.ranks), expected_us(case, bench.ranks), sample_ms
    )
    times = timing.time_programs(programs, runs, samples)
    method = {"runs": runs, "samples": samples}
    record = make_record(bench, case, times, built.get("default"), skipped, method, stamp)
    return record, failures


def make_record(
    bench: Bench,
    case: Case,
    times: dict[str, timing.Timing],
    built: Built | None,
    skipped: dict[str, str],
    method: dict[str, Any],
    stamp: dict[str, Any],
) -> records.Record:
    bound, link = records.gather_bound_us(case.nbytes, bench.ranks)
    default = times.get("default")
    nccl = times.get("nccl")
    record = records.Record(
        id=case.id,
        op="all_gather",
        ranks=bench.ranks,
        processes=jax.process_count(),
        dtype=np.dtype(DTYPE).name,
        shape=list(case.shape),
        config=built.plan if built else None,
        bound_us=bound,
        link_us=link,
        max_rel_err=0.0 if default else None,  # compared bit by bit
        launches=built.launches if built else None,
        baselines={k: times[k].median for k in ("nccl", "nccl+elementwise") if k in times},
        candidates={
            k: t.median for k, t in times.items() if k in MECHANISMS or k == "default+elementwise"
        },
        extra_bytes=library_counts.workspace_bytes(),
        skipped=skipped,
        method={
            "axis": case.axis,
            "bytes_per_rank": case.nbytes,
            "calls": chain_length(case, bench.ranks),
            "data_sets": num_data_sets(case),
            **method,
            "p10_p90": {k: [t.p10, t.p90] for k, t in times.items()},
        },
        **stamp,
    )
    if default:
        record.median_us, record.p10_us, record.p90_us = default.median, default.p10, default.p90
        record.ratio = default.median / bound
        record.gbps = (bench.ranks - 1) * case.nbytes / default.median / 1e3
    if default and nccl:
        record.speedup = nccl.median / default.median
    return record

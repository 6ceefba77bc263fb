"""Builds, checks and times the variants of one case: pk's default and forced ones, and lax's.

Nothing is timed before its results were compared, bit by bit, with what they must be, on every
rank; a wrong one gets no number.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pk_jax._bench import data, library_counts, records, timing, variants
from pk_jax._bench.ops import AXIS, OPS
from pk_jax._tuning.collective_cases import CollectiveCase as Case


class Method(NamedTuple):
    """How long to time, and what.

    Attributes:
        sample_ms: about how long a sample runs.
        samples: samples of a variant.
        forced: time each mechanism forced, too, and chains with an elementwise kernel between.
        budget_s: about how long the samples of a variant may take; a slow one gets fewer.
        plans: of products with a collective, time each tile and number of SMs forced, too.
        without: names of ways to make a product that are left out.
    """

    sample_ms: float = 20.0
    samples: int = 50
    forced: bool = True
    budget_s: float = 3.0
    plans: bool = False
    without: tuple[str, ...] = ()


class CheckError(RuntimeError):
    """A result was wrong: no time is printed for it."""


class Built(NamedTuple):
    """A checked chain and what its calls do.

    Attributes:
        program: the chain.
        plan: what was chosen for a call.
        launches: how often a rank launched for a call of it.
        others: instructions of the chain beside its calls that run, by opcode.
    """

    program: timing.Program
    plan: dict[str, Any]
    launches: int | None
    others: dict[str, int]


class Bench:
    """The mesh of one run with what all cases share."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.ranks = mesh.size
        self.on_gpu = mesh.devices.flat[0].platform == "gpu"

    def mapped(self, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        """`fn` on every rank's own part."""
        # check_vma has no effect on what is compiled, and NCCL's result would be typed otherwise.
        return jax.shard_map(
            fn, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def sharded(self, fn: Callable[..., Any], num_args: int, **options: Any) -> Any:
        """`fn` on every rank's own part of `num_args` arguments, as a jit."""
        return jax.jit(self.mapped(fn, (P(AXIS),) * num_args, P(AXIS)), **options)

    def operands(self, case: Case, count: int) -> list[jax.Array]:
        """`count` data sets, made on the devices, every rank its own part."""
        summed = OPS[case.op].summed

        def make(data_set: jax.Array) -> jax.Array:
            position = data.flat(data.coordinates(case.shape), case.shape)
            return data.value(lax.axis_index(AXIS), data_set, position, summed)

        made = jax.jit(
            self.mapped(make, P(), P(AXIS)), out_shardings=NamedSharding(self.mesh, P(AXIS))
        )
        return [made(np.int32(i)) for i in range(count)]

    def arguments(self, case: Case) -> list[jax.Array]:
        """What the call takes beside operand and carried result, every rank its own row."""
        sharding = NamedSharding(self.mesh, P(AXIS))
        found = OPS[case.op].arguments(case, self.ranks)
        return [
            jax.make_array_from_callback((a.size,), sharding, a.reshape(-1).__getitem__)
            for a in found
        ]

    def zeros(self, case: Case) -> jax.Array:
        """A result to be written into."""
        shape = OPS[case.op].result_shape(case, self.ranks)
        made = jax.jit(
            self.mapped(lambda: jnp.zeros(shape, data.DTYPE), (), P(AXIS)),
            out_shardings=NamedSharding(self.mesh, P(AXIS)),
        )
        return made()

    def wrong_elements(
        self, case: Case, result: jax.Array, data_set: int, dependent_calls: int = 0
    ) -> int:
        """Elements, over all ranks, that are not what the op gives of `data_set`.

        With `dependent_calls`: that are not the end of a dependent chain of so many calls.
        """
        return int(self._checker(case, dependent_calls)(result, np.int32(data_set)))

    @functools.cache  # noqa: B019  (one Bench a run)
    def _checker(self, case: Case, dependent_calls: int) -> Any:
        op = OPS[case.op]

        def count(y: jax.Array, data_set: jax.Array) -> jax.Array:
            me, c = lax.axis_index(AXIS), data.coordinates(y.shape)
            expected = op.expected(case, self.ranks, me, c, data_set)
            if dependent_calls and not op.summed:
                source = op.after(case, self.ranks, me, c, dependent_calls)
                expected = data.value(*source[:1], data_set, source[1], op.summed)
            if dependent_calls and dependent_calls % 2 == 0:
                expected = -expected
            # Sums may end as either zero.
            wrong = y != expected if op.summed else bits(y) != bits(expected)
            return lax.psum(jnp.sum(wrong, dtype=jnp.float32), AXIS)

        def bits(x: jax.Array) -> jax.Array:
            return lax.bitcast_convert_type(x, jnp.uint16)

        return jax.jit(self.mapped(count, (P(AXIS), P()), P()))


def build(bench: Bench, name: str, variant: variants.Variant, operands: list[jax.Array]) -> Built:
    """Compiles the chain of a variant, proves what it holds, runs it and checks its results."""
    call, case = variant.call, variant.case
    op = OPS[case.op]
    slow = op.carried and variant.vendor
    num_calls = variants.chain_length(case, bench.ranks, slow)
    count = len(operands)
    arguments = [*operands, *bench.arguments(case)]
    start = [bench.zeros(case)] if op.carried else []

    def chain(keep_all: bool) -> Any:
        def run(*args: Any) -> Any:
            if not op.carried:
                return timing.chain(call, num_calls, args, keep_all)
            rest = args[count:-1]
            results: list[Any] = []

            def step(x: Any, y: Any) -> Any:
                results.append(call(x, *rest, y))
                return results[-1]

            last = timing.carried_chain(step, num_calls, args[:count], args[-1])
            return tuple(results) if keep_all else last

        donated = (len(arguments),) if op.carried and not keep_all else ()
        return bench.sharded(run, len(arguments) + len(start), donate_argnums=donated)

    keep_all = not bench.on_gpu and not op.carried
    lowered = chain(keep_all).lower(*arguments, *start)
    plan = variants.plan_of(lowered.as_text(), op.target)
    compiled = lowered.compile()
    others = _prove(compiled.as_text(), op.name, num_calls, plan, variant, bench.on_gpu)
    run = timing.Carried(compiled, *start) if op.carried else compiled

    def check(result: Any, which: int, what: str) -> None:
        wrong = bench.wrong_elements(case, result, which % count)
        if wrong:
            raise CheckError(f"{case.name} {name}: {wrong} wrong elements in {what}")

    launches = None
    for turn in range(3):  # uncaptured, captured, replayed
        before = library_counts.launches() if turn == 0 else None
        out = jax.block_until_ready(run(*arguments))
        if turn == 0:  # later runs replay a graph, which passes no handler
            launches = library_counts.launches_a_call(before, library_counts.launches(), num_calls)
        check(
            out[-1] if keep_all else out, num_calls - 1, f"the last call of run {turn} of the chain"
        )
    if case.nbytes <= variants.SMALL_BYTES and not slow:
        # Small ones have slots and epochs that only a middle call would get wrong.
        start = [bench.zeros(case)] if op.carried else []
        for i, y in enumerate(chain(True)(*arguments, *start)):
            check(y, i, f"call {i} of the chain")
    program = timing.Program(
        run, arguments, num_calls, variants.expected_us(case, bench.ranks, slow)
    )
    return Built(program, plan, launches, others)


def _prove(
    text: str,
    op_name: str,
    num_calls: int,
    plan: dict[str, Any],
    variant: variants.Variant,
    on_gpu: bool,
) -> dict[str, int]:
    """Raises ChainError unless the program is the chain; returns what a baseline runs beside it."""
    op = OPS[op_name]
    if plan["implementation"] == "cuda":
        # A result that takes an operand's place may need a copy before the first call.
        allowed = frozenset({"copy"}) if op.carried else frozenset()
        timing.check_calls(text, op.target, num_calls, allowed if on_gpu else None)
        return timing.other_kernels(text, op.target) if on_gpu else {}
    if op.carried and not on_gpu:
        return {}  # composed of other instructions there
    if op.name == "all_gather" and not variant.case.strided:
        timing.check_calls(text, op.hlo, num_calls, frozenset() if on_gpu else None)
    elif (count := timing.count_instructions(text)[op.hlo]) == 0 or count % num_calls:
        raise timing.ChainError(f"the compiled chain holds {count} {op.hlo} for {num_calls} calls")
    # A baseline needs what it needs, transposes say: its price, and noted.
    return timing.other_kernels(text, op.hlo)


def build_dependent(
    bench: Bench, name: str, variant: variants.Variant, operand: jax.Array
) -> timing.Program:
    """A chain with an elementwise kernel between calls; checked."""
    call, case = variant.call, variant.case
    step = functools.partial(OPS[case.op].step, case)
    fn = bench.sharded(lambda x: timing.dependent_chain(call, variants.SMALL_CALLS, x, step), 1)
    compiled = fn.lower(operand).compile()
    for _ in range(3):
        wrong = bench.wrong_elements(case, compiled(operand), 0, variants.SMALL_CALLS)
        if wrong:
            raise CheckError(
                f"{case.name} {name}: {wrong} wrong elements with an elementwise op between calls"
            )
    return timing.Program(
        compiled, [operand], variants.SMALL_CALLS, variants.expected_us(case, bench.ranks)
    )


def run(
    mesh: Mesh, selected: Iterable[Case], method: Method, stamp: dict[str, Any]
) -> Iterator[tuple[records.Record, list[str]]]:
    """Checks, then times each case; yields its record and the failures, whose times stay out."""
    bench = Bench(mesh)
    for case in selected:
        yield run_case(bench, OPS[case.op].fit(case, bench.ranks), method, stamp)


def run_case(
    bench: Bench, case: Case, method: Method, stamp: dict[str, Any]
) -> tuple[records.Record, list[str]]:
    """One case: its record, and what was wrong."""
    operands = bench.operands(case, variants.num_data_sets(case))
    built: dict[str, Built] = {}
    programs: dict[str, timing.Program] = {}
    skipped: dict[str, str] = {}
    failures: list[str] = []
    found = variants.of_case(case, bench.ranks, method.forced)
    for name, variant in found.items():
        try:
            built[name] = build(bench, name, variant, operands)
            programs[name] = built[name].program
        except (CheckError, timing.ChainError) as error:
            skipped[name] = f"refused: {error}"
            failures.append(str(error))
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            if isinstance(error, jax.errors.JaxRuntimeError) and "UNIMPLEMENTED" not in str(error):
                raise
            # No such forced variant of this case, or XLA has no such op here; pk has them all.
            skipped[name] = (str(error).splitlines() or [type(error).__name__])[0]
            if name == "default":
                failures.append(f"{case.name} {name}: {skipped[name]}")
    if method.forced and case.nbytes <= variants.SMALL_BYTES and OPS[case.op].dependent(case):
        for name in [n for n in ("nccl", "default") if n in programs]:
            try:
                dependent = build_dependent(bench, name, found[name], operands[0])
                programs[name + variants.DEPENDENT] = dependent
            except CheckError as error:
                failures.append(str(error))
    times = timing.time_programs(programs, method.sample_ms, method.samples, method.budget_s)
    return make_record(bench, case, times, built, skipped, stamp), failures


def make_record(
    bench: Bench,
    case: Case,
    times: dict[str, timing.Timing],
    built: dict[str, Built],
    skipped: dict[str, str],
    stamp: dict[str, Any],
) -> records.Record:
    """The record of a case, from what was measured."""
    link_bytes = OPS[case.op].link_bytes(case, bench.ranks)
    bound, link = records.bound_us(link_bytes, case.nbytes)
    default = times.get("default")
    vendors = {k: t.median for k, t in times.items() if k.startswith("nccl")}
    chosen = built.get("default")
    record = records.Record(
        id=case.name,
        op=case.op,
        ranks=bench.ranks,
        processes=jax.process_count(),
        dtype=case.dtype,
        shape=list(case.shape),
        config=chosen.plan if chosen else None,
        bound_us=bound,
        link_us=link,
        max_rel_err=0.0 if default else None,  # compared bit by bit
        launches=chosen.launches if chosen else None,
        baselines=vendors,
        candidates={k: t.median for k, t in times.items() if k != "default" and k not in vendors},
        extra_bytes=library_counts.workspace_bytes(),
        skipped=skipped,
        method={
            "axis": case.axis,
            **({"concat_axis": case.concat_axis} if case.op == "all_to_all" else {}),
            "bytes_per_rank": case.nbytes,
            "link_bytes": link_bytes,
            "calls": {k: b.program.num_calls for k, b in built.items()},
            "data_sets": variants.num_data_sets(case),
            "samples": {k: t.samples for k, t in times.items()},
            "p10_p90": {k: [t.p10, t.p90] for k, t in times.items()},
            "beside": {k: b.others for k, b in built.items() if b.others},
        },
        **stamp,
    )
    if default:
        record.median_us, record.p10_us, record.p90_us = default.median, default.p10, default.p90
        record.ratio = default.median / bound
        record.gbps = link_bytes / default.median / 1e3
        same = [us for k, us in vendors.items() if not k.endswith(variants.DEPENDENT)]
        record.speedup = min(same) / default.median if same else None
    return record

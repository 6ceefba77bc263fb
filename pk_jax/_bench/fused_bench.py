"""Products with a collective: every way to do a case's work is checked, then timed, in one run.

A result is compared with fp32 on every rank, each operand last in turn, before anything is timed; a
wrong one gets no time. A chain takes several x in turn, and several weights where these are larger,
so that the larger operand comes from memory as in a network.
"""

import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pk_jax._bench import harness, library_counts, records, timing
from pk_jax._bench.fused import DTYPE, Op, Way
from pk_jax._bench.ops import AXIS

# A chain: long enough that its start does not count, short enough to compile in a second.
CHAIN_US = 10e3
FEWEST_CALLS, MOST_CALLS = 8, 60  # the former on CPUs
EXPECTED_FLOPS = 650e12
# So many bytes of a rank's x, or of its weights if these are more, that none stays in the L2.
OPERAND_BYTES = 120 << 20
# Of products that nobody times.
UNTUNED = {"xla_gpu_autotune_level": 0}
# What weights are drawn from, the numbers after this; x is drawn from those after 0.
WEIGHTS_SEED = 1000

# What a record says of a call's plan, by the attributes of its custom call.
_PLAN = {"tile": "tile", "num_comm_sms": "num_comm_blocks", "num_blocks": "num_blocks"}
_SUM_PLAN = {"lead": "lead", "num_blocks": "num_blocks"}
_FEW_ROWS_PLAN = {"protocol": "protocol", "split": "split", "num_blocks": "num_blocks"}
PLANS = {
    "all_gather_matmul": _PLAN,
    "matmul_reduce_scatter": _SUM_PLAN,
    "matmul_all_reduce": _SUM_PLAN,
    "matmul_reduce_scatter_few_rows": _FEW_ROWS_PLAN,
    "matmul_all_reduce_few_rows": _FEW_ROWS_PLAN,
}


class Beside(NamedTuple):
    """What was measured in a process of its own: baselines, reasons for lack of one, how.

    Attributes:
        baselines: microseconds by name.
        skipped: reasons by name.
        method: what the record's method says of it.
        xla: what XLA's program took there. A GPU that has been idle is faster for seconds, so the
            record has baselines in proportion: times what XLA takes here, over this.
    """

    baselines: dict[str, float] = {}  # noqa: RUF012  (none of them is ever changed)
    skipped: dict[str, str] = {}  # noqa: RUF012
    method: dict[str, Any] = {}  # noqa: RUF012
    xla: float | None = None

    def here(self, xla: float | None) -> dict[str, float]:
        """The baselines beside an XLA that takes so long."""
        scale = xla / self.xla if xla and self.xla else 1.0
        return {name: us * scale for name, us in self.baselines.items()}


class Built(NamedTuple):
    """A checked chain.

    Attributes:
        program: the chain.
        error: the relative norm of its largest error.
        config: what its pk calls do.
        temp_bytes: memory of the compiled chain beside operands and results.
        others: instructions that run beside pk's calls, by opcode.
    """

    program: timing.Program
    error: float
    config: dict[str, Any]
    temp_bytes: int | None
    others: dict[str, int]


def run_case(
    mesh: Mesh,
    op: Op,
    case: Any,
    method: harness.Method,
    stamp: dict[str, Any],
    beside: Beside = Beside(),  # noqa: B008
) -> tuple[records.Record, list[str]]:
    """Checks and times one case: every way, on operands drawn once."""
    bench = Bench(mesh, op, case)
    built: dict[str, Built] = {}
    failures, skipped = [], dict(beside.skipped)
    ways = op.ways(case, bench.ranks, method)
    ways = {name: way for name, way in ways.items() if name not in method.without}
    for name, way in ways.items():
        try:
            built[name] = bench.build(way)
        except (harness.CheckError, timing.ChainError) as error:
            skipped[name] = f"refused: {error}"
            failures.append(f"{case.name} {name}: {error}")
        except (ValueError, NotImplementedError) as error:
            skipped[name] = (str(error).splitlines() or [type(error).__name__])[0]
            if name in ("default", "xla"):
                failures.append(f"{case.name} {name}: {skipped[name]}")
        except jax.errors.JaxRuntimeError as error:
            # An option that this XLA does not have, say; of pk's nothing may end so.
            skipped[name] = (str(error).splitlines() or ["an error of the runtime"])[0]
            if way.kind == "pk" or name == "xla":
                failures.append(f"{case.name} {name}: {skipped[name]}")
    programs = {name: each.program for name, each in built.items()}
    times = timing.time_programs(programs, method.sample_ms, method.samples, method.budget_s)
    kinds = {name: way.kind for name, way in ways.items()}
    found = make_record(bench, built, times, kinds, beside, method)
    return records.Record(**found, skipped=skipped, **stamp), failures


class Bench:
    """A case on a mesh of one axis, with its operands, and chains of `num_calls` if that is set."""

    def __init__(self, mesh: Mesh, op: Op, case: Any, num_calls: int | None = None):
        # Auto axes, whatever the caller's are: whole arrays are XLA's to cut.
        self.mesh = Mesh(mesh.devices, mesh.axis_names)
        self.op, self.case, self.ranks = op, case, mesh.size
        self.expected_us = 4.0 + op.flops(case) / EXPECTED_FLOPS * 1e6
        # XLA's CPU compiler drops calls that nobody reads: see timing.py.
        self.keep_all = mesh.devices.flat[0].platform == "cpu"
        wanted = 0 if self.keep_all else math.ceil(CHAIN_US / self.expected_us)
        self.num_calls = num_calls or max(FEWEST_CALLS, min(MOST_CALLS, wanted))
        x_shape, w_shapes = op.draw(case, self.ranks)
        specs, tree = jax.tree.flatten(op.w_specs, is_leaf=_is_spec)
        shapes = tree.flatten_up_to(w_shapes)
        x_size, w_size = math.prod(x_shape), sum(map(math.prod, shapes))
        count = math.ceil(OPERAND_BYTES * self.ranks / (2 * max(x_size, w_size)))
        count = 2 if self.keep_all else max(2, min(8, count))
        self._errors = functools.cache(self._make_errors)
        draw = functools.cache(self._draw)
        self.xs = [draw(x_shape, op.x_spec)(seed) for seed in range(count)]
        seeds = itertools.count(WEIGHTS_SEED)
        # One for all calls, or as many as there are of x.
        self.ws = [
            tree.unflatten(
                draw(shape, spec)(next(seeds)) / math.sqrt(shape[0])
                for shape, spec in zip(shapes, specs, strict=True)
            )
            for _ in range(count if w_size > x_size else 1)
        ]

    def _draw(self, shape: tuple[int, ...], spec: P) -> Callable[[int], jax.Array]:
        lies = NamedSharding(self.mesh, spec)
        normal = jax.jit(
            lambda seed: jax.random.normal(jax.random.key(seed), shape, DTYPE), out_shardings=lies
        )
        return lambda seed: normal(np.int32(seed))

    def mapped(self, f: Any, in_specs: Any, out_specs: Any = P(AXIS)) -> Any:  # noqa: B008
        """`f` on every rank's parts."""
        return jax.shard_map(
            f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    @functools.cached_property
    def rows(self) -> list[jax.Array]:
        """What the arithmetic alone takes for each x, the ranks' one under the other."""
        local = jax.jit(self.mapped(lambda x: self.op.local(x)[None], self.op.x_spec))
        return [local(x) for x in self.xs]

    def chain(self, way: Way, num_calls: int) -> Any:
        """A program of so many calls, (xs, ws) -> the last result of each rank, stacked.

        With `keep_all` the results of all calls.
        """
        lies = NamedSharding(self.mesh, self.op.out_spec)

        def calls(xs: Any, ws: Any) -> Any:
            w_of_call = itertools.cycle(ws)  # calls are traced in their order

            def call(x: Any) -> Any:
                y = way.call(x, next(w_of_call))
                return lax.with_sharding_constraint(y, lies) if way.whole else y

            return timing.chain(call, num_calls, xs, self.keep_all)

        if way.whole:
            stack = self.mapped(_stacked, self.op.out_spec)
            return jax.jit(lambda xs, ws: stack(calls(xs, ws)))
        w_specs = [self.op.w_specs] * len(self.ws)
        if way.kind == "alone":
            parts = lambda xs, ws: _stacked(calls([x[0] for x in xs], ws))  # noqa: E731
            return jax.jit(self.mapped(parts, (P(AXIS), w_specs)))
        parts = lambda xs, ws: _stacked(calls(xs, ws))  # noqa: E731
        return jax.jit(self.mapped(parts, (self.op.x_spec, w_specs)))

    def build(self, way: Way) -> Built:
        """Compiles the chain of a way, and checks its results.

        Raises:
            harness.CheckError: a result is wrong.
            timing.ChainError: the program is not what it should be.
        """
        xs = self.rows if way.kind == "alone" else self.xs
        lowered = self.chain(way, self.num_calls).lower(xs, self.ws)
        if way.refuses is not None and way.refuses in lowered.as_text():
            raise NotImplementedError(f"the program has {way.refuses}")
        compiled = lowered.compile(compiler_options=dict(way.options) or None)
        counts = timing.count_instructions(compiled.as_text())
        if way.needs is not None and not counts[way.needs]:
            raise NotImplementedError(f"XLA made a program without {way.needs}")
        error = self.largest_error(compiled, way.kind == "alone")
        if not error <= self.op.limit:
            raise harness.CheckError(f"relative error {error:.2e}")
        calls = {name: n for name, n in counts.items() if name.startswith("pk_jax_")}
        if any(n % self.num_calls for n in calls.values()):
            raise timing.ChainError(f"{calls} in a chain of {self.num_calls} calls")
        others = {k: n for k, n in counts.items() if k not in timing.FREE and k not in calls}
        program = timing.Program(compiled, (xs, self.ws), self.num_calls, self.expected_us)
        memory = compiled.memory_analysis()
        return Built(
            program,
            error,
            config_of(lowered.as_text(), {k: n // self.num_calls for k, n in calls.items()}),
            memory.temp_size_in_bytes if memory is not None else None,
            others if calls else {},
        )

    def largest_error(self, compiled: Any, alone: bool) -> float:
        """The largest relative norm of an error on any rank, each operand last in turn."""
        xs, found = self.rows if alone else self.xs, []
        for i in range(len(xs)):
            last = (i + self.num_calls - 1) % len(xs)
            first_w = i % len(self.ws)
            got = compiled(xs[i:] + xs[:i], self.ws[first_w:] + self.ws[:first_w])
            got = got[-1] if self.keep_all else got
            errors = self._errors(alone)(got, self.xs[last], self.ws[last % len(self.ws)])
            found.append(float(np.max(errors)))  # NumPy's keeps a NaN of any rank
        return max(found, key=lambda error: math.inf if math.isnan(error) else error)

    def _make_errors(self, alone: bool) -> Any:
        def errors(got: Any, x: Any, w: Any) -> Any:
            x, w = jax.tree.map(lambda a: a.astype(jnp.float32), (x, w))
            with jax.default_matmul_precision("highest"):
                want = self.op.want_alone(self.op.local(x), w) if alone else self.op.want(x, w)
            each = jax.tree.map(lambda g, y: _norm(g[0].astype(y.dtype) - y) / _norm(y), got, want)
            return lax.all_gather(jnp.stack(jax.tree.leaves(each)), AXIS)

        mapped = self.mapped(errors, (P(AXIS), self.op.x_spec, self.op.w_specs), P())
        return jax.jit(mapped, compiler_options=UNTUNED)


def _norm(x: Any) -> Any:
    return jnp.linalg.norm(x.reshape(-1))


def _stacked(result: Any) -> Any:
    return jax.tree.map(lambda y: y[None], result)


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


def config_of(stablehlo: str, calls: Mapping[str, int]) -> dict[str, Any]:
    """What the pk calls of a lowered program do: how many of each kernel, and the first's plan."""
    if not calls:
        return {"kernels": "jax.lax"}
    names = {name.removeprefix("pk_jax_"): n for name, n in sorted(calls.items())}
    found: dict[str, Any] = {
        "kernels": ", ".join(name if n == 1 else f"{n} {name}" for name, n in names.items())
    }
    (name, *more) = names
    if name in PLANS and not more:
        (call,) = re.findall(rf"@pk_jax_{name}\(.*", stablehlo)[:1]
        for key, attribute in PLANS[name].items():
            if value := re.search(rf'\b{attribute} = "?(\w+)', call):
                found[key] = int(value[1]) if value[1].isdigit() else value[1]
    return found


def make_record(
    bench: Bench,
    built: dict[str, Built],
    times: dict[str, timing.Timing],
    kinds: dict[str, str],
    beside: Beside,
    method: harness.Method,
) -> dict[str, Any]:
    """The fields of a case's record; its bound is the arithmetic alone or the link's part."""
    op, case, ours, mine = bench.op, bench.case, times.get("default"), built.get("default")
    us = {name: each.median for name, each in times.items()}
    by_kind = {
        kind: {name: us[name] for name in us if kinds[name] == kind}
        for kind in ("pk", "baseline", "alone")
    }
    baselines = by_kind["baseline"] | beside.here(us.get("xla"))
    link = op.link_bytes(case, bench.ranks) / records.LINK_BYTES_PER_US
    compute = min(by_kind["alone"].values(), default=None)
    bound = max(compute or 0.0, link)
    x_shape, w_shapes = op.draw(case, bench.ranks)
    temps = {name: each.temp_bytes for name, each in built.items() if each.temp_bytes is not None}
    extra = temps["default"] - temps["xla"] if {"default", "xla"} <= set(temps) else None
    config = mine.config if mine else None
    return {
        "id": case.name,
        "op": op.name,
        "ranks": bench.ranks,
        "processes": jax.process_count(),
        "dtype": jnp.dtype(DTYPE).name,
        "shape": list(case.shape),
        "config": config,
        "median_us": ours.median if ours else None,
        "p10_us": ours.p10 if ours else None,
        "p90_us": ours.p90 if ours else None,
        "bound_us": bound,
        "compute_us": compute,
        "link_us": link,
        "ratio": ours.median / bound if ours else None,
        "tflops": op.flops(case) / ours.median / 1e6 if ours else None,
        "baselines": baselines | by_kind["alone"],
        # Over the fastest of what users have.
        "speedup": min(baselines.values()) / ours.median if ours and baselines else None,
        "candidates": {name: t for name, t in by_kind["pk"].items() if name != "default"},
        "max_rel_err": mine.error if mine else None,
        "sms": (config or {}).get("num_blocks"),
        "extra_bytes": extra,
        "method": {
            "calls": bench.num_calls,
            "sample_ms": method.sample_ms,
            "samples": {name: each.samples for name, each in times.items()},
            "p10_p90": {name: [each.p10, each.p90] for name, each in times.items()},
            "whole_shapes": [list(x_shape), jax.tree.map(list, w_shapes, is_leaf=_is_shape)],
            "temp_bytes": temps,
            "workspace_bytes": library_counts.workspace_bytes(),
            "kernels": {
                name: each.config["kernels"] for name, each in built.items() if kinds[name] == "pk"
            },
            "beside": {name: each.others for name, each in built.items() if each.others},
        }
        | beside.method,
    }


def _is_shape(x: Any) -> bool:
    return isinstance(x, tuple) and all(isinstance(size, int) for size in x)

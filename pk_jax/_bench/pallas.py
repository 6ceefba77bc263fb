"""JAX's own fused all_gather and product, of Pallas, as a baseline: in a process of its own.

`jax.experimental.pallas.ops.gpu.collective_matmul_mgpu` gathers the first operand over all devices
of the process, in tiles that have to divide the sizes, and keeps the gathered rows. In one process
it needs neither flags nor NVSHMEM: XLA gives the kernel its peers' addresses. Its copies go to one
peer each; what would use NVLink multicast asks XLA for symmetric memory, and is refused here. (Its
neighbours all_gather_mgpu and reduce_scatter_mgpu do, and are no baseline.)

A kernel that waits for its peer for ever cannot be ended from within its process. So a child
measures all cases first, beside XLA's program as the link to the parent's numbers, with a time
limit for each config; where it ends, the configs that are left are not tried.

    python -m pk_jax._bench.pallas '{"samples": 20, "sample_ms": 5.0, "cases": [...]}'
"""

import faulthandler
import functools
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from pk_jax._tuning.fused_cases import GatherCase

NAME, XLA = "pallas", "xla"
LIMIT_S = 40.0  # of a config, its compilation and its check included
TOTAL_S = 240.0  # of all cases
HEAP = "0.15"  # of the card, beside the parent's
# What makes Mosaic ask for memory that XLA may bind to a multicast object.
SYMMETRIC = "symmetric_memory_parameters"
NVSHMEM = "--xla_gpu_experimental_enable_nvshmem"

# (tile_m, tile_n, which dimension of the tiles is the inner one, tiles in a band of them, along
# which dimension the two warpgroups split a tile of twice the size). All with tile_k 64 and four
# stages, as in JAX's own tuning.
CONFIGS = (
    (128, 128, "M", 8, "N"),
    (128, 128, "N", 8, "N"),
    (128, 128, "M", 8, "M"),
    (128, 128, "N", 8, "M"),
)


def label(config: tuple[Any, ...]) -> str:
    """A config's name."""
    return "x".join(map(str, config[:2])) + "/" + "/".join(map(str, config[2:]))


# ---- The parent --------------------------------------------------------------------------------


def measure(
    cases: Sequence[GatherCase], samples: int, sample_ms: float, timeout_s: float = TOTAL_S
) -> dict[str, dict[str, Any]]:
    """What a child finds out of each case: {"us": by config, "errors": by config}."""
    asked = {
        "samples": samples,
        "sample_ms": sample_ms,
        "cases": [[case.name, *case.shape] for case in cases],
    }
    variables = {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": HEAP, "NCCL_NVLS_ENABLE": "0"}
    flags = variables.get("XLA_FLAGS", "").split()
    variables["XLA_FLAGS"] = " ".join(flag for flag in flags if not flag.startswith(NVSHMEM))
    # This very package, from wherever this process has it.
    places = [str(pathlib.Path(__file__).parents[2]), variables.get("PYTHONPATH", "")]
    variables["PYTHONPATH"] = os.pathsep.join(place for place in places if place)
    command = [sys.executable, "-P", "-m", "pk_jax._bench.pallas", json.dumps(asked)]
    try:
        done = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=timeout_s
        )
        text, reason = done.stdout, None
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:]
            reason = f"its process ended with code {done.returncode}: {' '.join(last)}"
            if "Timeout (" in done.stderr:  # faulthandler's word
                reason = f"it took more than {LIMIT_S:.0f} s"
    except subprocess.TimeoutExpired as error:
        text = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        reason = f"its process did not end within {timeout_s:.0f} s"
    return parse(text, [case.name for case in cases], reason)


def parse(text: str, names: Sequence[str], reason: str | None) -> dict[str, dict[str, Any]]:
    """The child's lines by case; `reason` is why there are not more of them."""
    found: dict[str, dict[str, Any]] = {name: {"us": {}, "errors": {}} for name in names}
    started = None
    for line in text.splitlines(keepends=True):
        if not (line.startswith("{") and line.endswith("}\n")):
            continue
        row = json.loads(line)
        mine, config = found[row["case"]], row["config"]
        started = (row["case"], config)
        if "us" in row:
            mine["us"][config] = row["us"]
        elif "error" in row:
            mine["errors"][config] = row["error"]
        else:
            continue
        started = None
    if reason is not None:
        for name, mine in found.items():
            if started is not None and name == started[0]:
                mine["errors"][started[1]] = reason
            elif not mine["us"] and not mine["errors"]:
                mine["errors"]["all"] = f"not tried: {reason}"
    return found


def best(found: dict[str, Any]) -> tuple[str, float] | None:
    """The fastest config and its microseconds."""
    times = {config: us[0] for config, us in found["us"].items() if config != XLA}
    return min(times.items(), key=lambda item: item[1], default=None)


# ---- The child ---------------------------------------------------------------------------------


def way(config: tuple[Any, ...]) -> Any:
    """The kernel by a config, as a way of `fused.py`."""
    import jax
    from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu as pallas

    from pk_jax._bench import fused
    from pk_jax._bench.ops import AXIS

    tile_m, tile_n, inner, band, split = config
    tuning = pallas.TuningConfig(
        tile_m=tile_m,
        tile_n=tile_n,
        tile_k=64,
        max_concurrent_steps=4,
        grid_minor_dim=pallas.MatmulDimension[inner],
        grid_tile_width=band,
        wg_dimension=pallas.MatmulDimension[split],
    )
    kernel = functools.partial(
        pallas.all_gather_lhs_matmul, axis_name=AXIS, config=tuning, dtype=fused.DTYPE
    )
    # As a jit of its own it is traced and lowered once for the whole chain.
    return fused.Way(jax.jit(kernel), "baseline", refuses=SYMMETRIC)


def child(asked: dict[str, Any]) -> None:
    """Prints a line before and after each config of each case."""
    import jax

    from pk_jax._bench import fused, fused_bench, gathered, harness, timing
    from pk_jax._bench.ops import AXIS

    mesh = jax.make_mesh((jax.device_count(),), (AXIS,))
    for name, *shape in asked["cases"]:
        bench = fused_bench.Bench(mesh, gathered.OP, GatherCase(name, *shape))
        programs: dict[str, timing.Program] = {}
        ways: dict[str, Any] = {XLA: lambda: fused.Way(gathered.xla, "baseline")}
        ways |= {label(config): functools.partial(way, config) for config in CONFIGS}
        for config, make in ways.items():
            say(case=name, config=config)
            faulthandler.dump_traceback_later(LIMIT_S, exit=True)
            try:
                programs[config] = bench.build(make()).program
                # In turn with XLA's, and at once: what comes later may not end.
                pair = {key: programs[key] for key in (XLA, config) if key in programs}
                times = timing.time_programs(pair, asked["sample_ms"], asked["samples"], 0.5)
            except harness.CheckError as error:
                say(case=name, config=config, error=f"refused: {error}")
            except Exception as error:  # sizes that it does not take, or no such kernel here
                text = (str(error).splitlines() or [""])[0]
                say(case=name, config=config, error=f"{type(error).__name__}: {text}"[:200])
            else:
                for key, each in times.items():
                    say(case=name, config=key, us=[each.median, each.p10, each.p90])
            faulthandler.cancel_dump_traceback_later()


def say(**row: Any) -> None:
    """A line for the parent."""
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    child(json.loads(sys.argv[1]))

"""What the suites of `pk-jax bench` share: where they can run, their options, their numbers."""

import argparse
import math
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

NO_MULTICAST = "NCCL_NVLS_ENABLE"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of every suite."""
    parser.add_argument("--samples", type=positive, default=20, help="timed samples (default 20)")
    parser.add_argument("--json", type=pathlib.Path, metavar="PATH", help="write the records")


def positive(text: str) -> int:
    """A number of samples."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def find_mesh(what: str) -> Any:
    """A mesh of all devices; None, with the reason printed, where `what` cannot be compared."""
    # pk_jax does not use NVLink multicast, so NCCL is compared without it. NCCL has not loaded yet.
    if os.environ.setdefault(NO_MULTICAST, "0") != "0":
        print(
            f"pk-jax bench compares without NVLink multicast: unset {NO_MULTICAST}", file=sys.stderr
        )
        return None
    import jax

    from pk_jax._bench.ops import AXIS

    devices = jax.devices()
    if len(devices) < 2:
        hint = "; JAX_NUM_CPU_DEVICES=8 makes a CPU count as eight" if on_cpu(devices) else ""
        print(
            f"pk-jax bench: {what} need two devices or more, found {len(devices)} "
            f"({devices[0].device_kind}){hint}",
            file=sys.stderr,
        )
        return None
    return jax.make_mesh((len(devices),), (AXIS,))


def on_cpu(devices: Sequence[Any]) -> bool:
    """Whether the devices are the CPU's, where both sides are jax.lax."""
    return devices[0].platform == "cpu"


def number(value: float | None) -> str:
    """Four significant digits, without exponents."""
    if value is None:
        return ""
    digits = max(0, 3 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:.{min(digits, 3)}f}"

"""Reads what ptxas reported about a build's kernels; fails on spills and dropped instructions.

Usage: check_kernels.py BUILD_DIR [--table]

Two things make a kernel slow, or wrong in its register budget, without failing its compile:
  - registers spilled to local memory;
  - "Potential Performance Loss": setmaxnreg ignored (C7508, a kernel without __launch_bounds__),
    or wgmma instructions serialised (C7510 and its kin).
"""

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ENTRY = re.compile(r"Compiling entry function '(\w+)'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
ROOT = Path(__file__).resolve().parents[1]
LOSS = "Potential Performance Loss"


@dataclass
class Kernel:
    """What one kernel uses."""

    name: str
    registers: int = 0
    shared_bytes: int = 0
    stack_bytes: int = 0
    spill_bytes: int = 0


def logs(build_dir: Path) -> dict[str, Path]:
    """Returns the logs of a build folder by source."""
    found = {}
    for log in sorted(build_dir.rglob("*.ptxas")):
        source = log.as_posix().rpartition("pk_cuda.dir/")[2].removesuffix(".o.ptxas")
        if (ROOT / source).exists():  # the log of one that was removed or renamed outlives it
            found[source] = log
    return found


def parse_log(text: str) -> tuple[list[Kernel], list[str]]:
    """Returns the kernels of one log and its performance-loss lines."""
    kernels: list[Kernel] = []
    losses = []
    for line in text.splitlines():
        if LOSS in line:
            losses.append(line.removeprefix("ptxas info").lstrip(" :"))
        elif match := ENTRY.search(line):
            kernels.append(Kernel(match[1]))
        elif not kernels:
            continue
        elif match := SPILLS.search(line):
            kernels[-1].stack_bytes += int(match[1])
            kernels[-1].spill_bytes += int(match[2]) + int(match[3])
        elif match := REGISTERS.search(line):
            kernels[-1].registers = int(match[1])
            if shared := SHARED.search(line):
                kernels[-1].shared_bytes = int(shared[1])
    return kernels, losses


def readable(names: list[str]) -> dict[str, str]:
    """Returns C++ names for mangled ones; the mangled names where c++filt is missing."""
    try:
        result = subprocess.run(
            ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return dict(zip(names, names, strict=True))
    return dict(zip(names, result.stdout.splitlines(), strict=True))


def main() -> int:
    """Checks a build folder and returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("build_dir", type=Path)
    parser.add_argument("--table", action="store_true", help="print every kernel's resources")
    args = parser.parse_args()

    problems = []
    kernels: list[Kernel] = []
    for source, log in logs(args.build_dir).items():
        found, losses = parse_log(log.read_text())
        problems += [f"{source}: {loss}" for loss in losses]
        kernels += found
    names = readable([kernel.name for kernel in kernels])
    for kernel in kernels:
        if kernel.spill_bytes:
            problems.append(f"{names[kernel.name]}: {kernel.spill_bytes} bytes spilled")
    if args.table:
        print("regs  smem   stack  kernel")
        for k in sorted(kernels, key=lambda k: names[k.name]):
            print(f"{k.registers:4d}  {k.shared_bytes:5d}  {k.stack_bytes:5d}  {names[k.name]}")
    if problems:
        print("kernels that ptxas could not compile as written:", *problems, sep="\n  ")
        print("(-C cmake.define.PK_JAX_CHECK_KERNELS=OFF builds them all the same)")
        return 1
    if args.table:
        print(f"{len(kernels)} kernels, no spills, nothing dropped")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Reads the machine code of a build's matrix products; fails where it is not what the source says.

Usage: check_sass.py BUILD_DIR    (cuobjdump and nvdisasm: wheels of the `dev` group, or on PATH)

ptxas reports spills and some of what it drops (check_kernels.py), but not all that makes a matrix
product slow. What must hold for each kernel with `matmul` in its name, however its loops are cut:
  - All HGMMA (QGMMA, of float8) have one shape and accumulate in fp32.
  - They come in steps. The last of a step carries `gsb0`, the commit of the group, and none before
    it does; in between nothing waits and nothing names an accumulator. Where ptxas serialises
    wgmma, it makes each one a group of its own with a wait behind it, or moves accumulators.
  - The main loop, an innermost loop with HGMMA, never waits for all groups, which would leave the
    tensor cores idle until the next step; nor does anything else in it name an accumulator, nor
    does it wait for the whole GPU's memory (MEMBAR.GPU, of a release at the scope of the cluster).
    With QGMMA, whose sums have too few bits, each step begins with zero, is waited for, and every
    one of its accumulators is added up in fp32.
  - Registers are handed over as roles.cuh says, tensor maps are used (for results too, but those of
    few rows, which are stored by lanes), local memory is not.
"""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from check_kernels import ENTRY, logs, readable

STEP = 4  # kBlockK / kWgmmaK of cuda/tile/shared_tile.cuh
# kMover, and kConsumer for two and for one, of cuda/schedule/roles.cuh; attention has others
SETMAXREG = {"DEALLOC": (40,), "TRY_ALLOC": (232, 160)}
TENSOR_COPIES = ("UTMALDG", "UTMASTG")
FEW_ROWS = "few_rows"  # in the names of kernels that store results from registers
HGMMA = re.compile(  # without .BF16: of fp16
    r"HGMMA\.64x(?P<half>64|128|256)x16\.F32(\.BF16)?"
    r"|QGMMA\.64x(?P<float8>64|128)x32\.F32\.E4M3\.E4M3"
)
FUNCTION = re.compile(r"^\s*Function : (\w+)$", re.MULTILINE)
LINE = re.compile(r"^ +/\*([0-9a-f]+)\*/ +(@\S+ )?([\w.]+) ?(.*?) ?;", re.MULTILINE)
TARGET = re.compile(r"(?:^|, )0x([0-9a-f]+)$")


class Instruction(NamedTuple):
    """A line of SASS."""

    address: int
    guard: str  # the predicate that it is executed under, if any
    opcode: str
    operands: str

    def __str__(self) -> str:
        return f"{self.address:#06x} {self.guard}{self.opcode} {self.operands}"

    @property
    def is_hgmma(self) -> bool:
        """Whether this is wgmma's instruction."""
        return self.opcode.startswith(("HGMMA", "QGMMA"))

    @property
    def is_float8(self) -> bool:
        """Whether it is that of float8."""
        return self.opcode.startswith("QGMMA")

    @property
    def accumulators(self) -> set[int]:
        """The registers that an HGMMA or a QGMMA adds to."""
        shape = HGMMA.fullmatch(self.opcode)
        first = re.match(r"R(\d+)", self.operands)
        if not shape or not first:
            return set()
        columns = int(shape["half"] or shape["float8"])
        return set(range(int(first[1]), int(first[1]) + columns // 2))

    @property
    def registers(self) -> set[int]:
        """The registers that the instruction names."""
        return {int(number) for number in re.findall(r"\bR(\d+)", self.operands)}


def parse(text: str) -> dict[str, list[Instruction]]:
    """Returns the kernels of what cuobjdump prints."""
    _, *parts = FUNCTION.split(text)
    kernels = {}
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        lines = LINE.findall(body)
        kernels[name] = [Instruction(int(line[0], 16), *line[1:]) for line in lines]
    return kernels


def loops(code: list[Instruction]) -> list[set[int]]:
    """Returns the loops, as indices of the instructions in them, wherever these lie.

    A branch back is not enough: a wait's retries lie behind the kernel and jump back from there. In
    a loop all ways to the branch pass its target, which is where the walk against the arrows stops.
    """
    index = {instruction.address: i for i, instruction in enumerate(code)}
    before: list[set[int]] = [set() for _ in code]  # from where an instruction is reached
    back = []
    for i, (address, guard, opcode, operands) in enumerate(code):
        target = TARGET.search(operands) if opcode.startswith("BRA") else None
        if target:
            to = index[int(target[1], 16)]
            before[to].add(i)
            if int(target[1], 16) <= address:
                back.append((i, to))
        # A branch may have its condition among its operands too.
        leaves = opcode.startswith(("EXIT", "RET")) or (target and target.start() == 0)
        if i + 1 < len(code) and (guard or not leaves):
            before[i + 1].add(i)
    found: dict[int, set[int]] = {}  # by first instruction: a loop may have several ways back
    for branch, first in back:
        body, ahead = {first}, [branch]
        while ahead:
            i = ahead.pop()
            if i not in body:
                body.add(i)
                ahead += before[i]
        if 0 not in body:
            found.setdefault(first, set()).update(body)
    return list(found.values())


def problems_of_steps(code: list[Instruction]) -> Iterator[str]:
    """Checks that the HGMMA of a step are in flight together."""
    step: list[int] = []
    for i, instruction in enumerate(code):
        if not instruction.is_hgmma:
            continue
        step.append(i)
        if "gsb0" not in instruction.operands:
            continue
        if len(step) < STEP:
            yield f"a step of {len(step)} HGMMA, not {STEP}: {instruction}"
        if instruction.is_float8 and ", RZ, !UPT" not in code[step[0]].operands:
            yield f"a step of float8 does not begin with zero: {code[step[0]]}"
        for other in code[step[0] : i]:
            if other.is_hgmma:
                continue
            if other.opcode.startswith("WARPGROUP"):
                yield f"a wait or fence inside a step: {other}"
            elif other.registers & instruction.accumulators:
                yield f"an accumulator is used inside a step: {other}"
        step = []
    if step:
        yield f"never committed: {code[step[-1]]}"


def problems_of_main_loop(code: list[Instruction]) -> Iterator[str]:
    """Checks what is between one step and the next."""
    with_hgmma = [loop for loop in loops(code) if any(code[i].is_hgmma for i in loop)]
    if not with_hgmma:
        yield "no loop with HGMMA"
    for loop in with_hgmma:
        if any(other < loop for other in with_hgmma):
            continue  # of the tiles, around the main loop
        body = [code[i] for i in sorted(loop)]
        accumulators = set().union(*(i.accumulators for i in body if i.is_hgmma))
        float8 = any(i.is_float8 for i in body)
        in_flight = not float8  # a step of float8 is waited for before the next one
        for instruction in body:
            opcode, operands = instruction.opcode, instruction.operands
            if instruction.is_hgmma:
                in_flight = True
            elif opcode.startswith("WARPGROUP.DEPBAR") and operands.endswith(" 0x0"):
                in_flight = not float8
                if in_flight:
                    yield f"the main loop waits for all steps: {instruction}"
            elif re.match(r"MEMBAR\.\w+\.(GPU|SYS)", opcode):
                yield f"the main loop waits for memory: {instruction}"
            elif in_flight and instruction.registers & accumulators:
                yield f"an accumulator is used in the main loop: {instruction}"
        if float8:
            added = set().union(*(i.registers for i in body if i.opcode == "FADD"))
            if missing := len(accumulators - added):
                yield f"{missing} of {len(accumulators)} accumulators are not added up in fp32"


def problems_of(code: list[Instruction], name: str = "") -> list[str]:
    """Returns what is wrong with a kernel."""
    found = []
    shapes = {i.opcode for i in code if i.is_hgmma}
    if len(shapes) != 1 or not all(HGMMA.fullmatch(shape) for shape in shapes):
        found.append(f"HGMMA of the shapes {sorted(shapes)}")
    for kind, registers in SETMAXREG.items():
        budgets = [i for i in code if i.opcode.startswith(f"USETMAXREG.{kind}")]
        # With TRY_ALLOC the number follows the predicate that tells success.
        if len(budgets) != 1 or budgets[0].operands.split(", ")[-1] not in map(hex, registers):
            allowed = " or ".join(map(str, registers))
            found.append(f"USETMAXREG.{kind} not of {allowed}: {[*map(str, budgets)]}")
    copies = ("UTMALDG",) if FEW_ROWS in name else TENSOR_COPIES
    for copy in copies:
        if not any(i.opcode.startswith(copy) for i in code):
            found.append(f"no {copy}")
    local = [i for i in code if re.match(r"(LDL|STL)\b", i.opcode)]
    if local:
        found.append(f"{len(local)} accesses of local memory: {local[0]} ...")
    return [*found, *problems_of_steps(code), *problems_of_main_loop(code)]


def disassemble(path: Path) -> dict[str, list[Instruction]]:
    """Returns the kernels of an object file."""
    nvidia = importlib.util.find_spec("nvidia")
    wheels = (nvidia and nvidia.submodule_search_locations) or []
    # cuobjdump starts nvdisasm.
    folders = [*(f"{folder}/cu13/bin" for folder in wheels), os.environ.get("PATH", "")]
    environment = {**os.environ, "PATH": os.pathsep.join(folders)}
    tool = shutil.which("cuobjdump", path=environment["PATH"])
    if tool is None:
        sys.exit("check_sass.py needs cuobjdump: run `make tools`, or put it on the PATH")
    command = [tool, "-sass", str(path)]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return parse(result.stdout)


def main() -> int:
    """Checks a build folder and returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("build_dir", type=Path)
    args = parser.parse_args()

    names: list[str] = []
    objects: list[Path] = []
    for log in logs(args.build_dir).values():
        found = [name for name in ENTRY.findall(log.read_text()) if "matmul" in name]
        names += found
        objects += [log.with_suffix("")] if found else []
    if not names:
        print(f"no matrix products in {args.build_dir}")
        return 1
    kernels: dict[str, list[Instruction]] = {}
    with ThreadPoolExecutor() as pool:
        for part in pool.map(disassemble, objects):
            kernels |= part
    cpp_names = readable(names)
    problems = []
    for name in names:
        if found := problems_of(kernels.get(name, []), name):
            problems.append("\n    ".join([f"{cpp_names[name]}:", *found]))
    if problems:
        print("machine code that is not what the source says:", *problems, sep="\n  ")
        return 1
    print(f"{len(names)} matrix products: wgmma in whole steps, no fence in their loops")
    return 0


if __name__ == "__main__":
    sys.exit(main())

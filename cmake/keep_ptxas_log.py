"""Compiler launcher: runs nvcc and keeps what ptxas reported in <object>.ptxas.

Builds hide a compiler's messages while it succeeds, and a spill or a dropped setmaxnreg is only an
information line of a compile that succeeds. scripts/check_kernels.py reads these files.
"""

import subprocess
import sys
from pathlib import Path


def main() -> int:
    """Runs the command given as arguments and returns its exit status."""
    command = sys.argv[1:]
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    lines = result.stderr.splitlines()
    # "ptxas info" lines, and the indented line of stack and spill counts that follows one of them.
    report = [line for line in lines if line.startswith(("ptxas", "    "))]
    hidden = [line for line in lines if line.startswith(("ptxas info", "    "))]
    shown = lines if result.returncode else [line for line in lines if line not in hidden]
    if shown:
        print("\n".join(shown), file=sys.stderr)
    if "-o" in command and not result.returncode:
        target = Path(command[command.index("-o") + 1])
        target.with_name(target.name + ".ptxas").write_text("\n".join(report) + "\n")
    return result.returncode


sys.exit(main())

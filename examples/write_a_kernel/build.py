"""Builds librms_norm_gather.so beside this file: one nvcc command.

nvcc is the one that CUDACXX names, or else the one on PATH: 13.0 or newer.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = ("rms_norm_gather.cu", "rms_norm_gather.cc")


def command(nvcc: str, includes: list[str], output: Path) -> list[str]:
    return [
        nvcc,
        *("-std=c++20", "-O3", "-arch=sm_90a", "--expt-relaxed-constexpr", "-Xptxas=-warn-spills"),
        *("-shared", "-Xcompiler=-fPIC,-fvisibility=hidden"),
        *(word for folder in includes for word in ("-isystem", folder)),
        f"-L{Path(nvcc).resolve().parents[1] / 'lib'}",  # where PyPI's wheels have the CUDA runtime
        *(str(HERE / source) for source in SOURCES),
        *("-o", str(output)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--include", action="append", help="instead of pk_jax's and jaxlib's")
    parser.add_argument("--output", type=Path, default=HERE, help="the folder of the library")
    args = parser.parse_args()
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if nvcc is None:
        sys.exit("no nvcc on PATH: set CUDACXX to one, 13.0 or newer")
    if args.include is None:
        import jax

        import pk_jax

        args.include = [pk_jax.get_include(), jax.ffi.include_dir()]
    args.output.mkdir(parents=True, exist_ok=True)
    words = command(nvcc, args.include, args.output / "librms_norm_gather.so")
    print(shlex.join(words))
    subprocess.run(words, check=True)


if __name__ == "__main__":
    main()

"""Checks what a built wheel contains, links and exports. Needs binutils' readelf.

Usage: audit_wheel.py [--pure] WHEEL
"""

import argparse
import email
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULE = "pk_jax/_ffi.abi3.so"
SUFFIXES = {".py", ".json"}
INCLUDE = "pk_jax/include"
# The headers that libraries of custom ops are built from; CopyEngine is code of the module itself.
HEADERS = [
    *(
        path
        for layer in ("tile", "mechanism", "schedule")
        for path in (ROOT / "cuda" / layer).glob("*.*h")
    ),
    ROOT / "cuda/runtime/check.h",
    *(ROOT / "ffi" / f"{name}.h" for name in ("attributes", "custom_op", "status")),
]
MAX_BYTES = 40 << 20
# The CUDA driver is looked up at run time, and NCCL where JAX has loaded it: neither is linked.
LINKED = re.compile(r"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+)\.so\.\d+|ld-linux-x86-64\.so\.2")
# RHEL 9, Ubuntu 22.04, Debian 12 and anything newer.
CEILINGS = {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13)}


def readelf(option: str, path: Path) -> str:
    """Returns what readelf prints."""
    command = ["readelf", "--wide", option, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def shipped(header: Path) -> str:
    """Returns where a wheel has a header: under the name by which others include it."""
    root = ROOT if header.is_relative_to(ROOT / "ffi") else ROOT / "cuda"
    return f"{INCLUDE}/{header.relative_to(root).as_posix()}"


def audit_elf(path: Path) -> list[str]:
    """Returns what is wrong with the compiled module."""
    problems = []
    dynamic = readelf("--dynamic", path)
    for library in re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic):
        if not LINKED.fullmatch(library):
            problems.append(f"links {library}")
    if re.search(r"\((RPATH|RUNPATH)\)", dynamic):
        problems.append("carries a library search path of the build machine")
    symbols = readelf("--dyn-syms", path)
    exported = re.findall(r" DEFAULT +\d+ (\S+)", symbols)
    if exported != ["PyInit__ffi"]:
        problems.append(f"exports {exported[:8]} and not just PyInit__ffi")
    for name, kind, number in re.findall(r" (\S+?)@+([A-Z]+)_([0-9.]+)", symbols):
        if kind in CEILINGS and tuple(map(int, number.split("."))) > CEILINGS[kind]:
            problems.append(f"needs {name}@{kind}_{number}, past {CEILINGS[kind]}")
    if ".nv_fatbin" not in readelf("--sections", path):
        problems.append("contains no GPU code")
    return problems


def audit(wheel: Path, pure: bool) -> list[str]:
    """Returns what is wrong with a wheel."""
    problems = []
    tag = "py3-none-any" if pure else r"cp312-abi3-(many)?linux\w*_x86_64"
    if not re.fullmatch(rf"pk_jax-{re.escape(PROJECT['version'])}-{tag}\.whl", wheel.name):
        problems.append(f"is named {wheel.name}")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
        info = f"pk_jax-{PROJECT['version']}.dist-info"
        wanted = {"pk_jax/__init__.py", "pk_jax/py.typed", f"{info}/licenses/LICENSE"}
        headers = {shipped(path): path for path in HEADERS if "copy_engine" not in path.name}
        compiled = {MODULE, "pk_jax/_ffi.pyi", *headers}
        problems += [
            f"lacks {name}"
            for name in sorted(wanted | (set() if pure else compiled))
            if name not in names
        ]
        if pure:
            problems += [f"is not pure: {name}" for name in compiled & names]
        for name in names - wanted - compiled:
            path = PurePosixPath(name)
            in_package = path.parts[0] == "pk_jax" and path.suffix in SUFFIXES
            if not (in_package or path.parts[0] == info) or "__pycache__" in path.parts:
                problems.append(f"contains {name}")
        if sum(sizes.values()) > MAX_BYTES:
            problems.append(
                f"is {sum(sizes.values()) >> 20} MiB unpacked, more than {MAX_BYTES >> 20}"
            )
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        if metadata["Requires-Python"] != PROJECT["requires-python"]:
            problems.append(f"requires Python {metadata['Requires-Python']}")
        build_tools = [
            r for r in metadata.get_all("Requires-Dist", []) if re.match("nvidia|nanobind", r)
        ]
        problems += [f"would install {requirement}" for requirement in build_tools]
        if f"{info}/entry_points.txt" not in names:
            problems.append("has no pk-jax command")
        problems += [
            f"has another {name} than the sources"
            for name in sorted(headers.keys() & names)
            if archive.read(name) != headers[name].read_bytes()
        ]
        if not pure and MODULE in names:
            with tempfile.TemporaryDirectory() as folder:
                problems += audit_elf(Path(archive.extract(MODULE, folder)))
    return problems


def main() -> int:
    """Audits one wheel and returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--pure", action="store_true", help="expect no compiled code")
    args = parser.parse_args()
    problems = audit(args.wheel, args.pure)
    for problem in problems:
        print(f"{args.wheel.name} {problem}")
    if not problems:
        print(f"{args.wheel.name}: {args.wheel.stat().st_size / 1024:.0f} KiB, audited")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())

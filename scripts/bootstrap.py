"""Makes the virtual environments that the Makefile's targets run in. Standard library only.

    bootstrap.py tools   .venv: the hooks' tools, and jax for the type checker
    bootstrap.py dev     .venv: tools, and the package, editable, compiled when its C++ changed
    bootstrap.py demo    .venv (.venvs/demo for another JAX): the package and matplotlib;
                         the same as `gpu` where there is a GPU
    bootstrap.py fuzz    .venv: the package and hypothesis
    bootstrap.py gpu     .venvs/gpu: the package with its kernels, and the tests' tools;
                         with --in-place into the very Python that runs this file
    bootstrap.py test NAME WHEEL REQUIREMENT...   .venvs/NAME: a wheel and the tests' tools

Prints the path of the environment's Python. A step is skipped when nothing it depends on has
changed since it last succeeded. Environments are made with the Python that runs this file.
"""

import argparse
import datetime
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BUILD_REQUIRES = [
    *PYPROJECT["build-system"]["requires"],
    *PYPROJECT["tool"]["scikit-build"]["build"]["requires"],
    "cmake>=3.26",
    "ninja>=1.11",
]
# The same releases as the FFI headers. The make variable JAX asks for others, for demo and gpu.
OLDEST_JAX = ["jax==0.11.2", "jaxlib==0.11.2"]
JAX = (os.environ.get("JAX") or "").split() or OLDEST_JAX


def group(name: str) -> list[str]:
    """Returns the requirements of one of pyproject.toml's dependency groups."""
    requirements = []
    for entry in PYPROJECT["dependency-groups"][name]:
        requirements += [entry] if isinstance(entry, str) else group(entry["include-group"])
    return requirements


def say(message: str) -> None:
    """Reports progress, apart from the result."""
    print(f"bootstrap: {message}", file=sys.stderr, flush=True)


class Environment:
    """A Python to install into."""

    def __init__(self, python: Path, stamps: Path | None = None):
        self.python = python
        self.stamps = stamps

    def run(self, *arguments: str, **variables: str) -> None:
        """Runs this Python, from a folder where the checkout's own package is not importable."""
        command = [str(self.python), *arguments]
        environment = {**os.environ, **variables}
        subprocess.run(
            command, check=True, cwd=ROOT / "scripts", env=environment, stdout=sys.stderr
        )

    def pip(self, *arguments: str, **variables: str) -> None:
        """Runs pip install, quietly."""
        quiet = ("-q", "--disable-pip-version-check", "--root-user-action=ignore")
        self.run("-m", "pip", "install", *quiet, *arguments, **variables)

    def once(self, step: str, requirements: list[str]) -> bool:
        """Installs requirements unless the same step did so before; returns whether it had to."""
        key = hashlib.sha256(repr((requirements, sys.version)).encode()).hexdigest()
        stamp = self.stamps / f"pk_jax-{step}.stamp" if self.stamps else None
        if stamp and stamp.exists() and stamp.read_text() == key:
            return False
        say(f"installing what {step} needs into {self.python.parent.parent.relative_to(ROOT)}")
        # Of all that is installed few modules are imported: Python compiles these when they are.
        self.pip("--upgrade", "--no-compile", *requirements)
        if stamp:
            stamp.write_text(key)
        return True

    def has(self, module: str) -> bool:
        """Says whether this Python can find a module."""
        code = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
        command = [str(self.python), "-c", code]
        return subprocess.run(command, cwd=ROOT / "scripts", check=False).returncode == 0

    def install_editable(self, *settings: str, **variables: str) -> None:
        """Installs the checkout as it is, with the build requirements already there."""
        say(f"installing pk_jax for {self.python} (editable{', pure Python' if variables else ''})")
        options = [option for setting in settings for option in ("-C", setting)]
        self.pip("--no-build-isolation", "--no-deps", *options, "-e", str(ROOT), **variables)


def make_venv(folder: Path, parent: list[str] | None = None) -> Environment:
    """Makes a virtual environment, or takes the one there if this same Python made it.

    Args:
      folder: where.
      parent: package folders that the environment can also import from, its own first. (The option
        --system-site-packages shows the base Python's packages, but no virtual environment's.)
    """
    config = folder / "pyvenv.cfg"
    wanted = f"{sys.version}\n{parent}"
    stamp = folder / "pk_jax-python.stamp"
    if not (config.exists() and stamp.exists() and stamp.read_text() == wanted):
        say(f"making {folder.relative_to(ROOT)} with Python {sys.version.split()[0]}")
        shutil.rmtree(folder, ignore_errors=True)
        # The parent has pip already, and may be a Python without ensurepip.
        venv.create(folder, with_pip=not parent, symlinks=True)
        if parent:
            site = sysconfig.get_path(
                "purelib", vars={"base": str(folder), "platbase": str(folder)}
            )
            (Path(site) / "parent-packages.pth").write_text("\n".join(parent) + "\n")
        stamp.write_text(wanted)
    return Environment(folder / "bin" / "python", stamps=folder)


def has_gpu() -> bool:
    """Says whether an NVIDIA driver lists a GPU."""
    if not shutil.which("nvidia-smi"):
        return False
    result = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return result.returncode == 0 and "GPU 0" in result.stdout


def has_cuda_jax(python: Path) -> bool:
    """Says whether a Python has a supported JAX with the plugin for CUDA 13."""
    code = (
        "from importlib.metadata import version as v; v('jax-cuda13-plugin'); import sys; "
        "sys.exit(not (0, 11, 2) <= tuple(map(int, v('jax').split('.')[:3])) < (0, 13))"
    )
    command = [str(python), "-c", code]
    return not subprocess.run(command, capture_output=True, check=False).returncode


def has_nvcc(environment: Environment) -> bool:
    """Says whether CMake will find a CUDA compiler."""
    finder = str(ROOT / "cmake" / "find_cuda_wheels.py")
    wheels = subprocess.run([str(environment.python), finder], capture_output=True, check=False)
    return bool(os.environ.get("CUDACXX") or shutil.which("nvcc") or wheels.stdout.strip())


def tools() -> Environment:
    """Sets up the hooks' tools."""
    environment = make_venv(ROOT / ".venv")
    environment.once("tools", [*OLDEST_JAX, *group("dev")])
    return environment


def dev() -> Environment:
    """Sets up the development loop: C++ edits are compiled at the next import."""
    environment = tools()
    environment.once("build", BUILD_REQUIRES)
    environment.install_editable(
        "editable.rebuild=true", "editable.verbose=false", "build-dir=build/dev"
    )
    return environment


def demo(in_place: bool) -> Environment:
    """Sets up what the examples need; without a GPU nothing needs compiling."""
    if has_gpu() or in_place:
        return gpu(in_place)
    return pure("demo", JAX)


def fuzz() -> Environment:
    """Sets up what the random tests need on CPU devices: nothing of it is compiled."""
    return pure("fuzz", OLDEST_JAX)


def pure(name: str, jax: list[str]) -> Environment:
    """Sets up a JAX, a dependency group and the package, without its kernels unless it is there."""
    environment = make_venv(ROOT / (".venv" if jax == OLDEST_JAX else f".venvs/{name}"))
    environment.once(name, [*jax, *group(name), PYPROJECT["build-system"]["requires"][0]])
    if not environment.has("pk_jax"):
        environment.install_editable(PK_JAX_PURE_PYTHON="1")
    return environment


def gpu(in_place: bool) -> Environment:
    """Sets up the package with its kernels for this machine's GPUs.

    A Python that has JAX with its CUDA plugin already is built upon, not copied: nothing of that
    size is downloaded, and machines without a network work too.
    """
    if not has_cuda_jax(Path(sys.executable)):
        finder = [str(ROOT / "scripts" / "find_python.sh"), "--all"]
        found = subprocess.run(
            finder, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        for python in found:
            if not in_place and has_cuda_jax(Path(python)):
                os.execv(python, [python, *sys.argv])
    if in_place:
        environment = Environment(Path(sys.executable))
        if not has_cuda_jax(environment.python):
            sys.exit(f"{sys.executable} lacks jax>=0.11.2,<0.13 with the plugin for CUDA 13.")
    elif has_cuda_jax(Path(sys.executable)):
        parent = [p for p in sys.path if re.search(r"(site|dist)-packages/?$", p)]
        environment = make_venv(ROOT / ".venvs" / "gpu", parent)
    else:
        environment = make_venv(ROOT / ".venvs" / "gpu")
        environment.once("gpu", [JAX[0].replace("jax", "jax[cuda13]", 1), *JAX[1:]])
    missing = [r for r in BUILD_REQUIRES if not r.startswith(("nvidia", "jax"))]
    missing = [r for r in missing if not environment.has(re.split("[=>]", r)[0].replace("-", "_"))]
    missing = [r for r in missing if not shutil.which(re.split("[=>]", r)[0])]
    if not has_nvcc(environment):
        missing += [r for r in BUILD_REQUIRES if r.startswith("nvidia")]
    missing += [r for r in group("test") if not environment.has(r.split("==")[0])]
    if missing:
        environment.pip(*missing)
    environment.install_editable("build-dir=build/gpu")
    return environment


def test(name: str, wheel: str, requirements: list[str]) -> Environment:
    """Sets up an environment that has a built wheel and the given JAX."""
    environment = make_venv(ROOT / ".venvs" / name)
    today = datetime.date.today().isoformat()  # a range is resolved again on another day
    fresh = not all("==" in requirement for requirement in requirements)
    try:
        tools = [*group("test"), *group("fuzz")]
        tools += group("modules") if fresh else []  # their examples, with the newest JAX alone
        environment.once(f"packages{today if fresh else ''}", [*requirements, *tools])
    except subprocess.CalledProcessError:
        sys.exit(f"Cannot install {' '.join(requirements)}: see pip's message above.")
    environment.pip("--no-deps", "--force-reinstall", str(Path(wheel).resolve()))
    versions = (
        "import importlib.metadata as m, platform, pk_jax; "
        f"assert '.venvs/{name}' in pk_jax.__file__, pk_jax.__file__; "
        "print('testing pk_jax', m.version('pk_jax'), 'with jax', m.version('jax'), "
        "'jaxlib', m.version('jaxlib'), 'Python', platform.python_version())"
    )
    environment.run("-c", versions)
    return environment


def main() -> None:
    """Runs one step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    steps = parser.add_subparsers(dest="step", required=True)
    for name in ("tools", "dev", "fuzz"):
        steps.add_parser(name)
    for name in ("demo", "gpu"):
        steps.add_parser(name).add_argument("--in-place", action="store_true")
    test_parser = steps.add_parser("test")
    test_parser.add_argument("name")
    test_parser.add_argument("wheel")
    test_parser.add_argument("requirements", nargs="+")
    args = parser.parse_args()
    if args.step == "test":
        environment = test(args.name, args.wheel, args.requirements)
    elif args.step in ("demo", "gpu"):
        environment = {"demo": demo, "gpu": gpu}[args.step](args.in_place)
    else:
        environment = {"tools": tools, "dev": dev, "fuzz": fuzz}[args.step]()
    print(environment.python)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"bootstrap: this failed: {shlex.join(map(str, error.cmd))}")

"""The layers of the checkout: who may include or import whom, and how long a file may grow.

An arrow may include or import only what is right of it: API -> _primitives -> [_ffi] ffi ->
cuda/runtime -> cuda/kernels -> cuda/schedule -> cuda/mechanism -> cuda/tile.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.without_jax

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "cuda").is_dir():
    pytest.skip("needs the checkout, not just the tests", allow_module_level=True)

CPP_LAYERS = (
    "ffi",
    "cuda/runtime",
    "cuda/kernels",
    "cuda/schedule",
    "cuda/mechanism",
    "cuda/tile",
)
CPP_SUFFIXES = {".cu", ".cuh", ".cc", ".h"}
# Known only to the FFI layer: below it there is neither XLA nor Python.
FOREIGN = re.compile(r"(xla/|nanobind/|Python\.h|jax)")
# May be named by one file, or by files of one name, alone.
ALONE = {
    "pk_jax/_compat.py": re.compile(r"jax\._src|jax(lib)?\.__version__|jax(lib)?\.version\b"),
    "pk_jax/_registry.py": re.compile(r"pk_jax\._ffi|import _ffi|\"_ffi\""),
    "cuda/tile/ptx*.cuh": re.compile(r"\basm\b\s*(volatile)?\s*\("),
}
# In-switch reduction and multicast objects: no file has them. (The brackets hide this line.)
MULTICAST = re.compile(r"cu[M]ulticast|multi[m]em\.|CU_MULTI[C]AST")
CEILINGS = {".py": 400, ".cu": 350, ".cuh": 300, ".cc": 400, ".h": 300, ".txt": 80, ".cmake": 80}
TEST_CEILING = 500


def files(*suffixes: str, under: tuple[str, ...] = ("pk_jax", "cuda", "ffi")) -> Iterator[Path]:
    """Yields the source files of some folders, relative to the root."""
    for folder in under:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in suffixes and "__pycache__" not in path.parts:
                yield path.relative_to(ROOT)


def cpp_code(path: Path) -> str:
    """Returns a C++ file without its comments."""
    text = (ROOT / path).read_text()
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def cpp_layer(path: Path) -> int | None:
    """Returns a file's place in CPP_LAYERS."""
    for index, layer in enumerate(CPP_LAYERS):
        if path.is_relative_to(layer):
            return index
    return None


def resolve_include(source: Path, name: str) -> Path | None:
    """Returns the file of the checkout that an include names; include roots are cuda/ and ./."""
    for folder in (source.parent, Path("cuda"), Path()):
        if (ROOT / folder / name).is_file():
            return (ROOT / folder / name).resolve().relative_to(ROOT)
    return None


def test_includes_go_one_way():
    wrong = []
    for source in files(*CPP_SUFFIXES, under=("cuda", "ffi")):
        for name in re.findall(r'#\s*include\s*[<"]([^>"]+)[>"]', cpp_code(source)):
            target = resolve_include(source, name)
            if FOREIGN.match(name) and source.parts[0] != "ffi":
                wrong.append(f"{source} includes {name}")
            if target is None:
                continue
            layers = cpp_layer(source), cpp_layer(target)
            if None in layers:
                wrong.append(f"{source} -> {target}: not in a layer")
            elif layers[1] < layers[0]:
                wrong.append(f"{source} -> {target}")
    assert not wrong, "wrong-way includes:\n" + "\n".join(wrong)


def python_layer(module: str) -> int:
    """Returns a module's layer: 0 entry points, 1 API, 2 primitives, 3 their support, 4 _compat."""
    name = module.removeprefix("pk_jax").removeprefix(".").split(".")[0]
    if name in ("", "__main__", "_doctor", "_redirect", "_bench"):
        return 0
    if name == "_primitives":
        return 2
    if name == "_compat":
        return 4
    return 3 if name.startswith("_") or name in ("config", "errors") else 1


def python_imports(path: Path) -> Iterator[str]:
    """Yields the modules of pk_jax that a file imports, anywhere in it."""
    package = list(path.parent.parts)
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "pk_jax")
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            if module.split(".")[0] != "pk_jax":
                continue
            for alias in node.names:  # `from pk_jax import config` imports pk_jax.config
                child = ROOT / Path(*module.split("."), alias.name)
                is_module = child.is_dir() or child.with_suffix(".py").exists()
                yield f"{module}.{alias.name}" if is_module else module


def test_python_imports_go_one_way():
    wrong = []
    for path in files(".py", under=("pk_jax",)):
        module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        for target in python_imports(path):
            if python_layer(target) < python_layer(module):
                wrong.append(f"{module} -> {target}")
            # What an op means, and what it should cost, depend on no other part of the package.
            pure = module.startswith("pk_jax._reference")
            allowed = ("pk_jax._reference", "pk_jax._compat")
            if pure and not target.startswith(allowed):
                wrong.append(f"{module} -> {target} (the reference is pure jax.lax)")
            if module == "pk_jax._tuning.cost_model" and not target.startswith(
                ("pk_jax._tuning.", "pk_jax.config")
            ):
                wrong.append(f"{module} -> {target} (the cost model is pure functions)")
    assert not wrong, "wrong-way imports:\n" + "\n".join(wrong)


def test_examples_import_what_is_public():
    paths = list(files(".py", under=("examples",)))
    private = [(str(path), name) for path in paths for name in python_imports(path) if "._" in name]
    assert paths and not private


@pytest.mark.parametrize("owner", ALONE)
def test_named_by_one_file_alone(owner: str):
    suffixes = {".py"} if owner.endswith(".py") else CPP_SUFFIXES
    found = []
    for path in files(*suffixes):
        text = (ROOT / path).read_text() if path.suffix == ".py" else cpp_code(path)
        if not path.match(owner) and ALONE[owner].search(text):
            found.append(str(path))
    assert not found, f"only {owner} may match {ALONE[owner].pattern}: {found}"


def test_no_multicast_code():
    everywhere = ("pk_jax", "cuda", "ffi", "tests", "examples", "benchmarks", "scripts")
    found = [
        str(path)
        for path in files(".py", *CPP_SUFFIXES, under=everywhere)
        if MULTICAST.search((ROOT / path).read_text())
    ]
    assert not found, f"multicast code: {found}"


def test_files_stay_short():
    long = []
    paths = [Path("CMakeLists.txt")]
    paths += files(
        *CEILINGS, under=("pk_jax", "cuda", "ffi", "cmake", "examples", "benchmarks", "scripts")
    )
    paths += files(*CEILINGS, under=("tests",))
    for path in paths:
        ceiling = TEST_CEILING if path.parts[0] == "tests" else CEILINGS[path.suffix]
        count = len((ROOT / path).read_text().splitlines())
        if count > ceiling:
            long.append(f"{path}: {count} lines, ceiling {ceiling}")
    assert not long, "\n".join(long)

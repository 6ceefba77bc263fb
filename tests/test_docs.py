"""The documentation is true: examples run; links, files, functions and messages exist."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "README.md").is_file():
    pytest.skip("needs the checkout, not just the tests", allow_module_level=True)

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
# A path with a folder and a suffix that this project uses: `cuda/tile/ptx.cuh`, `ffi/*.h`.
PATH = re.compile(r"[\w.*-]+(?:/[\w.*-]+)*/[\w*-][\w.*-]*\.(?:py|cuh?|cc|h|md|toml|sh|cmake|map)")
# Documents name files of the vocabulary as C++ includes them.
INCLUDE_ROOTS = (ROOT, ROOT / "cuda")
SOURCES = (".py", ".cu", ".cuh", ".cc", ".h")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return BLOCK.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


@functools.cache
def sources() -> str:
    """All code of the package; string literals that continue on the next line are joined."""
    text = "\n".join(
        path.read_text()
        for folder in ("pk_jax", "cuda", "ffi", "tests", "benchmarks", "examples", "scripts")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in SOURCES and path.name != Path(__file__).name
    )
    return re.sub(r'"\s*\n\s*f?"', "", text)


def python_examples(page: str) -> list[str]:
    return [body for kind, body in BLOCK.findall((ROOT / page).read_text()) if kind == "python"]


# Pages whose examples are programs.
WITH_EXAMPLES = ("README.md", "docs/tensor_parallel.md", "docs/attention.md")
PROGRAMS = [
    pytest.param(code, id=f"{page}-{i}")
    for page in WITH_EXAMPLES
    for i, code in enumerate(python_examples(page))
]


@pytest.mark.parametrize("code", PROGRAMS)
def test_example_runs(code, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment |= {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", WITH_EXAMPLES)
def test_page_has_an_example(page):
    assert python_examples(page)


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pages
def test_links(page):
    for target in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        assert found.exists(), f"{target}: no such file"
        assert not anchor or anchor in anchors(found), f"{target}: no such heading"


@pages
def test_named_files(page):
    missing = []
    for code in CODE.findall(prose(page)):
        for word in code.split():
            if not PATH.fullmatch(word) or word.startswith((".venv", "build/", "dist/")):
                continue
            if not any(any(root.glob(word)) for root in INCLUDE_ROOTS):
                missing.append(word)
    assert not missing


@pages
def test_named_functions(page):
    """A name written with its parentheses, `like_this()`, is defined or called somewhere."""
    names = {
        name for code in CODE.findall(prose(page)) for name in re.findall(r"^(\w+)\(\)$", code)
    }
    missing = [name for name in sorted(names) if not re.search(rf"\b{name}\(", sources())]
    assert not missing


@pages
def test_named_make_targets_and_variables(page):
    text = page.read_text()
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"(?:^|`|\s)make ([a-z][a-z-]+)(?=[`\s])", text)) & {
        word for code in CODE.findall(text) for word in code.split()
    }
    assert [t for t in sorted(targets) if not re.search(rf"^{t}:", makefile, re.MULTILINE)] == []
    code = sources() + (ROOT / "pyproject.toml").read_text() + (ROOT / "CMakeLists.txt").read_text()
    variables = set(re.findall(r"\bPK_JAX_[A-Z_]+\b", text))
    assert [v for v in sorted(variables) if v not in code] == []


def test_messages_of_the_troubleshooting_page():
    """Every message that stands in a heading there is one that the code can give."""
    page = ROOT / "docs" / "troubleshooting.md"
    headings = re.findall(r"^### (.+)$", page.read_text(), re.MULTILINE)
    # An ellipsis stands for values: the pieces around it are what must be found.
    pieces = [p.strip() for h in headings for m in CODE.findall(h) for p in m.split("...")]
    missing = [piece for piece in pieces if piece and piece not in sources()]
    assert pieces and not missing

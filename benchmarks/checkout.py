"""The checkout that a benchmark runs in: where its results lie, and its commit."""

from __future__ import annotations

import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def commit() -> str | None:
    """The commit of the source tree, with a mark when files differ from it; None outside git."""

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *args], check=True, capture_output=True, text=True, timeout=20
        ).stdout.strip()

    try:
        # Results are written by the run itself and do not make the measured tree another one.
        dirty = git(
            "status",
            "--porcelain",
            "--untracked-files=no",
            "--",
            ".",
            ":!benchmarks/results",
            ":!docs/images",
        )
        return git("rev-parse", "--short", "HEAD") + ("-dirty" if dirty else "")
    except (OSError, subprocess.SubprocessError):
        return None

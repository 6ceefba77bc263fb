"""Counts the lines of code, without comments and blank lines, of each kernel and of the words.

Usage: device_lines.py [FILE...]

A kernel that needs many lines misses a word of the vocabulary (cuda/tile, cuda/mechanism,
cuda/schedule).
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("kernels", "schedule", "mechanism", "tile")
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def num_lines(path: Path) -> int:
    """Lines of a file that hold code."""
    return sum(bool(line.strip()) for line in COMMENT.sub("", path.read_text()).splitlines())


def main(names: list[str]) -> None:
    """Prints a line a file, with a sum for each folder; of the files named, if any."""
    if names:
        for name in names:
            print(f"{num_lines(Path(name)):5d}  {name}")
        return
    for folder in FOLDERS:
        files = [
            p
            for p in sorted((ROOT / "cuda" / folder).iterdir())
            if p.suffix in (".cu", ".cuh", ".h")
        ]
        counts = {path: num_lines(path) for path in files}
        print(f"{sum(counts.values()):5d}  cuda/{folder}")
        for path, count in counts.items():
            print(f"{count:5d}    {path.name}")


if __name__ == "__main__":
    main(sys.argv[1:])

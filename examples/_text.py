"""The text train_lm.py learns from: the source files of Python's standard library."""

import sysconfig
from pathlib import Path

import numpy as np

# Tests are not installed everywhere. The character tables of `encodings` are near copies of one
# another, so the held-out ones would be too easy.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}


def load_text():
    """Returns the bytes of the files to train on and of every 16th file, which is held out."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [f for f in sorted(root.rglob("*.py")) if not LEFT_OUT & set(f.relative_to(root).parts)]
    training, held_out = [f for i, f in enumerate(files) if i % 16 != 8], files[8::16]
    text, unseen = (
        np.frombuffer(b"\n".join(f.read_bytes() for f in part), np.uint8)
        for part in (training, held_out)
    )
    print(f"text       {len(training)} files of {root}, {text.size / 1e6:.1f} MB")
    print(f"           {len(held_out)} more are held out, {unseen.size / 1e6:.1f} MB")
    return text, unseen


def byte_frequency_bits(text, targets):
    """Bits per byte of `targets` by a model that knows how frequent each byte is in `text`."""
    frequency = (np.bincount(text, minlength=256) + 1) / (text.size + 256)
    return float(-np.log2(frequency)[targets].mean())

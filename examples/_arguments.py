"""The command line of train_lm.py."""

import argparse
from pathlib import Path


def positive(text):
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return int(text)


def mesh_shape(text):
    data, _, model = text.partition("x")
    return positive(data), positive(model)


def parse_arguments(description, argv):
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--steps", type=positive)
    parser.add_argument("--batch", type=positive, help="sequences in a step")
    parser.add_argument("--seq", type=positive, help="bytes in a sequence")
    parser.add_argument("--devices", type=positive, help="default: the largest power of two")
    parser.add_argument(
        "--mesh", type=mesh_shape, metavar="DxM", help="sizes of the axes data and model"
    )
    parser.add_argument("--cpu", action="store_true", help="virtual CPU devices even if GPUs exist")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/train_lm.png"), help="the chart")
    return parser.parse_args(argv)

"""Prints the folder of a complete CUDA compiler that came from PyPI wheels, or nothing.

All five wheels must have been installed into one folder: nvcc looks for its tools, headers and
libraries beside itself.
"""

import importlib.util
from pathlib import Path

NEEDED = (
    "bin/nvcc",  # nvidia-cuda-nvcc
    "nvvm/bin/cicc",  # nvidia-nvvm
    "include/crt/host_config.h",  # nvidia-cuda-crt
    "include/cuda_runtime.h",  # nvidia-cuda-runtime
    "lib/libcudart_static.a",
    "include/cccl/cuda/std/version",  # nvidia-cuda-cccl
)


def main() -> None:
    """Prints the first complete folder."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        root = Path(folder) / "cu13"
        if all((root / name).exists() for name in NEEDED):
            print(root)
            return


main()

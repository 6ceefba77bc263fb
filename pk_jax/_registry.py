"""Loads the compiled part of pk_jax, if there is one, and registers its handlers with XLA.

Nothing here fails an import: a machine without the library runs the reference, and `why_missing`
keeps the reason for whoever asks (the selection, the doctor, implementation="cuda"). JAX queues
registrations until a backend is made, so importing pk_jax starts no backend.
"""

import ctypes
import importlib
import os
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from pk_jax import _compat, _errors

# The first jaxlib whose FFI has the Collectives extension that the handlers ask for. An older one
# would also refuse the library's FFI version, and with it the whole CUDA backend.
OLDEST_JAXLIB = (0, 11, 2)

library: Any = None
load_error: Exception | None = None

# The files behind the libraries of custom ops that are open.
_opened: dict[Path, tuple[int, ...]] = {}


def why_missing() -> str | None:
    """Why the handlers cannot be used in this process; None if they are registered."""
    if _compat.jaxlib_version() < OLDEST_JAXLIB:
        return (
            f"jaxlib {_dotted(_compat.jaxlib_version())} has no FFI Collectives extension; "
            f"install jaxlib >= {_dotted(OLDEST_JAXLIB)}"
        )
    if library is None:
        return (
            "the extension library pk_jax._ffi is not there "
            f"({type(load_error).__name__}: {load_error}); "
            "install pk_jax from source with a CUDA compiler"
        )
    return None


def last_error() -> str | None:
    """What the first kernel of this process that gave up has left: op, rank, peer, slot and values.

    A kernel gives up when a peer keeps it waiting too long; XLA's error then only says that a
    launch failed. Fit for the ``except`` branch of a program that catches that error.

    Returns:
        The text of the record; None if no kernel has given up or there is no compiled library.
    """
    return library.last_error() if library is not None else None


def cuda_runtime() -> tuple[int, ...] | None:
    """The CUDA runtime the library was built with, e.g. (13, 0); None without a library."""
    if library is None:
        return None
    return tuple(int(part) for part in library.build_info()["cuda_runtime"].split("."))


def load_ops(path: Path, taken: Iterable[str]) -> tuple[str, ...]:
    """Loads a library of custom ops and registers its handlers; returns the names of new ops.

    Args:
        path: the library.
        taken: names that its ops may not have.

    Raises:
        ImportError: the compiled library is missing, or does not take this one.
    """
    reason = why_missing()
    if reason is not None:
        raise ImportError(f"{path} has kernels for pk_jax, but {reason}")
    # The dynamic loader goes by the path: for a new file it would give back the old library.
    found = path.stat()
    file = (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size)
    if _opened.get(path, file) != file:
        raise ImportError(
            f"{path} has changed since it was loaded; a library that was built again is seen by a "
            "new process"
        )
    try:
        targets = library.load_ops(str(path), list(taken))
    except RuntimeError as error:
        raise ImportError(str(error)) from error
    finally:
        if _is_open(path):
            _opened[path] = file
    stages = library.handlers()
    for target in targets:
        jax.ffi.register_ffi_target(target, stages[target], platform="CUDA")
    return tuple(target.removeprefix("pk_jax_") for target in targets)


def _is_open(path: Path) -> bool:
    """Whether a library is open in this process: also one that was refused stays so."""
    try:
        ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return True


def _load() -> tuple[ModuleType | None, Exception | None]:
    try:
        return importlib.import_module("pk_jax._ffi"), None
    except ImportError as error:
        return None, error


def _register() -> None:
    # Types first: XLA asks a handler for the type of its state when the handler is registered.
    for name, ids in library.types().items():
        jax.ffi.register_ffi_type(name, ids, platform="CUDA")
    for name, stages in library.handlers().items():
        jax.ffi.register_ffi_target(name, stages, platform="CUDA")
    _errors.install(library.last_error)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


library, load_error = _load()
if why_missing() is None:
    _register()

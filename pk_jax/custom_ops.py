"""Ops of other libraries: kernels in the words of pk_jax, with pk_jax's communicators around them.

docs/write_a_kernel.md builds one, from its kernel to its tests.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pk_jax import _capability, _registry, _selection
from pk_jax import config as _config
from pk_jax._primitives import checks, custom

# Beside integers. NumPy has wider floats, which XLA has not.
_ATTRIBUTES: tuple[type, ...] = (float, str, np.bool_, np.float16, np.float32, np.float64)


def get_include() -> str:
    """The folder of the headers that a library of custom ops is built from.

    They belong to the compiled library of this installation, which refuses to load ops that were
    built from others. Handlers include ``ffi/custom_op.h``, and XLA's headers from
    ``jax.ffi.include_dir()``.

    Raises:
        ImportError: pk_jax has no compiled library here, or was installed without headers.
    """
    if _registry.library is None:
        raise ImportError(f"pk_jax has no headers without kernels: {_registry.why_missing()}")
    folder = Path(_registry.library.__file__).parent / "include"
    if not folder.is_dir():
        raise ImportError(
            f"this installation of pk_jax has no headers, there is no folder {folder}; install "
            "pk_jax from source with a CUDA compiler, which puts them there"
        )
    return str(folder)


def load_ops(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Loads a library of custom ops, for :func:`call_op`; once more does nothing.

    Every process of a run must load it before it lowers its first pk op for CUDA: that is when the
    processes tell each other which kernels they have.

    Args:
        path: the shared library, whose sources end with ``PK_JAX_CUSTOM_OPS(...)``.

    Returns:
        The names of the ops that are new.

    Raises:
        FileNotFoundError: there is no such file.
        ImportError: pk_jax has no compiled library here, this one does not fit it, or it was built
            again since this process loaded it.
    """
    path = Path(path).resolve()
    if path.is_dir():
        raise FileNotFoundError(f"{path} is a folder; name the library in it")
    if not path.is_file():
        raise FileNotFoundError(f"no library of custom ops at {path}; build it first")
    names = _registry.load_ops(path, _selection.TAKEN)
    _capability.renew()
    return names


def call_op(
    name: str,
    reference: Callable[..., Any],
    operands: Sequence[Any],
    axis_name: Any,
    /,
    *,
    implementation: str | None = None,
    **attributes: Any,
) -> jax.Array:
    """Calls a custom op inside ``jax.shard_map``, or its reference where its kernel cannot run.

    Under ``jit``, ``scan`` and ``remat``. For ``grad`` wrap it in ``jax.custom_vjp``, for ``vmap``
    in ``jax.custom_batching.custom_vmap``: with implementation="reference" both go through the
    reference. In a group of one rank the kernel has no peers, so there the reference runs.

    Args:
        name: the op's name in its ``PK_JAX_CUSTOM_OPS(...)``.
        reference: what the op means: ``reference(*operands, axis_name=..., **attributes)`` in pure
            jax.lax, of nothing traced but its operands. It gives the shape, the dtype and the type
            of the one result, too.
        operands: arrays, row-major for the handler. The dtype of the first one must be of whole
            bytes.
        axis_name: the mesh axis or axes of the ranks.
        implementation: None, "cuda" or "reference", as for all ops.
        **attributes: numbers or strings, for the reference and the handler alike; there a float of
            Python is a double and an int an int64_t, and NumPy's scalars are what they are. None
            is complex or beyond an int64_t.

    Returns:
        The result.

    Raises:
        NotImplementedError: the kernel cannot run, and implementation is "cuda"; or a derivative or
            a map of the op is asked for.
        TypeError: an argument of the wrong kind.
        ValueError: a name of the op or of an attribute that pk_jax has itself, or an attribute
            beyond an int64_t.
    """
    _check_name(name)
    _config.check_implementation(name, implementation)
    axes = checks.check_axes(name, axis_name)
    _check_reference(name, reference)
    operands = _check_operands(name, operands)
    for key, value in attributes.items():
        _check_attribute(name, key, value)
    if implementation == "reference":
        return custom.meaning(name, reference, operands, axes, attributes)
    return custom.bind(name, reference, operands, axes, implementation, attributes)


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"call_op: name must be a string, the name of a custom op; got {name!r}")
    if name in _selection.TAKEN:
        raise ValueError(
            f"call_op: {name!r} is pk_jax's own and no custom op; choose another name for yours"
        )


def _check_reference(name: str, reference: Any) -> None:
    if not callable(reference):
        raise TypeError(f"{name}: reference must be a function of the operands, got {reference!r}")
    try:
        hash(reference)
    except TypeError as error:
        raise TypeError(
            f"{name}: reference must be hashable ({error}), got {reference!r}; pass a function"
        ) from None


def _check_operands(name: str, operands: Any) -> tuple[Any, ...]:
    if isinstance(operands, (jax.Array, np.ndarray)):
        raise TypeError(
            f"{name}: operands must be a tuple of arrays, got one array of shape {operands.shape}; "
            "pass (x,)"
        )
    try:
        operands = tuple(operands)
    except TypeError:
        raise TypeError(f"{name}: operands must be a tuple of arrays, got {operands!r}") from None
    if not operands:
        raise TypeError(f"{name}: operands must be arrays, at least one; got none")
    for number, x in enumerate(operands):
        if not isinstance(x, (jax.Array, np.ndarray)):
            raise TypeError(
                f"{name}: operands must be arrays, got {x!r} as number {number}; pass "
                "jnp.asarray of it, or make it an attribute"
            )
    return operands


def _check_attribute(name: str, key: str, value: Any) -> None:
    if key in custom.RESERVED:
        raise ValueError(
            f"{name}: attribute {key!r} is one that pk_jax gives every call ({custom.RESERVED}); "
            "choose another name"
        )
    what = f"{name}: attribute {key}={value!r}"
    if isinstance(value, (int, np.integer)) and not isinstance(value, np.timedelta64):
        if not -(2**63) <= int(value) < 2**63:
            raise ValueError(
                f"{what} does not fit in an int64_t; pass it as an operand or a string"
            )
    elif np.iscomplexobj(value):
        raise TypeError(f"{what} must not be complex; pass its real and its imaginary part")
    elif not isinstance(value, _ATTRIBUTES):
        raise TypeError(
            f"{what} must be a number of at most 64 bits or a string; pass an array as an operand"
        )

"""Ops of other libraries: kernels in the words of pk_jax, with pk_jax's communicators around them.

docs/write_a_kernel.md builds one, from its kernel to its tests.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pk_jax import _capability, _registry
from pk_jax import config as _config
from pk_jax._primitives import checks, custom


def get_include() -> str:
    """The folder of the headers that a library of custom ops is built from.

    They belong to the compiled library of this installation, which refuses to load ops that were
    built from others. Handlers include ``ffi/custom_op.h``, and XLA's headers from
    ``jax.ffi.include_dir()``.

    Raises:
        ImportError: pk_jax has no compiled library here.
    """
    if _registry.library is None:
        raise ImportError(f"pk_jax has no headers without kernels: {_registry.why_missing()}")
    return str(Path(_registry.library.__file__).parent / "include")


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
        ImportError: pk_jax has no compiled library here, or this one does not fit it.
    """
    path = Path(path).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"no library of custom ops at {path}")
    names = _registry.load_ops(path)
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
    reference.

    Args:
        name: the op's name in its ``PK_JAX_CUSTOM_OPS(...)``.
        reference: what the op means: ``reference(*operands, axis_name=..., **attributes)`` in pure
            jax.lax. It gives the shape, the dtype and the type of the one result, too.
        operands: arrays, row-major for the handler. The dtype of the first one must be of whole
            bytes.
        axis_name: the mesh axis or axes of the ranks.
        implementation: None, "cuda" or "reference", as for all ops.
        **attributes: numbers or strings, for the reference and the handler alike; there a float of
            Python is a double and an int an int64_t, and NumPy's scalars are what they are.

    Returns:
        The result.

    Raises:
        NotImplementedError: the kernel cannot run, and implementation is "cuda".
        TypeError: an argument of the wrong kind.
        ValueError: an attribute of a name that pk_jax's own attributes have.
    """
    _config.check_implementation(name, implementation)
    axes = checks.check_axes(name, axis_name)
    if not callable(reference):
        raise TypeError(f"{name}: reference must be a function of the operands, got {reference!r}")
    if not operands or not all(isinstance(x, (jax.Array, np.ndarray)) for x in operands):
        kinds = [type(x).__name__ for x in operands]
        raise TypeError(f"{name}: operands must be arrays, at least one; got {kinds}")
    for key, value in attributes.items():
        if key in custom.RESERVED:
            raise ValueError(
                f"{name}: attribute {key!r} is one that pk_jax gives every call ({custom.RESERVED})"
            )
        if not isinstance(value, (bool, int, float, str, np.bool_, np.number)):
            raise TypeError(f"{name}: attribute {key}={value!r} must be a number or a string")
    if implementation == "reference":
        return reference(*operands, axis_name=axes, **attributes)
    return custom.bind(name, reference, operands, axes, implementation, attributes)

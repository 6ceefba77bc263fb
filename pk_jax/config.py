"""The knobs of an op: a frozen Config, its defaults by context manager, its checks.

A Config ends up among the parameters of the primitive, and the defaults are a part of jit's cache
key: there is no hidden state that a compiled function could have missed.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from pk_jax import _compat
from pk_jax._tuning import cost_model, few_rows_model, matmul_model

MECHANISMS = ("copy_engine", "tma", "register")
SCHEDULES = ("sequential", "intra_sm", "inter_sm")
IMPLEMENTATIONS = ("cuda", "reference")

# The most blocks a kernel may have: each has an epoch word of its own.
MAX_BLOCKS = 512

# The most SMs that empty the landing buffer of the copy engine.
MAX_DRAIN_BLOCKS = 32


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value is not None and not (isinstance(value, str) and value in choices):
        raise ValueError(f"{name} must be None or one of {choices}, got {value!r}")


def _is_positive_int(value: Any) -> bool:
    is_int = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    return is_int and int(value) > 0


def _float_dtype(value: Any) -> str:
    """The name of a floating-point dtype: NumPy holds dtype("float64") to be equal to None."""
    try:
        dtype = jnp.dtype(value)
    except (TypeError, ValueError):
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"reduce_dtype must be a floating-point dtype or None, got {value!r}")
    return dtype.name


@dataclasses.dataclass(frozen=True)
class Config:
    """How an op moves bytes and shares the chip; None leaves the choice to the cost model.

    Attributes:
        mechanism: what moves the bytes: "copy_engine", "tma" or "register". The copy engine moves
            data over the link without SMs, and a few SMs empty the buffer in which it lands.
        schedule: how communication and arithmetic share the chip: "sequential", one after the
            other; "intra_sm", every SM does both; "inter_sm", some SMs communicate.
        num_comm_sms: how many SMs communicate, 1 to 512; with "copy_engine" those that empty the
            landing buffer, 32 at most.
        tile: rows and columns of the result that a thread block, or a cluster of them, makes at a
            time, e.g. (128, 256).
        reduce_dtype: dtype in which partial sums cross the link.
        deterministic: same inputs, same bits, run after run.
        multicast: allow NVLink multicast addresses.
    """

    mechanism: str | None = None
    schedule: str | None = None
    num_comm_sms: int | None = None
    tile: tuple[int, ...] | None = None
    reduce_dtype: Any = None
    deterministic: bool = True
    multicast: bool = False

    def __post_init__(self):
        _check_choice("mechanism", self.mechanism, MECHANISMS)
        _check_choice("schedule", self.schedule, SCHEDULES)
        sms = self.num_comm_sms
        if sms is not None and not (_is_positive_int(sms) and sms <= MAX_BLOCKS):
            raise ValueError(f"num_comm_sms must be {_SMS} or None, got {sms!r}")
        if sms is not None:
            object.__setattr__(self, "num_comm_sms", int(sms))
        if self.tile is not None:
            tile = tuple(self.tile) if isinstance(self.tile, (tuple, list)) else ()
            if not tile or not all(map(_is_positive_int, tile)):
                raise ValueError(
                    f"tile must be a tuple of positive ints or None, got {self.tile!r}"
                )
            object.__setattr__(self, "tile", tuple(map(int, tile)))
        if self.reduce_dtype is not None:
            object.__setattr__(self, "reduce_dtype", _float_dtype(self.reduce_dtype))
        for name in ("deterministic", "multicast"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")

    def __repr__(self):
        # Only what is set: this is what stands in printed jaxprs.
        values = _set_fields(self)
        return f"Config({', '.join(f'{name}={value!r}' for name, value in values.items())})"


_SMS = f"an int from 1 to {MAX_BLOCKS}"
_DEFAULTS = Config()
_FIELDS = tuple(field.name for field in dataclasses.fields(Config))

# The knobs each op honours, and their values.
# `deterministic` is a bound on what an op may do, so every op honours it and it needs no row.
# What moves the parts of a sum follows from their rows: there is nothing to choose.
_KNOBS: dict[str, dict[str, Any]] = {
    op: {"mechanism": cost_model.MECHANISMS[op], "num_comm_sms": _SMS}
    for op in ("all_gather", "all_to_all", "ppermute")
}
_KNOBS |= {op: {"num_comm_sms": _SMS} for op in ("psum", "pmax", "pmin", "pmean", "psum_scatter")}
_KNOBS |= {op: {"tile": matmul_model.SHAPES} for op in ("matmul", "ragged_dot")}
_PRODUCT = {"num_comm_sms": _SMS, "tile": matmul_model.SHAPES}
_KNOBS |= {"all_gather_matmul": _PRODUCT | {"schedule": SCHEDULES}}
_KNOBS |= {
    op: _PRODUCT
    | {"schedule": ("sequential", "intra_sm"), "reduce_dtype": "a floating-point dtype"}
    | {"tile": (*matmul_model.SHAPES, few_rows_model.TILE)}  # the last is that of few rows
    for op in ("matmul_reduce_scatter", "matmul_all_reduce")
}
# How attention runs follows from its sizes; around it are the collectives that it is composed of.
_KNOBS |= {"attention": {}, "ring_attention": _KNOBS["ppermute"]}
_KNOBS |= {"ulysses_attention": _KNOBS["all_to_all"]}
_KNOBS["ragged_all_to_all"] = {"mechanism": ("register",), "num_comm_sms": _SMS}


@contextlib.contextmanager
def use_config(**fields: Any) -> Iterator[Config]:
    """Sets defaults for the ops called inside; nested uses add to the outer ones.

    A default that an op has no use for is ignored by it, unlike the same value given to the op as
    ``config=``. Works as a context manager and as a decorator, and inside or outside ``jax.jit``:
    a jitted function is traced again when it is called under other defaults.
    """
    if "validate" in fields:
        raise NotImplementedError(
            f"use_config(validate={fields['validate']!r}) is not available yet; compare with "
            "implementation='reference' instead"
        )
    unknown = sorted(set(fields) - set(_FIELDS))
    if unknown:
        raise TypeError(f"use_config got unknown fields {unknown}; the fields are {list(_FIELDS)}")
    config = dataclasses.replace(_compat.config_state.value or _DEFAULTS, **fields)
    with _compat.config_state(config):
        yield config


def resolve(op: str, config: Config | None, *, together: bool = False) -> Config:
    """The Config that `op` runs with: the call's, its gaps filled by use_config's defaults.

    The flags of a given config hold as they are, since False is not a gap. With `together`, values
    are also checked against one another.

    Raises:
        ValueError: the given config sets a knob that the op does not have, or to a value that it
            does not have.
    """
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"{op}: config must be a pk_jax.Config or None, got {config!r}")
    given = _set_fields(config or _DEFAULTS)
    for name, value in given.items():
        if name != "deterministic" and not _honours(op, name, value):
            raise ValueError(f"{op} cannot honour config.{name}={value!r}: {_knobs_of(op)}")
    defaults = _set_fields(_compat.config_state.value or _DEFAULTS)
    merged = (defaults | given).items()
    resolved = Config(**{name: value for name, value in merged if _honours(op, name, value)})
    if together:
        _check_together(op, resolved)
    return resolved


def part_of(config: Config, op: str) -> Config:
    """The values of a composed op's Config that an op which is a part of it has."""
    return Config(**{k: v for k, v in _set_fields(config).items() if _honours(op, k, v)})


def _check_together(op: str, config: Config) -> None:
    """Raises ValueError for values that an op has, but not with one another."""
    sms = config.num_comm_sms
    if config.mechanism == "copy_engine" and sms is not None and sms > MAX_DRAIN_BLOCKS:
        raise ValueError(
            f"{op} cannot honour config.num_comm_sms={sms} with mechanism='copy_engine': at most "
            f"{MAX_DRAIN_BLOCKS} SMs empty the landing buffer; give 1 to {MAX_DRAIN_BLOCKS}, or "
            "another mechanism"
        )


def check_implementation(op: str, implementation: str | None) -> None:
    """Raises ValueError unless `implementation` is one of the three words."""
    _check_choice(f"{op}: implementation", implementation, IMPLEMENTATIONS)


def _set_fields(config: Config) -> dict[str, Any]:
    values = {name: getattr(config, name) for name in _FIELDS}
    return {name: v for name, v in values.items() if v != getattr(_DEFAULTS, name)}


def _honours(op: str, name: str, value: Any) -> bool:
    choices = _KNOBS[op].get(name, ())
    return value in choices if isinstance(choices, tuple) else True


def _knobs_of(op: str) -> str:
    knobs = _KNOBS[op].items()
    if not knobs:
        return "it has no knobs yet"
    return "its knobs are " + ", ".join(f"{name} ({choices})" for name, choices in knobs)

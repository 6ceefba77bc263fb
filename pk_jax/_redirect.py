"""jax_collectives: jax.lax's collectives are pk's, for code that cannot be edited.

While any thread is inside the context, the names in jax.lax hold dispatchers. Which way one goes is
a JAX option: thread-local, so that other threads keep lax, and in the key of jit's caches, so that
no program traced inside is used outside, nor the other way round. pk's own rules and references
call jax.lax's functions where they are defined, and so never come back here.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from pk_jax import _compat, collectives


def _pshuffle(x: Any, axis_name: Any, perm: Sequence[int]) -> Any:
    if set(perm) != set(range(len(perm))):
        raise ValueError(f"pshuffle: perm={perm!r} is not a permutation of 0..{len(perm) - 1}")
    return collectives.ppermute(x, axis_name, list(zip(perm, range(len(perm)), strict=True)))


def _pswapaxes(x: Any, axis_name: Any, axis: int, *, axis_index_groups: Any = None) -> Any:
    return collectives.all_to_all(x, axis_name, axis, axis, axis_index_groups=axis_index_groups)


REDIRECTED: dict[str, Callable[..., Any]] = {
    "all_gather": collectives.all_gather,
    "all_to_all": collectives.all_to_all,
    "pmax": collectives.pmax,
    "pmean": collectives.pmean,
    "pmin": collectives.pmin,
    "ppermute": collectives.ppermute,
    "pshuffle": _pshuffle,
    "psum": collectives.psum,
    "psum_scatter": collectives.psum_scatter,
    "pswapaxes": _pswapaxes,
    "ragged_all_to_all": collectives.ragged_all_to_all,
}

# What only pk's functions take.
_OURS_ALONE = ("implementation", "config")


def _dispatcher(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """What goes to lax outside the context, and to pk inside if pk takes the arguments."""
    signature = inspect.signature(ours)
    taken = [p for name, p in signature.parameters.items() if name not in _OURS_ALONE]
    signature = signature.replace(parameters=taken)

    @functools.wraps(theirs)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        if not _compat.redirect_state.value:
            return theirs(*args, **kwargs)
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            # A newer lax's argument, or an error that is lax's to raise.
            return theirs(*args, **kwargs)
        return ours(*args, **kwargs)

    return dispatch


_lock = threading.Lock()
_users = 0
_installed: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}


def _enter() -> None:
    global _users
    with _lock:
        if _users == 0:
            # All that can fail comes first, so that jax.lax is changed as a whole or not at all.
            found = {name: getattr(jax.lax, name, None) for name in REDIRECTED}
            made = {
                name: (theirs, _dispatcher(REDIRECTED[name], theirs))
                for name, theirs in found.items()
                if theirs is not None  # a JAX without it
            }
            _installed.update(made)
            for name, (_, dispatcher) in made.items():
                setattr(jax.lax, name, dispatcher)
        _users += 1


def _exit() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            for name, (theirs, dispatcher) in _installed.items():
                # What someone put in its place meanwhile stays; it may well call the dispatcher,
                # which is lax's function from now on.
                if getattr(jax.lax, name, None) is dispatcher:
                    setattr(jax.lax, name, theirs)
            _installed.clear()


@contextlib.contextmanager
def jax_collectives() -> Iterator[None]:
    """A context in which ``jax.lax``'s collectives are pk's, for code that cannot be edited.

    They are all_gather, all_to_all, pmax, pmean, pmin, ppermute, pshuffle, psum, psum_scatter,
    pswapaxes and ragged_all_to_all. Works as a context manager and as a decorator::

        with pk.jax_collectives():
            loss = train_step(params, batch)      # jitted; calls jax.lax.psum somewhere

    Contexts nest, and the end of the outermost, also by an exception, restores ``jax.lax``. Only
    the thread that entered is concerned; threads it starts inside are not. A jitted function keeps
    apart what it traced inside and outside.

    Limits: what counts is where a function is traced, so a compiled or exported program stays what
    it is. Names bound before (``from jax.lax import psum``, a functools.partial) stay lax's; so do
    primitives (``lax.psum_p.bind``) and the collectives that XLA puts in of itself for sharded
    arrays. A call with an argument that pk does not have goes to lax. Otherwise pk checks the
    arguments, and its errors have other words than lax's.
    """
    _enter()
    try:
        with _compat.redirect_state(True):
            yield
    finally:
        _exit()

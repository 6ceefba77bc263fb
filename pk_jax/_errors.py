"""Puts the device's last words into the traceback.

A wait on the device that runs out of time leaves a record (op, rank, peer, slot, expected, seen) in
host memory and traps. XLA then raises JaxRuntimeError, whose text only says that a launch failed;
the hooks here add the record to it as a note, wherever the exception ends up uncaught. Programs
that catch it can ask `pk_jax.last_error()`. The next execution of a pk op fails with the record
itself.
"""

import sys
import threading
from collections.abc import Callable
from types import TracebackType

import jax


def explain(error: BaseException, last_error: Callable[[], str | None]) -> BaseException:
    """Adds the device's error record to an XLA runtime error as a note, once; returns the error."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        text = last_error()
        notes = getattr(error, "__notes__", ())
        if text is not None and text not in str(error) and text not in notes:
            error.add_note(text)
    return error


def install(last_error: Callable[[], str | None]) -> None:
    """Makes uncaught XLA runtime errors, of any thread, carry the device's error record.

    Args:
        last_error: text of the record, None if there is none.
    """
    outer, outer_thread = sys.excepthook, threading.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        outer(kind, explain(error, last_error), trace)

    def thread_hook(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            explain(args.exc_value, last_error)
        outer_thread(args)

    sys.excepthook, threading.excepthook = hook, thread_hook

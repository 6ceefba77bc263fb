"""The device's error record reaches the user: as a note on the exception that XLA raises."""

import subprocess
import sys
import textwrap
import types

import jax

import pk_jax as pk
from pk_jax import _errors, _registry

RECORD = "pk_jax: all_gather on rank 0 of 2 waited 2.0 s for rank 1"


def test_explain_adds_the_record_once():
    error = jax.errors.JaxRuntimeError("INTERNAL: unspecified launch failure")
    for _ in range(2):
        assert _errors.explain(error, lambda: RECORD) is error
    assert error.__notes__ == [RECORD]


def test_explain_leaves_other_errors_alone():
    for error, record in (
        (ValueError("x"), RECORD),
        (jax.errors.JaxRuntimeError("x"), None),
        (jax.errors.JaxRuntimeError(f"INTERNAL: {RECORD}"), RECORD),
    ):
        _errors.explain(error, lambda record=record: record)
        assert not getattr(error, "__notes__", [])


def test_last_error(monkeypatch):
    monkeypatch.setattr(_registry, "library", None)
    assert pk.last_error() is None
    monkeypatch.setattr(_registry, "library", types.SimpleNamespace(last_error=lambda: RECORD))
    assert pk.last_error() == RECORD


def test_uncaught_errors_carry_the_record():
    program = f"""
        import threading, jax
        from pk_jax import _errors
        _errors.install(lambda: {RECORD!r})
        def fail():
            raise jax.errors.JaxRuntimeError("INTERNAL: unspecified launch failure")
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        fail()
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 1
    assert run.stderr.count(RECORD) == 2

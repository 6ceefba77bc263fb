"""Starts a benchmark as one or several processes of this machine, joined in jax.distributed."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

HOST = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def run_processes(
    command: Sequence[str], processes: int, timeout_s: float, capture: bool = False
) -> str:
    """Runs `command` in `processes` processes that form a job; returns the first one's output.

    The output is shown instead, and nothing returned, without `capture`.

    Raises:
        RuntimeError: a process failed or the time ran out; the others are ended.
    """
    job = []
    if processes > 1:
        job = ["--job-address", f"{HOST}:{free_port()}", "--job-size", str(processes)]
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(tempfile.TemporaryFile("w+")) if capture else None
        children = []
        for rank in range(processes):
            child = subprocess.Popen(
                [*command, *job, "--job-rank", str(rank)], stdout=output if rank == 0 else None
            )
            stack.callback(_end, child)
            children.append(child)
        # All are watched: when one fails, the others wait for it in a collective.
        while any([child.poll() is None for child in children]):  # noqa: C419 (poll them all)
            _raise_if_failed(children)
            if time.monotonic() > deadline:
                raise RuntimeError(f"the job did not end within {timeout_s:.0f} s")
            time.sleep(0.1)
        _raise_if_failed(children)
        if output is None:
            return ""
        output.seek(0)
        return output.read()


def _raise_if_failed(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank, child in enumerate(children):
        if child.returncode:
            raise RuntimeError(
                f"process {rank} of {len(children)} ended with code {child.returncode}"
            )


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.kill()
        child.wait()


def join(address: str | None, size: int, rank: int, devices_per_process: int) -> None:
    """Joins the job, if there is one, with this process's share of the GPUs.

    To be called before a backend is started.
    """
    if address is None:
        return
    import jax

    first = rank * devices_per_process
    local = list(range(first, first + devices_per_process))
    on_cpu = os.environ.get("JAX_PLATFORMS", "") == "cpu"
    jax.distributed.initialize(
        address, size, rank, local_device_ids=None if on_cpu else local, initialization_timeout=60
    )


def this_command(*args: str) -> list[str]:
    """The command line that runs this benchmark's own program with other arguments."""
    return [sys.executable, str(pathlib.Path(__file__).with_name("run.py")), *args]

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


class JobError(RuntimeError):
    """A process of a job failed, or the time ran out; what the first one had printed."""

    def __init__(self, reason: str, output: str = ""):
        super().__init__(reason)
        self.output = output


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
        JobError: a process failed or the time ran out; the others are ended.
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
        reason = None
        while reason is None and any([child.poll() is None for child in children]):  # noqa: C419
            reason = _failure(children)
            if time.monotonic() > deadline:
                reason = f"the job did not end within {timeout_s:.0f} s"
            time.sleep(0.1)
        reason = reason or _failure(children)
        text = ""
        if output is not None:
            output.seek(0)
            text = output.read()
        if reason is not None:
            raise JobError(reason, text)
        return text


def _failure(children: Sequence[subprocess.Popen[bytes]]) -> str | None:
    for rank, child in enumerate(children):
        if child.returncode:
            return f"process {rank} of {len(children)} ended with code {child.returncode}"
    return None


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

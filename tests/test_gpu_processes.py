"""pk.all_gather with one process a GPU, under jax.distributed on the loopback address."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

pytestmark = pytest.mark.needs_gpus(2)

WORKER = Path(__file__).with_name("gpu_process.py")


def start(scenario, num_processes, timeout_s="60"):
    """Starts the processes of one job, with a small share of the card each."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = {
        **os.environ,
        "PK_JAX_TIMEOUT_S": timeout_s,
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1",
        "JAX_PLATFORMS": "cuda",
    }
    return [
        subprocess.Popen(
            [sys.executable, str(WORKER), scenario, str(port), str(rank), str(num_processes)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_processes)
    ]


def finish(job, seconds=240):
    """Waits for all processes of a job; their outputs."""
    try:
        return [process.communicate(timeout=seconds)[0] for process in job]
    finally:
        for process in job:
            if process.poll() is None:
                process.kill()


@pytest.mark.parametrize("scenario", ("values", "leaks", "late"))
def test_scenario(scenario):
    job = start(scenario, len(jax.devices("cuda")))
    outputs = finish(job)
    for process, output in zip(job, outputs, strict=True):
        assert process.returncode == 0 and "done" in output.splitlines(), output


def test_two_jobs_at_once():
    """No fixed name, no shared state: two jobs on the same GPUs at the same time."""
    count = len(jax.devices("cuda"))
    jobs = [start("values", count), start("values", count)]
    for job in jobs:
        for process, output in zip(job, finish(job), strict=True):
            assert process.returncode == 0, output


def test_killed_peer_ends_the_survivors():
    """The error names op, rank and peer, and comes within the limit of 2 s."""
    job = start("killed", len(jax.devices("cuda")), timeout_s="2")
    outputs = finish(job)
    for process, output in zip(job[:-1], outputs[:-1], strict=True):
        lines = dict(line.split(": ", 1) for line in output.splitlines() if ": " in line)
        assert process.returncode == 3, output
        assert "all_gather on rank" in lines["record"], output
        assert f"for rank {len(job) - 1}" in lines["record"], output
        assert float(lines["seconds"]) < 8

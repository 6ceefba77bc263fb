"""The ops with one process a GPU, under jax.distributed on the loopback address."""

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import pytest

pytestmark = pytest.mark.needs_gpus(2)

WORKER = Path(__file__).with_name("gpu_process.py")


def start(scenario, num_processes, timeout_s="60", **variables):
    """Starts the processes of one job, with a small share of the card each."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = {
        **{k: v for k, v in os.environ.items() if k != "CUDA_DEVICE_MAX_CONNECTIONS"},
        **variables,
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


@pytest.mark.parametrize("scenario", ("values", "collectives", "products", "leaks", "late"))
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


def test_streams_may_share_one_hardware_queue():
    """Nothing that a call enqueues stands in a queue before what it waits for."""
    job = start("values", len(jax.devices("cuda")), CUDA_DEVICE_MAX_CONNECTIONS="1")
    for process, output in zip(job, finish(job), strict=True):
        assert process.returncode == 0, output


def test_killed_peer_ends_the_survivors():
    """The error that Python shows names op, rank and peer, and comes within the limit of 2 s."""
    job = start("killed", len(jax.devices("cuda")), timeout_s="2")
    outputs = finish(job)
    for process, output in zip(job[:-1], outputs[:-1], strict=True):
        assert process.returncode == 3, output
        (seconds,) = [line for line in output.splitlines() if line.startswith("seconds: ")]
        assert float(seconds.removeprefix("seconds: ")) < 8
        shown = output[output.index("Traceback") :]
        assert "JaxRuntimeError" in shown and "all_gather on rank" in shown, output
        assert f"for rank {len(job) - 1}" in shown, output


@pytest.mark.parametrize(
    "variable, value, path",
    (
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "false", "cuda"),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "platform", "cuda"),
        ("XLA_PYTHON_CLIENT_ALLOCATOR", "cuda_async", "reference"),
    ),
)
def test_heap_kinds_in_one_process(variable, value, path):
    """Every heap gives right values; where peers cannot reach it, through the reference."""
    program = """
        import sys
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import PartitionSpec as P
        import pk_jax as pk
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
        def run(implementation):
            f = lambda x: pk.all_gather(x, "x", tiled=True, implementation=implementation)
            mapped = jax.shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
            y = np.asarray(jax.jit(mapped)(jnp.arange(mesh.size * 1000)))
            assert (y.reshape(mesh.size, -1) == np.arange(mesh.size * 1000)).all()
        run(None)
        try:
            run("cuda")
            print("path: cuda")
        except NotImplementedError as error:
            print("path: reference", error)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1", variable: value},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"path: {path}" in run.stdout
    assert path == "cuda" or value in run.stdout

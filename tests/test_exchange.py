"""Descriptors handed from process to process: what shares GPU memory, here with plain files.

Real processes, real sockets, no GPU. The exchange that a job's NCCL communicator gives is played by
pipes to the parent, which also injects the faults.
"""

import multiprocessing
import os
import socket
import subprocess
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest

LIBRARY = pytest.importorskip("pk_jax._ffi").__file__

RANKS = 3
WORKER = Path(__file__).with_name("exchange_process.py")


def run(bad_rank=None, on_round=lambda _, parts: parts):
    """Starts the ranks, plays the exchange, and returns what each rank reports."""
    pipes, processes = [], []
    for rank in range(RANKS):
        ours, theirs = multiprocessing.Pipe()
        fd = theirs.fileno()
        state = "bad" if rank == bad_rank else "good"
        command = [sys.executable, str(WORKER), LIBRARY, str(rank), str(RANKS), str(fd), state]
        env = {**os.environ, "PK_JAX_TIMEOUT_S": "5", "JAX_PLATFORMS": "cpu"}
        processes.append(subprocess.Popen(command, pass_fds=[fd], env=env))
        theirs.close()
        pipes.append(ours)
    reports, rounds = {}, 0
    deadline = time.monotonic() + 60
    try:
        while len(reports) < RANKS:
            parts = {}
            while len(parts) + len(reports) < RANKS:
                ready = wait(
                    [p for r, p in enumerate(pipes) if r not in parts and r not in reports],
                    timeout=deadline - time.monotonic(),
                )
                assert ready, "the ranks do not finish"
                for pipe in ready:
                    message = pipe.recv()
                    (parts if isinstance(message, bytes) else reports)[pipes.index(pipe)] = message
            if parts:
                assert len(parts) == RANKS, f"some ranks have left while others wait: {reports}"
                assert len(set(map(len, parts.values()))) == 1, "parts of different sizes"
                gathered = on_round(rounds, [parts[r] for r in range(RANKS)])
                rounds += 1
                for pipe in pipes:
                    pipe.send(gathered)
        return [reports[r] for r in range(RANKS)]
    finally:
        for process, pipe in zip(processes, pipes, strict=True):
            pipe.close()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()


def test_everybody_gets_everybodys():
    for rank, (state, texts, leaked) in enumerate(run()):
        assert state == "done"
        assert texts == [None if r == rank else f"rank {r}" for r in range(RANKS)]
        assert leaked == 0


def test_a_failure_of_one_rank_is_a_failure_of_all():
    """Rank 1 has nothing to hand over: nobody is left waiting, and rank 1 is named."""
    reports = run(bad_rank=1)
    assert [state for state, *_ in reports] == ["failed"] * RANKS
    for rank, (_, text, leaked) in enumerate(reports):
        assert leaked == 0
        assert ("descriptor" in text) if rank == 1 else ("rank 1" in text or "in time" in text)


def test_strangers_are_ignored():
    """Who does not know the secret is not heard, and does not keep the ranks waiting."""
    visitors = []

    def visit(number, parts):
        if number == 2:  # the rendezvous: name (two words) and secret (two words)
            for part in parts:
                words = [int.from_bytes(part[i : i + 8], "little") for i in range(0, 16, 8)]
                visitor = socket.socket(socket.AF_UNIX)
                visitor.connect(f"\0pk_jax-{words[0]:016x}{words[1]:016x}")
                visitor.send(b"x" * 24)
                visitors.append(visitor)
        return parts

    for state, texts, _ in run(on_round=visit):
        assert state == "done" and sum(text is not None for text in texts) == RANKS - 1
    assert len(visitors) == RANKS
    for visitor in visitors:
        visitor.close()


def test_names_are_gone_afterwards():
    run()
    assert "pk_jax-" not in Path("/proc/net/unix").read_text()

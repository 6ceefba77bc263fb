"""One rank of test_exchange.py: `exchange_process.py LIBRARY RANK NUM_RANKS PIPE_FD good|bad`.

Hands over a file that names this rank and reports what came from the others. A bad rank has nothing
to hand over.
"""

import importlib.util
import os
import sys
from multiprocessing.connection import Connection


def load(path):
    """The compiled module alone: JAX has no part in this, and takes longest to import."""
    spec = importlib.util.spec_from_file_location("_ffi", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def main(library, rank, num_ranks, pipe_fd, state):
    _ffi, pipe = load(library), Connection(int(pipe_fd))

    def all_gather(part):
        pipe.send(part)
        return pipe.recv()

    memory = os.memfd_create("part")
    os.write(memory, f"rank {rank}".encode())
    before = open_descriptors()
    handed = memory if state == "good" else -1
    try:
        received = _ffi.exchange_descriptors(all_gather, int(rank), int(num_ranks), handed)
    except RuntimeError as error:
        pipe.send(("failed", str(error), open_descriptors() - before))
        return
    texts = [os.pread(fd, 100, 0).decode() if fd >= 0 else None for fd in received]
    for fd in received:
        if fd >= 0:
            os.close(fd)
    pipe.send(("done", texts, open_descriptors() - before))


if __name__ == "__main__":
    main(*sys.argv[1:])

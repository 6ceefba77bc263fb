"""One process of a multi-process GPU test: `gpu_process.py SCENARIO PORT RANK NUM_PROCESSES`.

Prints lines "name: value" for the parent (test_gpu_processes.py) to check; exits 0 when its own
checks held. The parent sets PK_JAX_TIMEOUT_S.
"""

import contextlib
import functools
import os
import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

SCENARIO, PORT, RANK, SIZE = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
jax.distributed.initialize(f"127.0.0.1:{PORT}", SIZE, RANK, local_device_ids=[RANK])

import pk_jax as pk  # noqa: E402
from pk_jax import _ffi  # noqa: E402

MESH = Mesh(np.array(jax.devices()), ("x",))
MECHANISMS = (None, "register", "tma", "copy_engine")


def on_mesh(f, mesh=MESH, **jit):
    body = lambda x: jax.tree.map(lambda y: y[None], f(x[0]))  # noqa: E731
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x")), **jit)


def random(shape, seed=0):
    make = lambda key: jax.random.normal(key, (SIZE, *shape))  # noqa: E731
    return jax.jit(make, out_shardings=NamedSharding(MESH, P("x")))(jax.random.key(seed))


def gather(mechanism):
    config = pk.Config(mechanism=mechanism)
    return lambda x: pk.all_gather(x, "x", implementation="cuda", config=config)


def check_equal(name, ours, theirs, x):
    got = np.asarray(ours(x).addressable_data(0))
    want = np.asarray(theirs(x).addressable_data(0))
    np.testing.assert_array_equal(got, want, err_msg=name)


def values():
    theirs = on_mesh(lambda x: lax.all_gather(x, "x"))
    for shape in ((1,), (1000,), (33, 1025), (1 << 20,), (10 << 20,)):
        x = random(shape, seed=len(shape))
        for mechanism in MECHANISMS:
            if mechanism == "tma" and shape[-1] % 4:
                continue
            check_equal(f"{mechanism} {shape}", on_mesh(gather(mechanism)), theirs, x)
    print("communicators:", _ffi.communicators())

    def loop(op):
        def body(c, _):
            return c * 0.5 + op(c).sum(0) * 0.25, None

        return lambda x: lax.scan(body, x, None, length=500)[0]

    x = random((4096,))
    for mechanism in MECHANISMS:
        for options in (None, {"xla_gpu_enable_command_buffer": ""}):
            ours = on_mesh(loop(gather(mechanism)), compiler_options=options)
            theirs = on_mesh(loop(lambda y: lax.all_gather(y, "x")), compiler_options=options)
            check_equal(f"scan {mechanism} {options}", ours, theirs, x)


def open_descriptors():
    """What this process holds open that a leak of the exchange would add to."""
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(str(descriptor.readlink()))
    return sum("socket" in link or "nvidia" in link or "anon_inode" in link for link in links)


def leaks():
    """Building a communicator leaves no descriptor behind, and no socket name."""
    # Three groups, and so three communicators: the mesh, the mesh backwards, and groups of it.
    flipped = Mesh(np.array(jax.devices()[::-1]), ("x",))
    groups = [list(range(SIZE))[::-1]]
    variants = (
        lambda op: on_mesh(lambda x: op(x, "x")),
        lambda op: on_mesh(lambda x: op(x, "x"), flipped),
        lambda op: on_mesh(lambda x: op(x, "x", axis_index_groups=groups)),
    )
    x = random((1000,))
    flipped_x = jax.device_put(x, NamedSharding(flipped, P("x")))
    for variant, operand in zip(variants, (x, flipped_x, x), strict=True):
        jax.block_until_ready(variant(lax.all_gather)(operand))  # XLA's own NCCL first
    multihost_utils.sync_global_devices("before")
    before = open_descriptors()
    for variant, operand in zip(variants, (x, flipped_x, x), strict=True):
        for mechanism in MECHANISMS:
            config = pk.Config(mechanism=mechanism)
            op = functools.partial(pk.all_gather, implementation="cuda", config=config)
            jax.block_until_ready(variant(op)(operand))
    multihost_utils.sync_global_devices("after")
    print("descriptors:", before, open_descriptors(), len(_ffi.communicators()))
    assert len(_ffi.communicators()) == 3
    assert open_descriptors() <= before
    assert "pk_jax" not in Path("/proc/net/unix").read_text()


def killed():
    """The last rank dies between two steps; the others must end with an error within the limit."""
    f = on_mesh(gather(None))
    x = random((1000,))
    jax.block_until_ready(f(x))
    multihost_utils.sync_global_devices("alive")
    if RANK == SIZE - 1:
        os.kill(os.getpid(), 9)
    time.sleep(1)
    start = time.monotonic()
    try:
        jax.block_until_ready(f(x))
    except jax.errors.JaxRuntimeError as error:
        print(f"seconds: {time.monotonic() - start:.1f}", flush=True)
        sys.excepthook(type(error), error, error.__traceback__)  # what an uncaught one shows
        sys.stdout.flush()
        os._exit(3)
    print("no error")


def late():
    """A rank that comes late, but within the limit, costs time and nothing else."""
    f = on_mesh(gather(None))
    x = random((1000,))
    jax.block_until_ready(f(x))
    if RANK == 0:
        time.sleep(3)
    check_equal("late", f, on_mesh(lambda x: lax.all_gather(x, "x")), x)


if __name__ == "__main__":
    {"values": values, "leaks": leaks, "killed": killed, "late": late}[SCENARIO]()
    print("done", flush=True)

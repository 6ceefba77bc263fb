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

import op_chains  # noqa: E402
import product_programs as programs  # noqa: E402
import rank_models as models  # noqa: E402

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


WAYS = ({"ll"}, {"register", "simple"}, {"tma"}, {"two_shot"}, {"copy_engine"})


def everywhere(make):
    """make() by rank, of which each process keeps its own row."""
    whole = make()
    return jax.make_array_from_callback(
        whole.shape, NamedSharding(MESH, P("x")), lambda index: whole[index]
    )


def collectives():
    """All ops by all ways: values as lax's, sums in rank order, scans with and without graphs."""
    kernels = op_chains.ours("cuda")

    def integers(seed, columns):
        rng = np.random.default_rng(seed)
        return everywhere(lambda: models.bits(rng, (SIZE, 4 * SIZE, columns * SIZE), "int32"))

    theirs = on_mesh(lambda x: op_chains.chain(op_chains.theirs, x, 2))
    for columns in (1, 6, 4001, 200_000):
        for first in range(0, len(WAYS), 2):
            ours = on_mesh(lambda x: op_chains.chain(kernels, x, 2))
            with models.forced(*WAYS[first:], *WAYS[:first]):
                check_equal(f"{columns} {first}", ours, theirs, integers(first, columns))

    rng = np.random.default_rng(0)
    for dtype in ("float32", "bfloat16"):
        x = models.normal(rng, (SIZE, 3, 50_001), dtype)
        reduced = on_mesh(lambda x: [kernels("psum")(x, "x") for _ in range(3)])
        with models.forced({"ll"}, {"one_shot", "simple"}, {"two_shot"}):
            results = reduced(everywhere(lambda x=x: x))
        for result in results:
            models.same_bits(np.asarray(result.addressable_data(0))[0], models.total(x), dtype)

    steps = everywhere(lambda: np.tile(np.arange(300, dtype=np.int32), (SIZE, 1)))
    for options in (None, {"xla_gpu_enable_command_buffer": ""}):
        for rows, columns in ((1, 8), (16, 512)):
            counted = on_mesh(
                lambda s, size=(rows, columns): op_chains.count_errors(kernels, s, *size),
                compiler_options=options,
            )
            with models.forced(*WAYS):
                errors = np.asarray(counted(steps).addressable_data(0))
            np.testing.assert_array_equal(errors, np.zeros_like(errors), err_msg=f"{options}")
    print("communicators:", _ffi.communicators())


def products():
    """Products with a collective in one kernel, alone, in scans, and beside XLA's collectives."""
    devices = np.array(jax.devices())
    runs = [(name, None) for name in programs.PROGRAMS]
    runs += [(name, programs.NO_GRAPH) for name in programs.WITHOUT_GRAPHS]
    for shape in ((SIZE, 1), (1, SIZE)):
        for name, options in runs:
            mesh = Mesh(devices.reshape(shape), programs.AXES)
            programs.check(mesh, name, (136, 72, 40), options)
            print("checked:", shape, name, options, flush=True)


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
    scenarios = (values, collectives, products, leaks, killed, late)
    {scenario.__name__: scenario for scenario in scenarios}[SCENARIO]()
    print("done", flush=True)

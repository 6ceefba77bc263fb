"""One process of two, with four CPU devices: `hierarchical_process.py PORT RANK`.

The host boundary is the one between the processes, axis "host" of the mesh. Prints "equal: op" for
each op that gives here what jax.lax gives over both axes.
"""

import functools
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

PORT, RANK = sys.argv[1:]
jax.distributed.initialize(f"127.0.0.1:{PORT}", 2, int(RANK))

import pk_jax as pk  # noqa: E402
from pk_jax._primitives import hierarchical  # noqa: E402

MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("host", "gpu"))
AXES, INNER = ("gpu", "host"), ("gpu",)


def on_mesh(f, x):
    spec = P(("host", "gpu"))
    sharded = jax.make_array_from_callback(x.shape, NamedSharding(MESH, spec), lambda i: x[i])
    mapped = jax.shard_map(lambda p: f(p[0])[None], mesh=MESH, in_specs=spec, out_specs=spec)
    return [np.asarray(part.data) for part in jax.jit(mapped)(sharded).addressable_shards]


def check(name, ours, theirs, shape):
    x = np.random.default_rng(0).integers(0, 1000, (8, *shape)).astype(np.float32)
    got, want = on_mesh(ours, x), on_mesh(theirs, x)
    assert len(got) == 4  # this process's
    np.testing.assert_array_equal(got, want, err_msg=name)
    print(f"\nequal: {name}", flush=True)


def main():
    assert {device.process_index for device in MESH.devices[0]} == {0}
    inside = {"scatter_inside": pk.psum_scatter, "gather_inside": pk.all_gather}
    check(
        "all_gather",
        lambda x: hierarchical.all_gather(
            x, AXES, INNER, axis=1, tiled=True, gather_inside=pk.all_gather
        ),
        lambda x: lax.all_gather(x, AXES, axis=1, tiled=True),
        (3, 5),
    )
    check(
        "psum_scatter",
        lambda x: hierarchical.psum_scatter(
            x, AXES, INNER, scatter_dimension=1, tiled=True, scatter_inside=pk.psum_scatter
        ),
        lambda x: lax.psum_scatter(x, AXES, scatter_dimension=1, tiled=True),
        (3, 16),
    )
    for name, op, shape in (
        ("psum", "psum", (7,)),
        ("large", "psum", (1 << 18, 1)),
        ("pmax", "pmax", ((1 << 18) + 3,)),
    ):
        reduce = functools.partial(
            hierarchical.reduce, op, axis_name=AXES, inner=INNER, reduce_inside=getattr(pk, op)
        )
        check(
            name,
            functools.partial(reduce, **inside),
            functools.partial(getattr(lax, op), axis_name=AXES),
            shape,
        )


if __name__ == "__main__":
    main()
    jax.distributed.shutdown()

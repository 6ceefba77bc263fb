"""The channel of each call site: equal on all ranks, different where calls may be in flight."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import pk_jax as pk


def gathers(count, like=lambda x, i: x):
    def body(x):
        for i in range(count):
            x = pk.all_gather(like(x, i), "x", tiled=True)[: x.shape[0]]
        return x

    return body


@pytest.fixture
def channels(lowered, calls):
    """The channels of the call sites of a body."""

    def read(mesh, body, size=8):
        spec = P(mesh.axis_names)
        mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)
        return [call["channel"] for call in calls(lowered(mapped, jnp.zeros(size)))]

    return read


def test_each_call_site_has_its_channel(can_run, mesh_of, channels):
    # Equal equations, which JAX would otherwise lower to one function.
    mesh = mesh_of(x=4)
    assert channels(mesh, gathers(5)) == [0, 1, 2, 3, 4]
    assert channels(mesh, gathers(20)) == [*range(16), 0, 1, 2, 3]
    assert channels(mesh, gathers(2)) == [0, 1]  # a new module counts from 0


def sites_over(*sites):
    """One all_gather after another: its axes, and its index groups."""

    def body(x):
        for axis_name, groups in sites:
            x = pk.all_gather(x, axis_name, axis_index_groups=groups, tiled=True)[: x.shape[0]]
        return x

    return body


def test_axes_do_not_use_up_each_others_channels(can_run, mesh_of, channels):
    a, b, both = ("a", None), ("b", None), (("a", "b"), None)
    mesh = mesh_of(a=2, b=4)
    assert channels(mesh, sites_over(a, b, a, both, b, b)) == [0, 0, 1, 0, 1, 2]
    sites = [b, a] * 17
    assert channels(mesh, sites_over(*sites)) == [*(i // 2 for i in range(32)), 0, 0]


def test_sites_that_share_some_group_have_different_channels(can_run, mesh_of, channels):
    mesh = mesh_of(a=1, b=4)
    pairs, turned = ("b", [[0, 1], [2, 3]]), ("b", [[1, 0], [3, 2]])
    crossed = ("b", [[0, 2], [1, 3]])
    assert channels(mesh, sites_over(pairs, crossed, turned, crossed, pairs)) == [0, 0, 1, 1, 2]


def test_channels_inside_control_flow(can_run, mesh_of, channels):
    def body(x):
        x = gathers(1)(x)
        x = lax.scan(lambda c, _: (gathers(2)(c), None), x, None, length=3)[0]
        x = lax.cond(x[0] > 0, gathers(1), gathers(1), x)
        return jax.jit(gathers(1))(x)

    assert sorted(channels(mesh_of(x=4), body)) == [0, 1, 2, 3, 4, 5]


def test_channels_of_two_shard_maps(can_run, mesh_of, lowered, calls):
    mesh = mesh_of(x=4)
    half = jax.shard_map(gathers(2), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    text = lowered(lambda x: half(half(x) + 1.0), jnp.zeros(8))
    assert len({call["channel"] for call in calls(text)}) == len(calls(text))


def test_ops_share_the_channels_of_a_group(can_run, mesh_of, channels):
    def body(x):
        x = pk.ppermute(pk.psum(x, "x"), "x", [(0, 1)])
        x = pk.all_to_all(x, "x", 0, 0, tiled=True)
        return pk.psum_scatter(pk.all_gather(pk.pmax(x, "x"), "x", tiled=True), "x", tiled=True)

    assert channels(mesh_of(x=4), body, 64) == [0, 1, 2, 3, 4, 5]

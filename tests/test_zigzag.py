"""pk.zigzag and pk.unzigzag: the order, arrays on several devices, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pk_jax as pk


def test_zigzag():
    assert pk.zigzag(np.arange(12), 3, axis=0).tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
    x = np.arange(2 * 8 * 3).reshape(2, 8, 3)
    for ranks, axis in ((2, 1), (4, -2), (1, 0)):
        there = pk.zigzag(x, ranks, axis)
        assert (there.shape, there.dtype) == (x.shape, jnp.int32)
        np.testing.assert_array_equal(pk.unzigzag(there, ranks, axis), x)
    np.testing.assert_array_equal(pk.zigzag(x, 1), x)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_zigzag_of_what_lies_on_several_devices(kind):
    """Stays there, and where its type names the mesh axis that is how the result lies."""
    x = np.arange(2 * 8.0).reshape(2, 8).astype(np.float32)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
    cut = jax.device_put(x, NamedSharding(mesh, P(None, "x")))
    for reorder in (pk.zigzag, pk.unzigzag):
        y, pull = jax.vjp(lambda x, f=reorder: f(x, 4), cut)
        np.testing.assert_array_equal(y, reorder(x, 4))
        np.testing.assert_array_equal(pull(y)[0], x)
        assert len(y.sharding.device_set) == 4
        assert kind is AxisType.Auto or jax.typeof(y) == jax.typeof(cut)


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        (
            (np.arange(12), 4, 0),
            ValueError,
            "axis=0 of shape .12,. has size 12, .*by 8.*pad it to 16",
        ),
        ((np.arange(12), 0, 0), ValueError, "num_ranks must be 1 or more, got 0"),
        ((np.arange(12), "2", 0), TypeError, "num_ranks must be an int, got '2'"),
        ((np.arange(12), 2, 1), ValueError, "axis=1 is out of bounds for 1 dimensions"),
        (([1, 2], 1, 0), TypeError, r"x must be an array, got \[1, 2\]"),
    ],
)
def test_refusals_of_zigzag(arguments, error, text):
    for name in ("zigzag", "unzigzag"):
        with pytest.raises(error, match=f"^{name}: {text}"):
            getattr(pk, name)(*arguments)

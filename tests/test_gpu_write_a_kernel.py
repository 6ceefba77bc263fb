"""The kernel of docs/write_a_kernel.md on GPUs, against NumPy."""

import jax
import kernel_example
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from kernel_example import in_numpy
from rank_models import on, put

import pk_jax as pk

pytestmark = pytest.mark.needs_gpus(2)

SHAPES = ((5, 7), (1, 1), (333, 1001), (33, 4096), (2, 3, 2050), (5000, 24))


@pytest.fixture(scope="module")
def op():
    kernel_example.library()
    return kernel_example.module().rms_norm_gather


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices("cuda")), ("x",))


@pytest.mark.parametrize("dtype", (np.float32, ml_dtypes.bfloat16))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scanned_calls_are_numpy_s_and_the_same_twice(op, mesh, shape, dtype):
    rng = np.random.default_rng(0)
    xs = rng.standard_normal((mesh.size, 4, *shape)).astype(dtype)  # four calls a rank
    weight = rng.standard_normal(shape[-1]).astype(dtype)

    def calls(xs):
        return lax.map(lambda x: op(x, weight, "x", 1e-3, "cuda"), xs)

    run = on(mesh, calls)
    xs_on_gpus = put(mesh, xs)
    assert "@pk_jax_rms_norm_gather(" in run.lower(xs_on_gpus).as_text()
    first, second = (np.asarray(run(xs_on_gpus)) for _ in range(2))
    assert first.tobytes() == second.tobytes()
    assert all(part.tobytes() == first[0].tobytes() for part in first)
    gathered = np.concatenate(list(xs), axis=1)  # along the first dimension of each call's x
    eps = float(ml_dtypes.finfo(dtype).eps)
    want = in_numpy(gathered, weight, 1e-3)
    np.testing.assert_allclose(first[0].astype(np.float64), want, rtol=max(eps, 1e-5), atol=eps)


def test_beside_pk_s_own_ops(op, mesh):
    """Call sites of one group take turns on its channels; three programs share the first."""
    x = np.random.default_rng(1).standard_normal((mesh.size, 64, 96)).astype(np.float32)
    weight = np.ones(96, np.float32)

    def f(x):
        y = op(pk.all_gather(x, "x", tiled=True, implementation="cuda"), weight, "x", 1e-3, "cuda")
        return pk.psum(y, "x", implementation="cuda")

    run, alone = on(mesh, f), on(mesh, lambda x: op(x, weight, "x", 1e-3, "cuda"))
    everywhere = np.concatenate([np.concatenate(list(x))] * mesh.size)
    for _ in range(3):
        got = np.asarray(run(put(mesh, x)))[0]
        np.testing.assert_allclose(
            got, mesh.size * in_numpy(everywhere, weight, 1e-3), rtol=1e-5, atol=1e-5
        )
        own = np.asarray(alone(put(mesh, x)))[0]
        want = in_numpy(np.concatenate(list(x)), weight, 1e-3)
        np.testing.assert_allclose(own, want, rtol=1e-5, atol=1e-6)

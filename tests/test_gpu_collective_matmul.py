"""Products with a collective on GPUs, values and gradients against NumPy, bit for bit.

Operands are small integers, so that products are exact in fp32 in any order, and only what the ops
round is rounded. The test also runs on CPU devices, through the reference.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from product_models import check_equal, values
from product_programs import AXES, NO_GRAPH, PROGRAMS, WITHOUT_GRAPHS, check
from product_twins import COLUMNS, ROWS, P, mapped, rounded_sum

import pk_jax as pk

PLATFORMS = (pytest.param("cuda", marks=pytest.mark.needs_gpus(2)), "cpu")
SIZES = ((7, 13, 5), (64, 128, 72))  # m, k and p of a rank
TYPES = (("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", "float32"))
CASES_ON_CPU = ((SIZES[0], TYPES[2]),)


def ops(options):
    """Each op with where its operands and its result lie."""
    return {
        "gather": (functools.partial(pk.all_gather_matmul, **options), (ROWS, COLUMNS), COLUMNS),
        "scatter": (functools.partial(pk.matmul_reduce_scatter, **options), (COLUMNS, ROWS), ROWS),
        "reduce": (functools.partial(pk.matmul_all_reduce, **options), (COLUMNS, ROWS), P()),
    }


def want(name, n, dtype, to, x, w, ct):
    """The result and both gradients, rounded as they are to be."""
    x, w, ct = (np.asarray(each, "f4") for each in (x, w, ct))
    if name == "gather":  # the gradient of x is a sum of what crosses the link in its dtype
        y, dx = (x @ w).astype(jnp.dtype(to)), rounded_sum(ct, w.T, n, dtype, dtype)
    else:
        y, dx = rounded_sum(x, w, n, to, to), (ct @ w.T).astype(jnp.dtype(dtype))
    return y, (dx, (x.T @ ct).astype(jnp.dtype(dtype)))


@pytest.mark.needs_gpus(2)
def test_one_kernel_each_way():
    """A layer of several matrices and weights, with its gradients, against the reference.

    Not bit by bit: the fused sum leaves a rank's own partial in fp32, which the reference rounds.
    """
    devices = jax.devices("cuda")[:8]
    mesh, n = Mesh(np.array(devices), ("x",)), len(devices)
    rows, up, down = P(None, "x"), P(None, "x"), P("x")

    def layer(x, u, v, w, implementation=None):
        options = {"axis_name": "x", "implementation": implementation}
        h, g = pk.all_gather_matmul(x, (u, v), axis=1, **options)
        return pk.matmul_reduce_scatter(h - g, w, scatter_dimension=1, **options)

    shapes = ((2, n * 136, 72), (72, n * 136), (72, n * 136), (n * 136, 72))
    specs = (rows, up, up, down)
    args = [
        jax.device_put(values(shape, "bfloat16", seed=i), NamedSharding(mesh, spec))
        for i, (shape, spec) in enumerate(zip(shapes, specs, strict=True))
    ]

    def run(*args, implementation=None):
        f = mapped(functools.partial(layer, implementation=implementation), mesh, specs, rows)
        y, pull = jax.vjp(f, *args)
        return y, pull(args[0])

    with pk.use_config(schedule="intra_sm"):
        fused = jax.jit(run)
        text = fused.lower(*args).as_text()
        got = fused(*args)
    assert text.count("@pk_jax_all_gather_matmul(") == 2
    assert text.count("@pk_jax_matmul_reduce_scatter(") == 2
    expected = jax.jit(functools.partial(run, implementation="reference"))(*args)
    for one, right in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        assert (one.shape, one.dtype) == (right.shape, right.dtype)
        one, right = (np.asarray(each, np.float32) for each in (one, right))
        assert np.linalg.norm(one - right) < 2**-8 * np.linalg.norm(right)
        assert np.abs(one - right).max() < 2**-5 * np.abs(right).max()


@pytest.mark.parametrize("platform", PLATFORMS)
def test_values_and_gradients(platform):
    on_gpus = platform == "cuda"
    devices = jax.devices(platform)[: 8 if on_gpus else 4]
    mesh, n = Mesh(np.array(devices), ("x",)), len(devices)
    cases = []
    for (m, k, p), (dtype, to) in itertools.product(SIZES, TYPES) if on_gpus else CASES_ON_CPU:
        shapes = {"gather": ((n * m, k), (k, n * p)), "scatter": ((n * m, n * k), (n * k, p))}
        shapes["reduce"] = ((m, n * k), (n * k, p))
        options = {"axis_name": "x", "implementation": "cuda" if on_gpus else None}
        options["preferred_element_type"] = to
        for name, (op, in_specs, out_spec) in ops(options).items():
            (rows, _), (_, columns) = shapes[name]
            arrays = [values(shape, dtype, seed=i) for i, shape in enumerate(shapes[name])]
            arrays.append(values((rows, columns), to, seed=2))
            placed = [
                jax.device_put(array, NamedSharding(mesh, spec))
                for array, spec in zip(arrays, (*in_specs, out_spec), strict=True)
            ]
            cases.append((name, dtype, to, mapped(op, mesh, in_specs, out_spec), placed))

    @jax.jit
    def run(placed):
        results = []
        for (*_, f, _), (x, w, ct) in zip(cases, placed, strict=True):
            y, pull = jax.vjp(f, x, w)
            results.append((y, pull(ct)))
        return results

    placed = [arrays for *_, arrays in cases]
    first, second = run(placed), run(placed)
    for (name, dtype, to, _, arrays), got, again in zip(cases, first, second, strict=True):
        expected = want(name, n, dtype, to, *arrays)
        for one, two, right in zip(*map(jax.tree.leaves, (got, again, expected)), strict=True):
            check_equal(one, right, err_msg=f"{name} {dtype} {to}")
            check_equal(two, right, err_msg=f"{name} {dtype} {to}, again")


@pytest.mark.parametrize("name", ("gradients", "two_axes"))
def test_programs_on_cpu(name):
    check(Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), AXES), name, (3, 6, 5))


@pytest.mark.needs_gpus(2)
@pytest.mark.parametrize(
    "name, options",
    [(name, None) for name in PROGRAMS] + [(name, NO_GRAPH) for name in WITHOUT_GRAPHS],
)
def test_programs(name, options):
    """All GPUs along each of two axes, and along both where there are four."""
    devices = np.array(jax.devices("cuda"))
    count = min(8, len(devices) // 2 * 2)
    for shape in {(count, 1), (1, count), (count // 2, 2)}:
        check(Mesh(devices[:count].reshape(shape), AXES), name, (136, 72, 40), options)

"""What a case does with its op: a function of the op and its operands, run on every rank.

Differentiated functions square the result and weigh it by small integers that differ by rank, so a
transpose that mixes ranks up shows, and sums of small integers are exact in any order.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .cases import OPS, Case

Call = Callable[..., Any]


def plain(call: Call, case: Case, xs: Any, rank: Any) -> Any:
    return call(*xs)


def jit(call: Call, case: Case, xs: Any, rank: Any) -> Any:
    """An inner jitted function called twice: one trace, two calls in the program."""
    inner = jax.jit(call)
    flipped = [jnp.flip(x, 0) if x.ndim and i == 0 else x for i, x in enumerate(xs)]
    return inner(*xs), inner(*flipped)


def vmap(call: Call, case: Case, xs: Any, rank: Any, **name: Any) -> Any:
    options = case.options
    if options["in_axis"] is None:
        mapped = jax.vmap(
            lambda _, *xs: call(*xs),
            (0, *[None] * len(xs)),
            options["out_axis"],
            **name,
        )
        return mapped(jnp.zeros(options["size"]), *xs)
    # The indices of ragged_all_to_all differ from batch to batch, as rows.
    axes = tuple(options["in_axis"] if i < 2 else 0 for i in range(len(xs)))
    return jax.vmap(call, axes, options["out_axis"], **name)(*xs)


def vmap2(call: Call, case: Case, xs: Any, rank: Any) -> Any:
    outer, inner = case.options["in_axes"]
    return jax.vmap(jax.vmap(call, inner), outer)(*xs)


def vmap_named(call: Call, case: Case, xs: Any, rank: Any) -> Any:
    return vmap(call, case, xs, rank, axis_name="v", axis_size=case.options["size"])


def unrolled(call: Call, case: Case, xs: Any, rank: Any) -> Any:
    """What `vmap` gives, of a call for each element."""
    options = case.options
    axes = [options["in_axis"]] * len(xs)
    return _unrolled(call, axes, options["out_axis"], options["size"])(*xs)


def unrolled2(call: Call, case: Case, xs: Any, rank: Any) -> Any:
    (outer, inner), sizes = case.options["in_axes"], case.options["sizes"]
    inside = _unrolled(call, [inner] * len(xs), 0, sizes[1])
    return _unrolled(inside, [outer] * len(xs), 0, sizes[0])(*xs)


def _unrolled(call: Call, axes: Any, out_axis: int, size: int) -> Call:
    def run(*xs):
        results = [
            call(*(x if d is None else jnp.take(x, i, d) for x, d in zip(xs, axes, strict=True)))
            for i in range(size)
        ]
        return jax.tree.map(lambda *ys: jnp.stack(ys, out_axis), *results)

    return run


def unrolled_grad(call: Call, case: Case, xs: Any, rank: Any) -> Any:
    return grad(lambda *xs: unrolled(call, case, xs, rank), case, xs, rank)


def scan(call: Call, case: Case, xs: Any, rank: Any) -> Any:
    return lax.scan(lambda carry, xs: (carry + 1, call(*xs)), 0, tuple(xs))[1]


def jvp(call: Call, case: Case, xs: Any, rank: Any) -> Any:
    floats, rest = xs[: num_floats(case)], xs[num_floats(case) :]
    return jax.jvp(lambda *floats: call(*floats, *rest), floats, [-x for x in floats])


def grad(call: Call, case: Case, xs: Any, rank: Any) -> Any:
    count = num_floats(case)
    return jax.grad(lambda *xs: loss(call(*xs), rank), tuple(range(count)), holomorphic=False)(*xs)


def grad2(call: Call, case: Case, xs: Any, rank: Any) -> Any:
    """The Hessian times a vector, by reverse over reverse mode."""

    def inner(*xs):
        return sum(_dot(g, _weights(g, rank + 1)) for g in grad(call, case, xs, rank))

    return jax.grad(inner, tuple(range(num_floats(case))))(*xs)


def remat(call: Call, case: Case, xs: Any, rank: Any) -> Any:
    policy = case.options["policy"]
    policy = policy and getattr(jax.checkpoint_policies, policy)
    return grad(jax.checkpoint(call, policy=policy), case, xs, rank)


def vmap_grad(call: Call, case: Case, xs: Any, rank: Any) -> Any:
    return grad(lambda *xs: vmap(call, case, xs, rank), case, xs, rank)


def vmap_named_grad(call: Call, case: Case, xs: Any, rank: Any) -> Any:
    return grad(lambda *xs: vmap_named(call, case, xs, rank), case, xs, rank)


def num_floats(case: Case) -> int:
    """How many of the operands have derivatives: all, or those before the indices."""
    return len(case.shapes)


def loss(ys: Any, rank: Any) -> Any:
    """A real number that depends on every element."""
    return sum(_dot(y * y, _weights(y, rank)) for y in jax.tree.leaves(ys))


def _dot(y: Any, weights: Any) -> Any:
    return jnp.real(jnp.sum(y * weights)).astype(jnp.float32)


def _weights(y: Any, rank: Any) -> Any:
    ramp = lax.iota(jnp.int32, y.size).reshape(y.shape) * 7 + jnp.asarray(rank, jnp.int32)
    return (ramp % 3 - 1).astype(y.dtype)


# What takes the place of a map for a library that cannot map an op.
UNROLLED = {"vmap": "unrolled", "vmap2": "unrolled2", "vmap_grad": "unrolled_grad"}

_FORWARD = ("plain", "jit", "vmap", "vmap2", "scan")
_NAMED = ("vmap_named", "vmap_named_grad")
DIFFERENTIATES = (
    *("grad", "grad2", "remat", "jvp", "vmap_grad"),
    *("outer_grad", "vmap_named_grad"),
)
# The result holds elements of the operands and nothing else, if that is so for the op.
KEEPS_BITS = (*_FORWARD, "vmap_named")

TRANSFORMS = dict.fromkeys(OPS, (*_FORWARD, *_NAMED, *DIFFERENTIATES[:-1]))
TRANSFORMS |= dict.fromkeys(("pmax", "pmin"), (*_FORWARD, "vmap_named", "grad", "plain"))
TRANSFORMS["ragged_all_to_all"] = ("plain", "jit", "vmap", "scan", "grad", "remat", "vmap_named")


def transform_of(case: Case) -> Callable[..., Any]:
    """The function that a case names; outer_grad differentiates around shard_map instead."""
    functions = (plain, jit, vmap, vmap2, vmap_named, scan, jvp, grad, grad2, remat)
    functions += (unrolled, unrolled2, unrolled_grad)
    named = {f.__name__: f for f in (*functions, vmap_grad, vmap_named_grad)}
    return functools.partial(named.get(case.transform, plain))


def added_dimensions(case: Case, index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of operand `index` with the dimensions over which the transform maps."""
    options, shape = case.options, list(shape)
    is_index = case.op == "ragged_all_to_all" and index >= 2
    if case.transform.startswith("vmap2"):
        outer, inner = options["in_axes"]
        shape.insert(inner, options["sizes"][1])
        shape.insert(outer, options["sizes"][0])
    elif case.transform.startswith("vmap") and options["in_axis"] is not None:
        shape.insert(0 if is_index else options["in_axis"], options["size"])
    elif case.transform == "scan":
        shape.insert(0, options["length"])
    return tuple(shape)

"""The primitives pk_ring_attention, pk_ring_attention_tangent and pk_ring_attention_backward.

A family as in `attention.py`, of operands that are each rank's part. They are composed of
pk_ppermute and pk_attention, on the paths of their own: keys and values go round the ring (Liu et
al., arXiv:2310.01889), and a rank meets in turn those of the rank before it, of the one before
that, and so on, in n - 1 hops:

    hop   rank 0   rank 1   rank 2   rank 3        keys of which rank, 4 ranks
     0      k0       k1       k2       k3
     1      k3       k0       k1       k2          causal: rank 0 has nothing to do in hop 1
     2      k2       k3       k0       k1
     3      k1       k2       k3       k0

The results of the hops are merged by their log-sum-exps. The derivatives know the whole log-sum-exp
already, so their parts are simply added: tangents stay where the query is, and cotangents of keys
and values go on with these, in fp32, and home at last.

Which hops are of use to which ranks is known while tracing. A hop that serves no rank is left out,
rows then moving several ranks at once; in one that serves some the others skip the arithmetic, by a
lax.cond with no collective inside. Not where a kernel does the arithmetic: that passes over what is
masked by itself, and on a GPU the host waits for the predicate of a cond. The ranks are few, so
hops are written out and not a loop: each is what it must be, and XLA may send the next keys while
it computes.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive

from pk_jax import _compat, _selection, config
from pk_jax._primitives import attention, checks, exchanges
from pk_jax._reference import attention as reference
from pk_jax._reference.attention import Places, Spec
from pk_jax.config import Config

OP = "ring_attention"


def useful(
    spec: Spec, layout: str, rows: int, keys: int, num_ranks: int
) -> dict[int, tuple[bool, ...]]:
    """The hops to take, and which ranks may see a key in each; own keys are always looked at.

    Args:
        spec: the window.
        layout: how rows lie on ranks.
        rows: of a rank's query.
        keys: a rank's.
        num_ranks: of the ring.
    """
    found = {0: (True,) * num_ranks}
    starts = functools.partial(reference.starts, layout, num_ranks=num_ranks)
    for hop in range(1, num_ranks):
        found[hop] = tuple(
            reference.sees(
                spec,
                (starts(rank, rows), rows),
                (starts((rank - hop) % num_ranks, keys), keys),
            )
            for rank in range(num_ranks)
        )
    return {hop: ranks for hop, ranks in found.items() if any(ranks)}


class _Ring:
    """What the three have in common: the way round, and a hop's own attention."""

    def __init__(self, query: Any, key: Any, given: tuple[str, ...], arrays: Any, params: Any):
        self.axes, self.spec, self.layout = (
            params[name] for name in ("axis_name", "spec", "layout")
        )
        self.size = checks.bound_size(self.axes)
        self.rows, self.keys = query.shape[1], key.shape[1]
        self.batch = query.shape[0]
        self.places = attention.places_of(given, arrays)
        self.implementation, self.config = params["implementation"], params["config"]
        self.skips = params.get("skips", True)
        self.rank = lax.axis_index(self.axes)

    def moved(self, x: Any, by: int) -> Any:
        """Each array of x, from so many ranks before this one."""
        perm = tuple((rank, (rank + by) % self.size) for rank in range(self.size))
        send = functools.partial(
            exchanges.ppermute,
            axis_name=self.axes,
            perm=perm,
            implementation=self.implementation,
            config=config.part_of(self.config, "ppermute"),
        )
        return jax.tree.map(send, x)

    def starts(self, rank: Any, length: int) -> Any:
        """Of all rows of a batch, [B, 2]; None where no mask asks for positions."""
        if not self.spec.by_position:
            return None
        pair = jnp.stack(reference.starts(self.layout, rank, length, self.size))
        return jnp.broadcast_to(pair.astype(np.int32), (self.batch, 2))

    def parts(self, primitive: Primitive, *operands: Any, places: Places) -> Any:
        """A hop's attention, or a derivative, in fp32."""
        given, arrays = attention.present(places)
        exact = reference.accumulator(operands[0].dtype)
        return attention.bind(
            primitive,
            *operands,
            *arrays,
            spec=self.spec,
            dtype=exact,
            given=given,
            implementation=self.implementation,
            config=config.part_of(self.config, attention.OP),
        )

    def around(self, step: Callable[..., Any], blocks: Sequence[Any]) -> Any:
        """Takes blocks of keys round the ring, and returns what the steps make of them.

        Args:
            step: (what stays, what travels, blocks, places) -> what stays, what travels; at the
                first hop both are None. What travels goes with its block, and home after the last.
            blocks: what each rank has of the keys, the segments excepted.
        """
        hops = useful(self.spec, self.layout, self.rows, self.keys, self.size)
        carried = (*blocks, self.places.key_segments)
        stays = travels = None
        query_starts = self.starts(self.rank, self.rows)
        for previous, hop in itertools.pairwise((0, *hops)):
            if hop:
                carried, travels = self.moved((carried, travels), hop - previous)
            source = (self.rank - hop) % self.size
            places = self.places._replace(
                query_starts=query_starts,
                key_starts=self.starts(source, self.keys),
                key_segments=carried[-1],
            )
            run = functools.partial(step, blocks=carried[:-1], places=places)
            if all(hops[hop]) or not self.skips:
                stays, travels = run(stays, travels)
            else:
                sees = jnp.asarray(hops[hop])[self.rank]
                stays, travels = lax.cond(sees, run, lambda *same: same, stays, travels)
        last = max(hops)
        return stays, self.moved(travels, -last) if last else travels


def _forward(
    query: Any, key: Any, value: Any, *arrays: Any, given: Any, dtype: Any, **params: Any
) -> Any:
    ring = _Ring(query, key, given, arrays, params)

    def step(so_far: Any, _: Any, blocks: Any, places: Places) -> Any:
        part = tuple(ring.parts(attention.FAMILY.forward, query, *blocks, places=places))
        return part if so_far is None else reference.merge(*so_far, *part), None

    (out, lse), _ = ring.around(step, (key, value))
    return out.astype(dtype), lse


def _tangent(
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    to_query: Any,
    to_key: Any,
    to_value: Any,
    *arrays: Any,
    given: Any,
    dtype: Any,
    **params: Any,
) -> Any:
    ring = _Ring(query, key, given, arrays, params)

    def step(so_far: Any, _: Any, blocks: Any, places: Places) -> Any:
        key, value, to_key, to_value = blocks
        operands = (query, key, value, out, lse, to_query, to_key, to_value)
        part = ring.parts(attention.FAMILY.tangent, *operands, places=places)
        return _added(so_far, part), None

    (to_out, to_lse), _ = ring.around(step, (key, value, to_key, to_value))
    return to_out.astype(dtype), to_lse


def _backward(
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    of_out: Any,
    of_lse: Any,
    *arrays: Any,
    given: Any,
    dtype: Any,
    **params: Any,
) -> Any:
    ring = _Ring(query, key, given, arrays, params)

    def step(of_query: Any, of_block: Any, blocks: Any, places: Places) -> Any:
        operands = (query, *blocks, out, lse, of_out, of_lse)
        part, *parts = ring.parts(attention.FAMILY.backward, *operands, places=places)
        return _added(of_query, part), _added(of_block, parts)

    of_query, of_block = ring.around(step, (key, value))
    return [x.astype(dtype) for x in (of_query, *of_block)]


def _added(so_far: Any, part: Any) -> Any:
    return part if so_far is None else jax.tree.map(jnp.add, so_far, part)


def bind(primitive: Primitive, *operands: Any, **params: Any) -> Any:
    return primitive.bind(*_compat.vary_alike(params["axis_name"], *operands), **params)


FAMILY = attention.make(OP, _forward, _tangent, _backward)


def _choose(number: int, ctx: Any, params: dict[str, Any]) -> tuple[Any, _selection.Decision]:
    """The composition; ranks skip no hop whose attention is a kernel."""
    exact = reference.accumulator(ctx.avals_in[0].dtype)
    part = attention.decide(number, ctx, params | {"dtype": exact})
    rule = functools.partial(FAMILY.rules[number], skips=part.path != "cuda")
    return rule, _selection.Decision("unfused", _selection.NO_RING)


attention.define(FAMILY, bind, _choose, "unfused")


def ring_attention(
    query: Any,
    key: Any,
    value: Any,
    places: Places,
    axis_name: tuple[Any, ...],
    *,
    spec: Spec,
    layout: str,
    implementation: str | None,
    config: Config,
) -> Any:
    """Binds pk_ring_attention: the result in the query's dtype, and its log-sum-exp.

    The arguments are checked.
    """
    given, arrays = attention.present(places)
    params = {"spec": spec, "dtype": np.dtype(query.dtype), "given": given, "config": config}
    params |= {"axis_name": axis_name, "layout": layout, "implementation": implementation}
    return bind(FAMILY.forward, query, key, value, *arrays, **params)

"""Config and use_config: what is accepted, what wins, and that jit sees it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pk_jax as pk
from pk_jax import config as config_module

BAD_FIELDS = [
    ({"mechanism": "nvlink"}, r"mechanism must be None or one of \('copy_engine', 'tma', 'regi"),
    ({"mechanism": 3}, "mechanism must be None or one of .* got 3"),
    ({"schedule": "eager"}, r"schedule must be None or one of \('sequential', 'intra_sm', 'inter"),
    ({"num_comm_sms": 0}, "num_comm_sms must be an int from 1 to 512 or None, got 0"),
    ({"num_comm_sms": 513}, "num_comm_sms must be an int from 1 to 512 or None, got 513"),
    ({"num_comm_sms": "8"}, "num_comm_sms must be an int from 1 to 512 or None, got '8'"),
    ({"num_comm_sms": True}, "num_comm_sms must be an int from 1 to 512 or None, got True"),
    ({"tile": 128}, "tile must be a tuple of positive ints or None, got 128"),
    ({"tile": ()}, "tile must be a tuple of positive ints"),
    ({"tile": (128, -1)}, "tile must be a tuple of positive ints"),
    ({"reduce_dtype": "int32"}, "reduce_dtype must be a floating-point dtype or None, got 'int32'"),
    ({"reduce_dtype": "float33"}, "reduce_dtype must be a floating-point dtype"),
    ({"deterministic": None}, "deterministic must be True or False, got None"),
    ({"multicast": 1}, "multicast must be True or False, got 1"),
]


@pytest.mark.parametrize("fields, text", BAD_FIELDS, ids=[str(row[0]) for row in BAD_FIELDS])
def test_bad_fields(fields, text):
    with pytest.raises(ValueError, match=text):
        pk.Config(**fields)
    with pytest.raises(ValueError, match=text), pk.use_config(**fields):
        pass


def test_config_is_a_frozen_hashable_value():
    config = pk.Config(mechanism="tma", tile=[128, 64], reduce_dtype=jnp.bfloat16)
    assert config == pk.Config(mechanism="tma", tile=(128, 64), reduce_dtype="bfloat16")
    assert hash(config) == hash(dataclasses.replace(config))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.mechanism = None  # pyright: ignore[reportAttributeAccessIssue]
    assert repr(pk.Config(mechanism="tma")) == "Config(mechanism='tma')"


def resolve(**fields):
    return config_module.resolve("all_gather", pk.Config(**fields) if fields else None)


def test_defaults_nest_and_end():
    with pk.use_config(mechanism="tma") as outer:
        assert outer == pk.Config(mechanism="tma")
        with pk.use_config(num_comm_sms=4):
            assert resolve() == pk.Config(mechanism="tma", num_comm_sms=4)
            with pk.use_config(mechanism=None):
                assert resolve() == pk.Config(num_comm_sms=4)
        assert resolve() == pk.Config(mechanism="tma")
    assert resolve() == pk.Config()


def test_defaults_end_after_an_error():
    with pytest.raises(KeyError), pk.use_config(mechanism="tma"):
        raise KeyError
    assert resolve() == pk.Config()


def test_use_config_decorates():
    @pk.use_config(mechanism="tma")
    def f():
        return resolve()

    assert f() == pk.Config(mechanism="tma") and resolve() == pk.Config()


def test_the_call_wins_and_its_gaps_are_filled():
    with pk.use_config(mechanism="tma", num_comm_sms=4):
        assert resolve(mechanism="register") == pk.Config(mechanism="register", num_comm_sms=4)
    with pk.use_config(mechanism="copy_engine"):
        assert resolve(num_comm_sms=512) == pk.Config(mechanism="copy_engine", num_comm_sms=512)


def test_unknown_fields():
    text = r"unknown fields \['speed'\]; the fields are \['mechanism'"
    with pytest.raises(TypeError, match=text), pk.use_config(speed=1):
        pass


@pytest.mark.parametrize("value", [True, False])
def test_validation_is_not_there_yet(value):
    text = rf"use_config\(validate={value}\) is not available yet; .*implementation='reference'"
    with pytest.raises(NotImplementedError, match=text), pk.use_config(validate=value):
        pass


NOT_FOR_ALL_GATHER = [
    {"schedule": "sequential"},
    {"tile": (128, 64)},
    {"reduce_dtype": "float32"},
    {"multicast": True},
]


@pytest.mark.parametrize("fields", NOT_FOR_ALL_GATHER, ids=str)
def test_a_knob_the_op_does_not_have(fields):
    (name,) = fields
    with pytest.raises(ValueError) as error:
        resolve(**fields)
    assert f"all_gather cannot honour config.{name}=" in str(error.value)
    assert "its knobs are mechanism (('copy_engine', 'tma', 'register'))" in str(error.value)
    with pk.use_config(**fields):
        assert resolve() == pk.Config()  # a default is only for ops that have the knob


def test_copy_engine_with_sms():
    both = {"mechanism": "copy_engine", "num_comm_sms": 4}
    assert resolve(**both) == pk.Config(**both)


def test_a_default_that_an_op_has_no_use_for():
    with pk.use_config(mechanism="tma"):
        assert config_module.resolve("psum", None) == pk.Config()
    assert config_module.resolve("psum", pk.Config(deterministic=False)) == pk.Config()


MECHANISMS_OF = {
    "all_gather": {"copy_engine", "tma", "register"},
    "all_to_all": {"tma", "register"},
    "ppermute": {"tma", "register"},
    "psum": set(),
    "pmax": set(),
    "pmin": set(),
    "pmean": set(),
    "psum_scatter": set(),
}


@pytest.mark.parametrize("mechanism", config_module.MECHANISMS)
@pytest.mark.parametrize("op", MECHANISMS_OF)
def test_mechanisms_of_each_op(op, mechanism):
    config = pk.Config(mechanism=mechanism, num_comm_sms=7)
    if mechanism in MECHANISMS_OF[op]:
        assert config_module.resolve(op, config) == config
        return
    with pytest.raises(ValueError) as error:
        config_module.resolve(op, config)
    assert f"{op} cannot honour config.mechanism={mechanism!r}: its knobs are" in str(error.value)
    assert all(repr(other) in str(error.value) for other in MECHANISMS_OF[op])
    assert "num_comm_sms (an int from 1" in str(error.value)
    with pk.use_config(mechanism=mechanism):
        # A default that the op has no use for is none for it.
        assert config_module.resolve(op, None) == pk.Config()


@pytest.mark.parametrize("config", ["tma", {"mechanism": "tma"}, 3])
@pytest.mark.parametrize("op", ["all_gather", "psum", "psum_scatter"])
def test_config_of_a_wrong_type(op, config):
    with pytest.raises(TypeError, match=f"{op}: config must be a pk_jax.Config or None, got "):
        getattr(pk, op)(jnp.zeros(2), "x", config=config)


def test_jit_sees_the_defaults(mesh_of):
    traces = []

    @jax.jit
    @jax.shard_map(mesh=mesh_of(x=2), in_specs=P("x"), out_specs=P("x"))
    def f(x):
        traces.append(config_module.resolve("all_gather", None).mechanism)
        return pk.all_gather(x, "x")

    def mechanism():
        return (
            jax.make_jaxpr(f)(jnp.zeros(8)).pretty_print().split("config=Config(")[1].split(")")[0]
        )

    x = jnp.zeros(8)
    for _ in range(2):
        f(x)
        with pk.use_config(mechanism="tma"):
            f(x)
            assert mechanism() == "mechanism='tma'"
            with pk.use_config(mechanism="register"):
                f(x)
    assert traces == [None, "tma", "register"]
    assert mechanism() == ""
    assert f._cache_size() == 3


def test_the_config_given_is_in_the_jit_key(mesh_of):
    def body(x, config):
        return pk.all_gather(x, "x", config=config)

    @jax.jit(static_argnums=1)
    def f(x, config):
        return jax.shard_map(
            lambda x: body(x, config), mesh=mesh_of(x=2), in_specs=P("x"), out_specs=P("x")
        )(x)

    f(jnp.zeros(8), pk.Config(mechanism="tma"))
    f(jnp.zeros(8), pk.Config(mechanism="tma"))
    assert f._cache_size() == 1
    f(jnp.zeros(8), pk.Config(mechanism="register"))
    assert f._cache_size() == 2


def test_defaults_reach_second_transposes(mesh_of):
    mesh = mesh_of(x=2)
    scatter = jax.shard_map(
        lambda x: pk.psum_scatter(x, "x", tiled=True), mesh=mesh, in_specs=P(), out_specs=P("x")
    )
    gradient = jax.grad(lambda x: jnp.sum(scatter(x) ** 2))
    with pk.use_config(mechanism="register", num_comm_sms=5):
        text = jax.make_jaxpr(gradient)(jnp.zeros(8)).pretty_print()
    assert text.count("pk_all_gather") == 1
    assert "config=Config(mechanism='register', num_comm_sms=5)" in text


def test_reduce_dtype_float64_counts_as_set():
    """NumPy holds dtype("float64") to be equal to None; a Config must not."""
    config = pk.Config(reduce_dtype=jnp.float64)
    assert config != pk.Config() and "float64" in repr(config)
    with pytest.raises(ValueError, match=r"cannot honour config\.reduce_dtype"):
        config_module.resolve("all_gather", config)


def test_numpy_scalars_are_ints():
    assert pk.Config(num_comm_sms=np.int64(16), tile=(np.int32(8),)) == pk.Config(
        num_comm_sms=16, tile=(8,)
    )

"""What products with a collective become for CUDA, without a GPU: the calls in the module's text.

What it would catch: parts that do not inherit the knobs, call sites that share a channel, a
backward pass off the kernels, a reason that is not given.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from product_twins import OPS, RANKS, TWINS, mapped

import pk_jax as pk
from pk_jax import _selection
from pk_jax._tuning import few_rows_model, matmul_reduce_model

FUNCTIONS = {
    "gather": pk.all_gather_matmul,
    "scatter": pk.matmul_reduce_scatter,
    "reduce": pk.matmul_all_reduce,
}


@pytest.fixture
def calls_of(mesh_of, lowered, calls):
    """The custom calls of an op, on a rank's [16, 32] and [32, 48], or of its gradients.

    Its parts one after the other, unless another config is given.
    """

    def lower(
        name,
        dtype="bfloat16",
        gradients=False,
        axis="x",
        mesh=None,
        text=False,
        sizes=((16, 32), (32, 48)),
        config=SEQUENTIAL,
        **kwargs,
    ):
        mesh = mesh or mesh_of(x=RANKS)
        kwargs["config"] = config
        op = functools.partial(FUNCTIONS[name], axis_name=axis, **kwargs)
        spec = P(mesh.axis_names)
        f = mapped(lambda x, w: op(x[0], w[0])[None], mesh, (spec, spec), spec)
        if gradients:
            # The ops of a derivative are not asked for the schedule of what it is of.
            f = jax.grad(lambda *xs, f=f: jnp.sum(f(*xs).astype("float32") ** 2), (0, 1))
            f = pk.use_config(schedule="sequential")(f)
        shapes = [(mesh.size, *size) for size in sizes]
        module = lowered(f, *(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))
        return module if text else calls(module)

    return lower


def ops_of(found):
    return [call["op"] for call in found]


SEQUENTIAL = pk.Config(schedule="sequential")
LARGE = ((2048, 4096), (4096, 4096))
MOVES = {"gather": "all_gather", "scatter": "psum_scatter", "reduce": "psum"}


@pytest.mark.parametrize("name", OPS)
def test_parts(name, can_run, calls_of):
    """The collective by its kernel, and the product too where the kernels are asked for."""
    assert ops_of(calls_of(name)) == [MOVES[name]]
    both = ["all_gather", "matmul"] if name == "gather" else ["matmul", MOVES[name]]
    assert ops_of(calls_of(name, implementation="cuda")) == both
    tiled = pk.Config(tile=(128, 128), schedule="sequential")
    assert ops_of(calls_of(name, config=tiled)) == both
    assert calls_of(name, implementation="reference") == []


@pytest.mark.parametrize("name", OPS)
def test_one_kernel(name, can_run, calls_of):
    """Of large operands, whatever the implementation, and of any where a schedule asks for it."""
    op = FUNCTIONS[name].__name__
    for implementation in (None, "cuda"):
        (call,) = calls_of(name, sizes=LARGE, config=None, implementation=implementation)
        assert call["op"] == op and call["group_size"] == RANKS
        assert (call["m"], call["k"], call["p"]) == (2048, 4096, 4096)
    few = "" if name == "gather" else "_few_rows"
    assert ops_of(calls_of(name, config=pk.Config(schedule="intra_sm"))) == [op + few]
    (call,) = calls_of(name, sizes=LARGE, config=None, gradients=True)[:1]
    assert call["op"] == MOVES[name]


@pytest.mark.parametrize("name, outer", [("gather", 3), ("scatter", 3), ("reduce", 1)])
def test_several_matrices(name, outer, can_run, calls_of):
    """Rows of each are gathered or scattered where they lie; for a reduction all are one matrix."""
    sizes, config = ((3, 512, 32), (32, 48)), pk.Config(schedule="intra_sm")
    (call,) = calls_of(name, sizes=sizes, config=config)
    assert call["outer"] == outer
    assert call["m"] == (512 if name == "gather" else 3 * 512)


@pytest.mark.parametrize("name", ("scatter", "reduce"))
def test_few_rows(name, can_run, calls_of):
    """By the model, or by the tile; one rank's share of the rows of several matrices is copied."""
    op = FUNCTIONS[name].__name__
    decode = ((32, 3584), (3584, 8192))
    for config, few in (
        (None, True),
        (pk.Config(schedule="intra_sm"), True),
        (pk.Config(tile=(128, 64)), True),
        (pk.Config(schedule="intra_sm", tile=(128, 256)), False),
    ):
        (call,) = calls_of(name, sizes=decode, config=config)
        assert call["op"] == op + few * "_few_rows"
        assert (call["m"], call["k"], call["p"]) == (32, 3584, 8192)
    sizes, config = ((3, 8, 32), (32, 48)), pk.Config(tile=(128, 64))
    text = calls_of(name, sizes=sizes, config=config, text=True)
    assert "few_rows" in text and ("stablehlo.transpose" in text) == (name == "scatter")


@pytest.mark.parametrize("name", OPS)
def test_many_ranks(name, can_run, calls_of):
    """Nine are one kernel's; where there are too many for a sum the parts run, or it is said."""
    op, fused = FUNCTIONS[name].__name__, pk.Config(schedule="intra_sm")

    def of_ranks(ranks, config=fused, rows=256, **kwargs):
        mesh = AbstractMesh((ranks,), ("x",), axis_types=(AxisType.Auto,))
        sizes = (rows * ranks, 64), (64, 64)
        return calls_of(name, sizes=sizes, config=config, mesh=mesh, **kwargs)

    (call,) = of_ranks(9)
    assert (call["op"], call["group_size"]) == (op, 9)
    many, few = matmul_reduce_model.MOST_RANKS + 1, few_rows_model.MOST_RANKS + 1
    if name == "gather":
        assert ops_of(of_ranks(many)) == [op]
        return
    tile = pk.Config(tile=few_rows_model.TILE)
    assert ops_of(of_ranks(9, tile, rows=1)) == [f"{op}_few_rows"]
    for ranks, config in ((many, fused), (few, tile)):
        assert ops_of(of_ranks(ranks, config, rows=1)) == [MOVES[name]]
        words = f"{op} .* {ranks} ranks; the kernel .*at most {ranks - 1}"
        with pytest.raises(NotImplementedError, match=words):
            of_ranks(ranks, config, rows=1, implementation="cuda")


@pytest.mark.parametrize("name", ("scatter", "reduce"))
def test_the_tile_of_few_rows_with_many(name, can_run, calls_of):
    """As a default it gives way; of the call itself it is an error, or said once."""
    many, tile = ((512, 32), (32, 48)), (128, 64)
    op = FUNCTIONS[name].__name__
    with pk.use_config(tile=tile):
        assert ops_of(calls_of(name, sizes=LARGE, config=None)) == [op]
    for config in (pk.Config(tile=tile), pk.Config(schedule="intra_sm", tile=tile)):
        with pytest.raises(
            NotImplementedError, match="512 rows; the kernel for few rows takes at most"
        ):
            calls_of(name, sizes=many, config=config, implementation="cuda")
    assert ops_of(calls_of(name, sizes=many, config=pk.Config(tile=tile))) == [MOVES[name]]
    with pytest.raises(ValueError, match=r"tile=\(128, 64\) with schedule='sequential'"):
        calls_of(name, sizes=many, config=pk.Config(schedule="sequential", tile=tile))


def test_a_default_of_many_sms_is_that_of_the_parts(can_run, calls_of):
    with pk.use_config(num_comm_sms=200):
        assert ops_of(calls_of("gather", sizes=LARGE, config=None)) == ["all_gather"]


def test_blocks_that_communicate(can_run, calls_of):
    def blocks(**fields):
        (call,) = calls_of("gather", sizes=LARGE, config=pk.Config(**fields))
        return call["num_comm_blocks"]

    assert blocks(schedule="intra_sm") == 0
    assert blocks(schedule="inter_sm") > 0
    assert blocks(schedule="inter_sm", num_comm_sms=5) == 5


X, W = P("x"), P(None, "x")


def grad_of(op, which, **kwargs):
    """A gradient, and the result itself."""

    def f(*xs):
        y = op(*xs, **kwargs)
        return jnp.sum(y.astype("float32")), y

    return jax.grad(f, which, has_aux=True)


# Who reads the gathered x: whether it is known, what is computed of an op, how it lies.
READERS = {
    "nobody": (False, lambda op: op, W),
    "the caller": (True, lambda op: functools.partial(op, return_gathered=True), (W, W)),
    "the gradient of w": (True, lambda op: grad_of(op, 1), (W, W)),
    "not that of x": (False, lambda op: grad_of(op, 0), (X, W)),
    "nor who gathers again": (False, lambda op: grad_of(op, 1, save_gathered=False), (W, W)),
    "nor who drops it": (False, lambda op: lambda *xs: op(*xs, return_gathered=True)[0], W),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("width, hidden", [(64, False), (4096, True)])
def test_own_rows_are_copied_beside_a_long_product(
    reader, width, hidden, can_run, mesh_of, lowered
):
    """Where somebody reads them. Else XLA copies them, or finds that it need not."""
    read, use, lies = READERS[reader]
    config = pk.Config(schedule="inter_sm")
    op = functools.partial(pk.all_gather_matmul, axis_name="x", config=config)
    shapes = ((4096, 4096), (4096, 2 * width))
    text = lowered(
        mapped(use(op), mesh_of(x=2), (X, W), lies),
        *(jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes),
    )
    copied = read and hidden
    assert f"own_rows = {str(copied).lower()}" in text
    assert ("dynamic_update_slice" in text) != copied


@pytest.mark.parametrize("which, read", [((0, 1), [True]), (0, [False]), (1, [])])
def test_own_rows_of_a_sums_cotangent(which, read, can_run, mesh_of, lowered):
    """What the gradient of x gathers is read by that of w."""
    op = functools.partial(pk.matmul_reduce_scatter, axis_name="x")
    sizes = [jax.ShapeDtypeStruct((8192, 8192), "bfloat16")] * 2
    f = jax.grad(lambda *xs: jnp.sum(mapped(op, mesh_of(x=2), (W, X), X)(*xs)), which)
    with pk.use_config(schedule="inter_sm"):
        text = lowered(f, *sizes)
    assert re.findall(r"own_rows = (\w+)", text) == [str(each).lower() for each in read]


def test_own_rows_that_remat_makes_again(can_run, mesh_of, lowered):
    """The forward pass keeps no gathered x, so nobody reads it there."""
    op = functools.partial(pk.all_gather_matmul, axis_name="x")
    sizes = [
        jax.ShapeDtypeStruct((4096, 4096), "bfloat16"),
        jax.ShapeDtypeStruct((4096, 8192), "bfloat16"),
    ]
    inner = jax.checkpoint(lambda *xs: jnp.sin(mapped(op, mesh_of(x=2), (X, W), W)(*xs)))
    with pk.use_config(schedule="inter_sm"):
        text = lowered(jax.value_and_grad(lambda *xs: jnp.sum(inner(*xs)), 1), *sizes)
    assert sorted(re.findall(r"own_rows = (\w+)", text)) == ["false", "true"]


def test_further_weights_follow(can_run, mesh_of, lowered, calls):
    """The widest one hides the gathering; the others find it done."""
    f = mapped(
        lambda x, u, v: pk.all_gather_matmul(x, (u, v), "x", config=pk.Config(schedule="intra_sm")),
        mesh_of(x=RANKS),
        (P("x"), P(), P()),
        P("x"),
    )
    shapes = ((RANKS * 64, 128), (128, 64), (128, 96))
    found = calls(lowered(f, *(jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes)))
    assert [(call["op"], call.get("p", call.get("n"))) for call in found] == [
        ("all_gather_matmul", 96),
        ("matmul", 64),
    ]


@pytest.mark.parametrize(
    "name, config, reason",
    [
        ("gather", {"num_comm_sms": 4}, "no SM communicates alone"),
        ("gather", {"tile": (64, 64)}, "tiles"),
        ("gather", {"schedule": "inter_sm", "num_comm_sms": 132}, "none of 132 SMs"),
        ("scatter", {"tile": (128, 128)}, "tiles of"),
        ("reduce", {"num_comm_sms": 4}, "every SM sends"),
        ("scatter", {"reduce_dtype": "float32"}, "one for all"),
    ],
)
def test_why_not_one_kernel(name, config, reason, can_run, calls_of):
    """A schedule that cannot be is an error with "cuda", and else what the parts do."""
    config = pk.Config(**{"schedule": "intra_sm"} | config)
    with pytest.raises(NotImplementedError, match=reason):
        calls_of(name, config=config, implementation="cuda")
    assert MOVES[name] in ops_of(calls_of(name, config=config))


def test_a_default_schedule_gives_way(can_run, calls_of):
    """Also where the kernels were asked for: those of the parts are kernels too."""
    for schedule in ("intra_sm", "sequential"):
        with pk.use_config(schedule=schedule):
            found = calls_of("scatter", config=pk.Config(num_comm_sms=4), implementation="cuda")
        assert ops_of(found) == ["matmul", "psum_scatter"]


def test_a_schedule_for_operands_of_two_dtypes(mesh_of, caplog):
    """They are multiplied apart from the collective, which is said where a schedule was asked."""
    _selection._logged.clear()
    config = pk.Config(schedule="intra_sm")

    def run(implementation):
        op = functools.partial(
            pk.all_gather_matmul, axis_name="x", implementation=implementation, config=config
        )
        f = mapped(op, mesh_of(x=RANKS), (P("x"), P()), P("x"))
        shapes = (((RANKS, 8), "bfloat16"), ((8, 8), "float32"))
        with jax.numpy_dtype_promotion("standard"), caplog.at_level("INFO", logger="pk_jax"):
            return jax.eval_shape(f, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))

    run("reference")
    assert not caplog.text
    assert run(None).dtype == "float32"
    assert "takes its parts one after the other: the operands have dtypes" in caplog.text
    with pytest.raises(NotImplementedError, match="dtypes bfloat16 and float32; convert"):
        run("cuda")


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("ranks, rows", [(1, 16), (RANKS, 0)])
def test_nothing_moves(name, ranks, rows, can_run, mesh_of, calls_of):
    """One rank, or no rows: a schedule has nothing to share, which is no error."""
    found = calls_of(
        name,
        mesh=mesh_of(x=ranks),
        sizes=((rows, 32), (32, 48)),
        config=pk.Config(schedule="intra_sm"),
        implementation="cuda",
    )
    assert ops_of(found) == ["matmul"] * (rows > 0)


@pytest.mark.parametrize("name", OPS)
def test_knobs_of_the_parts(name, can_run, calls_of):
    config = pk.Config(num_comm_sms=3, tile=(64, 128), schedule="sequential")
    found = {call["op"]: call for call in calls_of(name, config=config)}
    assert found["matmul"]["tile"] == "64x128"
    assert found[MOVES[name]]["num_blocks"] == 3


@pytest.mark.parametrize("wire, result", [(None, "48xbf16"), ("float32", "48xf32")])
def test_the_dtype_on_the_link(wire, result, can_run, calls_of):
    config = pk.Config(reduce_dtype=wire, schedule="sequential")
    (call,) = calls_of("scatter", config=config)
    assert call["op"] == "psum_scatter" and call["results"][0].endswith(result)
    (call,) = calls_of("reduce", preferred_element_type=wire)
    assert call["op"] == "psum" and call["results"][0].endswith(result)


def test_a_narrow_dtype_on_the_link_is_exchanged(can_run, calls_of):
    config = pk.Config(reduce_dtype="bfloat16", schedule="sequential")
    assert ops_of(calls_of("scatter", "float32", config=config)) == ["all_to_all"]
    assert ops_of(calls_of("reduce", "float32", config=config)) == ["all_to_all", "all_gather"]


def test_gradients(can_run, calls_of):
    """One collective each way, on channels of their own; a reduced sum's cotangent needs none."""
    for name, moves in (
        ("gather", ["all_gather", "psum_scatter"]),
        ("scatter", ["psum_scatter", "all_gather"]),
        ("reduce", ["psum"]),
    ):
        found = calls_of(name, gradients=True)
        assert ops_of(found) == moves
        assert [call["channel"] for call in found] == list(range(len(moves)))


def test_where_the_kernels_cannot_run(calls_of, caplog):
    """Each part says why; asking for "cuda" raises the reason."""
    _selection._logged.clear()
    with caplog.at_level("INFO", logger="pk_jax"):
        text = calls_of("scatter", text=True)
    assert "stablehlo.reduce_scatter" in text and "pk_jax" not in text.split("module @")[0]
    assert "psum_scatter takes the reference" in caplog.text
    with pytest.raises(NotImplementedError, match="the CUDA devices are not known here"):
        calls_of("reduce", implementation="cuda")


def test_dtypes_without_a_kernel(can_run, calls_of):
    assert ops_of(calls_of("gather", "float32")) == ["all_gather"]
    with pytest.raises(NotImplementedError, match="float32 has no CUDA matmul"):
        calls_of("gather", "float32", implementation="cuda")


@pytest.mark.parametrize("name", OPS)
def test_other_platforms(name, mesh_of):
    twin = TWINS[name]
    op = functools.partial(FUNCTIONS[name], axis_name="x", implementation="cuda")
    f = jax.jit(mapped(op, mesh_of(x=RANKS), twin.in_specs, twin.out_specs))
    with pytest.raises(
        NotImplementedError, match=f"{FUNCTIONS[name].__name__} is lowered for plat"
    ):
        f.lower(*map(jnp.ones, twin.shapes))


@pytest.mark.parametrize("name", OPS)
def test_axes_that_cross_hosts(name, mesh_of, monkeypatch, calls_of):
    """The product is local, and its collective hierarchical: kernels inside, jax.lax across."""

    def decide(op, dtype, groups, devices, auto_axes):
        same_host = all(len({rank // 2 for rank in group}) == 1 for group in groups)
        return _selection.Decision("cuda" if same_host else "reference", "crosses hosts")

    monkeypatch.setattr(_selection, "decide", decide)
    found = ops_of(calls_of(name, axis=("a", "b"), mesh=mesh_of(a=2, b=2)))
    assert found == [MOVES[name]]


def test_names_are_taken():
    assert {op.__name__ for op in FUNCTIONS.values()} < _selection.TAKEN

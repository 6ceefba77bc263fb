"""The examples run as users run them; their own arithmetic of comparing is right."""

import dataclasses
import importlib.util
import io
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import pk_jax as pk

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture
def example(monkeypatch):
    """Imports a module of the examples' folder."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


def test_train_lm_trains_compares_and_draws(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # the few steps take less than compiling
    command = [sys.executable, "-W", "error", EXAMPLES / "train_lm.py", "--cpu", "--mesh", "2x2"]
    command += ["--steps", "33", "--batch", "4", "--seq", "32", "--out", "charts/curve.png"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line[:1].strip()}
    assert lines["agreement"].endswith("(within rounding)")
    assert "bits per byte" in lines["held-out"]
    assert "2 data x 2 model" in lines["mesh"]
    assert "(median of 3 pairs of 10 steps" in lines["speed"]
    assert (tmp_path / "charts/curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("comm, others", [(pk, ("pk_psum",)), (jax.lax, ("reduce_scatter",))])
def test_all_collectives_of_a_step_are_the_module_s(example, comm, others):
    train_lm = example("train_lm")
    setup = dataclasses.replace(train_lm.ON_CPU, layers=1, batch=4, seq=32)
    mesh = jax.make_mesh(
        (2, 2), train_lm.BOTH, axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")[:4]
    )
    specs = ((train_lm.SPECS,) * 3 + (P(),), train_lm.ROWS, train_lm.ROWS)
    step = train_lm.on_mesh(mesh, partial(train_lm.train_step, comm, setup), specs, (specs[0], P()))
    params = train_lm.init(np.random.default_rng(0), setup)
    tokens = np.zeros((4, 32), np.int32)
    state = (params, params, params, np.zeros((), np.float32))
    with jax.numpy_dtype_promotion("standard"):  # as the example runs
        text = str(jax.make_jaxpr(step)(state, tokens, tokens))
    found = set(re.findall(r"(?<== )(?:pk_)?(?:all_gather|reduce_scatter|psum\w*)(?=\[)", text))
    assert found >= set(others)
    assert {name.startswith("pk_") for name in found} == {comm is pk}


def test_speed_is_of_pairs(example):
    speed = example("train_lm").speed
    theirs = np.full(9, 0.2)
    ours = theirs / 1.25
    ours[4] = 7.0  # noise
    runs = {"a": SimpleNamespace(seconds=list(ours)), "b": SimpleNamespace(seconds=list(theirs))}
    assert "a 6.2 steps/s, b 5.0; end to end 1.250x" in speed(runs)
    assert "too few" in speed({k: SimpleNamespace(seconds=[1.0]) for k in runs})


def test_losses_that_differ_are_told_apart(example):
    compare = example("train_lm").compare
    losses = np.linspace(7, 3, 50)
    assert compare(losses, losses, "float32")[0]
    late, early, missing = losses.copy(), losses.copy(), losses.copy()
    late[40] += 1e-3  # rounding, amplified by 40 steps
    early[1] += 1e-3  # too much for a first step
    missing[40] = np.nan
    assert compare(losses, late, "float32")[0]
    for other in (early, missing):
        same, sentence = compare(losses, other, "float32")
        assert not same
        assert sentence.endswith("(BEYOND rounding)")


def test_a_mesh_that_does_not_divide_the_model_is_refused(example):
    train_lm = example("train_lm")
    device = SimpleNamespace(platform="cpu")
    mesh = SimpleNamespace(
        shape={"data": 3, "model": 1}, devices=np.array([[device]] * 3, dtype=object)
    )
    args = train_lm.parse_arguments("", ["--batch", "16"])
    with pytest.raises(SystemExit, match=r"--batch, 16, is not divisible by 3"):
        train_lm.make_setup(args, mesh)


def test_byte_frequencies(example):
    text = np.frombuffer(b"abcd" * 10_000, np.uint8)
    assert example("_text").byte_frequency_bits(text, text[:100]) == pytest.approx(2, abs=0.02)


def test_held_out_files_are_not_trained_on(example):
    text, unseen = example("_text").load_text()
    assert 20 * unseen.size > text.size / 2
    assert text.size > 1e6
    assert unseen[:2000].tobytes() not in text.tobytes()


@pytest.mark.parametrize("terminal", [False, True])
def test_progress(example, terminal):
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    progress = example("_report").Progress("run", 40, stream)
    for step in range(1, 41):
        progress.show(step, 2.5)
    progress.finish("done")
    assert stream.getvalue().count("\n") == (1 if terminal else 11)
    assert stream.getvalue().endswith("run        done\n")


@pytest.fixture
def block(example):
    """A layer of tensor_parallel.py on four devices, of pk_jax and of jax.lax."""
    module = example("tensor_parallel")
    setup = module.Setup(
        batch=1, seq=8, width=8, heads=2, kv_heads=1, head_width=4, hidden=6, dtype="float32"
    )
    setup = dataclasses.replace(setup, layers=1)
    devices = jax.devices("cpu")[:4]
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Auto,), devices=devices)
    both = [module.programs(ops, setup, mesh) for ops in (module.InPk, module.InLax)]
    return SimpleNamespace(module=module, setup=setup, mesh=mesh, both=both)


def test_tensor_parallel_runs_and_agrees(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    command = [sys.executable, "-W", "error", EXAMPLES / "tensor_parallel.py", "--cpu"]
    done = subprocess.run(
        [*command, "--devices", "4", "--seq", "8", "--layers", "1", "--attention", "xla"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("mesh       4 x cpu\n")
    sentence = done.stdout.splitlines()[-1]
    assert sentence.startswith("agreement ") and sentence.count("(within rounding)") == 2
    losses = re.search(r"losses (\S+) and (\S+)$", sentence).groups()
    assert float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-5)


def test_passes_that_differ_are_told_apart(example):
    compare = example("tensor_parallel").compare

    def programs(loss, gradient):
        gradients = {"norms": np.full(2, gradient, np.float32), "layers": [np.ones(2, np.float32)]}
        return {"forward + backward": lambda: (np.float32(loss), gradients)}

    right = programs(2, 1)
    for other, same in (((2, 1 + 1e-6), True), ((2.1, 1), False), ((2, np.nan), False)):
        found, sentence = compare(programs(*other), right, (), "float32")
        assert found == same and ("BEYOND" in sentence) != same


def test_tensor_parallel_is_made_of_fused_products(block):
    operands = jax.eval_shape(partial(block.module.make_operands, block.setup, block.mesh))
    text = str(jax.make_jaxpr(block.both[0]["forward + backward"])(*operands))
    # Attention and the hidden units, each of them gathered and summed, forward and backward.
    assert text.count(" pk_all_gather_matmul[") == text.count(" pk_matmul_reduce_scatter[") == 4
    others = r"= ((?:pk_)?(?:all_gather|reduce_scatter|psum|psum_\w+))\["
    assert set(re.findall(others, text)) == {"pk_psum"}  # the loss and the gradients of the norms


def test_tensor_parallel_speed(block, monkeypatch):
    medians = {"pk_jax": 500e-6, "jax.lax": 600e-6}
    monkeypatch.setattr(block.module, "time_in_turn", lambda calls: {n: medians[n] for n in calls})
    setup = block.module.MODELS["70b-slice"]
    head, *lines = block.module.speed(*block.both, (), setup)
    assert head.split() == ["jax.lax", "pk_jax", "speed-up", "TFLOP/s", "a", "device"]
    for line in lines:
        assert "0.60 ms   0.50 ms    1.200x" in line
    # Llama 70B on eight GPUs: the products of two layers, 8192 tokens each, and their attention.
    flops = 2 * (2 * 8192 * 8192 * (1280 + 1024 + 3 * 3584) + 4 * 2048**2 * 1024 * 2)
    assert setup.flops == flops and lines[0].split()[-1] == f"{flops / 500e6:.0f}"


def test_programs_are_timed_in_turn(example, monkeypatch):
    """Medians by a clock that calls alone move, after three calls that do not count."""
    module, now, made = example("tensor_parallel"), [0.0], []
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def call(name, seconds):
        made.append(name)
        now[0] += 100 if len(made) in (1, 9) else seconds  # one compiles, and one is disturbed
        return np.zeros(1)

    calls = {"a": partial(call, "a", 1 / 32), "b": partial(call, "b", 1 / 16)}
    assert module.time_in_turn(calls, samples=3) == {"a": 1 / 32, "b": 1 / 16}
    assert "".join(made) == 3 * "ab" + 3 * "aabb"


def test_tensor_parallel_arguments(example):
    module = example("tensor_parallel")

    def setup(*argv, on_cpu=False, devices=2):
        return module.make_setup(module.parse_arguments(argv), on_cpu, devices)

    assert setup() == dataclasses.replace(module.MODELS["70b-slice"], attention="cudnn")
    assert setup("--dtype", "float32", "--kv-heads", "2").attention is None
    assert setup(on_cpu=True) == module.MODELS["small"]
    with pytest.raises(SystemExit, match="--seq 64 is not divisible by 3 devices"):
        setup(on_cpu=True, devices=3)
    with pytest.raises(SystemExit, match="--dtype int8 is none of float32"):
        setup("--dtype", "int8")


@pytest.mark.parametrize("library, package", [("nnx", "flax"), ("equinox", "equinox")])
def test_tensor_parallel_in_a_library_of_modules(library, package, tmp_path):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}: pip install {package}")
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    command = [sys.executable, "-W", "error", EXAMPLES / f"tensor_parallel_{library}.py", "--cpu"]
    done = subprocess.run(
        [*command, "--steps", "3"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in done.stdout.splitlines()}
    assert lines["mesh"] == "8 x cpu" and lines["agreement"] == "within rounding"
    losses = [re.findall(r"\d\.\d{5}", lines[name]) for name in ("pk_jax", "jax.lax")]
    assert losses[0] == losses[1] and losses[0][1] < losses[0][0]


def test_losses_of_modules_that_differ_are_told_apart(example):
    agree = example("_train_both").agree
    losses = np.linspace(2, 1, 3)
    assert agree(losses, losses * (1 + 1e-5), 1e-4)
    for ours, theirs in (
        (losses, losses * 1.001),
        (losses[::-1], losses[::-1]),
        (losses, [2, 1.5, np.nan]),
    ):
        assert not agree(ours, theirs, 1e-4)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_long_context_runs_and_agrees(layout, example, capsys, monkeypatch):
    """On the devices that the tests have; by its own words."""
    module = example("long_context")
    monkeypatch.setattr(jax.config, "update", lambda *_: None)  # devices are there already
    arguments = ["--cpu", "--devices", "4", "--seq", "64", "--steps", "3", "--layout", layout]
    assert module.main(arguments) == 0
    said = capsys.readouterr().out
    assert "4 cpu, 16 of 64 rows on each" in said and "(within rounding)" in said


def test_long_context_sees_wrong_positions(example, capsys, monkeypatch):
    """Rows in the order of zigzag with an attention that takes them for contiguous."""
    module = example("long_context")
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    ring = pk.ring_attention
    monkeypatch.setattr(pk, "ring_attention", lambda *xs, layout, **how: ring(*xs, **how))
    assert module.main(["--cpu", "--devices", "4", "--seq", "64", "--steps", "3"]) == 1
    assert "BEYOND" in capsys.readouterr().out

"""Test set-up: eight virtual CPU devices, strict dtypes, and the marker of tests that need GPUs.

Warnings are errors (pyproject.toml). Tests without the marker `needs_gpus` run on CPU devices even
where there are GPUs; with PK_JAX_REQUIRE_GPUS=n a test that needs up to n GPUs and does not find
them fails instead of being skipped.
"""

import os
import re
import tempfile

REQUIRED_GPUS = int(os.environ.get("PK_JAX_REQUIRE_GPUS", "0"))

# Before jax is imported: it reads both when it makes a backend.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
if not REQUIRED_GPUS:
    os.environ["JAX_PLATFORMS"] = "cpu"
else:
    # Room on the card for the jobs that tests start beside this process, and a hardware queue for
    # each of the many streams that stand for ranks.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.sharding import Mesh  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from pk_jax import _selection  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
if not REQUIRED_GPUS:
    # Here each program runs once, so optimising it costs more than it gives; and an op's program is
    # often, to the letter, that of what it is compared with, so it is compiled once for both.
    _compiled = tempfile.TemporaryDirectory(prefix="pk_jax-compiled")
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_compilation_cache_dir", _compiled.name)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_raise_persistent_cache_errors", True)


def pytest_configure(config):
    config.addinivalue_line("markers", "needs_gpus(n): runs on n GPUs, or is skipped")
    config.addinivalue_line(
        "markers", "without_jax: of models and files; no JAX makes a difference"
    )


def _num_gpus() -> int:
    try:
        return len(jax.devices("cuda"))
    except RuntimeError:
        return 0


def pytest_runtest_setup(item):
    """Skips or fails a GPU test without its GPUs, before any fixture looks for them."""
    marker = item.get_closest_marker("needs_gpus")
    if marker is None:
        return
    (needed,) = marker.args
    if (found := _num_gpus()) < needed:
        message = f"needs {needed} GPUs, found {found}"
        if needed <= REQUIRED_GPUS:
            pytest.fail(f"{message} (PK_JAX_REQUIRE_GPUS={REQUIRED_GPUS})")
        pytest.skip(message)


@pytest.fixture(autouse=True)
def _on_cpu(request):
    """Keeps a test that asks for no GPU on the CPU."""
    if request.node.get_closest_marker("needs_gpus") is not None:
        yield
        return
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture
def mesh_of():
    """Makes meshes of virtual CPU devices: two by four by `a=2, b=4`, permuted by `order`."""

    def make(*, order=None, **sizes):
        count = int(np.prod(list(sizes.values())))
        devices = np.array(jax.devices("cpu")[:count])
        if order is not None:
            devices = devices[list(order)]
        return Mesh(devices.reshape(tuple(sizes.values())), tuple(sizes))

    return make


@pytest.fixture
def per_rank():
    """Runs a function on each rank of a mesh: `x[rank]` in, the results stacked by rank."""

    def run(mesh, f, x, check_vma=True):
        def body(part):
            return jax.tree.map(lambda y: y[None], f(jax.tree.map(lambda leaf: leaf[0], part)))

        spec = P(mesh.axis_names)
        mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
        return jax.jit(mapped)(x)

    return run


@pytest.fixture
def can_run(monkeypatch):
    """The selection as on a machine where the kernels run."""

    def decide(op, dtype, groups, devices, auto_axes):
        reason = _selection.why_not_dtype(dtype, op) or _selection.why_not_sizes(groups)
        if reason is None:
            return _selection.Decision("cuda")
        return _selection.Decision("reference", reason)

    monkeypatch.setattr(_selection, "decide", decide)


@pytest.fixture
def lowered():
    """The text of the module that XLA would get for `fn(*args)` on a platform."""

    def lower(fn, *args, platform="cuda"):
        return jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,)).as_text()

    return lower


@pytest.fixture
def calls():
    """The custom calls of pk_jax in a module's text, as their attributes' Python values.

    With `target`, the attributes of that op's calls; without, those of all calls, with the op and
    the result types besides.
    """

    def read(text, target=None):
        found = []
        for line in text.splitlines():
            name = re.search(r"@pk_jax_(\w+)\(", line)
            if name is None or target not in (None, name[1]):
                continue
            attributes = {}
            body = re.search(r"backend_config = \{(.*?)\}", line)[1]
            for key, value in re.findall(r"(\w+) = (dense<.*?>|\"\w+\"|-?\d+)", body):
                if value.startswith("dense"):
                    attributes[key] = _dense(value, line, key)
                else:
                    attributes[key] = value.strip('"') if value[0] == '"' else int(value)
            if target is None:
                types = re.findall(r"tensor<([^<>]*)>", line.rsplit("->", 1)[1])
                attributes |= {"op": name[1], "results": types}
            found.append(attributes)
        return found

    return read


def _dense(value, line, key):
    """The numbers of a dense attribute; one that repeats is written once."""
    numbers = [int(i) for i in re.findall(r"-?\d+", value.split(">")[0])]
    count = int(re.search(rf"\b{key} = dense<[^>]*> : tensor<(\d+)xi64>", line)[1])
    return numbers * (count // len(numbers))

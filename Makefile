# Each target sets up what it needs, in .venv and .venvs/. CONTRIBUTING.md describes the loop.
#   PYTHON=/usr/bin/python3.13   the Python to start from; otherwise scripts/find_python.sh looks for one
#   JAX='jax==0.12.0 jaxlib==0.12.0'   demo: another JAX than the oldest supported one
#   NO_VENV=1                    demo, gpu-test and bench: install into PYTHON (python3) itself
#   ARGS='...'                   more arguments for the program or for pytest
.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help demo test tools lint format dev wheel audit pure test-oldest test-newest gpu-test fuzz bench clean
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
export PYTHON JAX

# Each of these leaves the environment's Python in the shell variable `python`.
FIND = python=$$(scripts/find_python.sh)
SETUP = $(FIND) && python=$$("$$python" scripts/bootstrap.py
GPU_FIND = python=$(if $(NO_VENV),$(or $(PYTHON),python3),$$(scripts/find_python.sh --all | head -n 1))
GPU_SETUP = $(GPU_FIND) && python=$$("$$python" scripts/bootstrap.py
IN_PLACE = $(if $(NO_VENV),--in-place)
# From an empty folder, so that no pk_jax but the installed one can be imported.
PYTEST = root=$$PWD && cd "$$(mktemp -d)" && "$$python" -m pytest -c "$$root/pyproject.toml" --rootdir "$$root" \
	-p no:cacheprovider --durations=10 "$$root/tests" $(ARGS)

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

demo: ## train a small language model with pk_jax and with jax.lax, and compare
	@$(GPU_SETUP) demo $(IN_PLACE)) && "$$python" examples/train_lm.py $(ARGS)

# The two suites side by side: each keeps about one core busy.
test: lint wheel audit pure ## everything that needs no GPU
	@log=$$(mktemp) && { $(MAKE) --no-print-directory test-newest > "$$log" 2>&1 & newest=$$!; status=0; \
	$(MAKE) --no-print-directory test-oldest || status=$$?; wait $$newest || status=$$?; \
	echo "test-newest:"; cat "$$log"; rm -f "$$log"; exit $$status; }

tools:
	@$(SETUP) tools)

lint: tools ## the hooks: ruff, clang-format, pyright, text and config files
	.venv/bin/pre-commit run --all-files

format: tools ## let the formatters rewrite the sources
	.venv/bin/ruff check --fix . && .venv/bin/ruff format .
	find cuda ffi examples -name '*.cu' -o -name '*.cuh' -o -name '*.cc' -o -name '*.h' | xargs .venv/bin/clang-format -i

dev: ## .venv with an editable install that recompiles on import
	@$(SETUP) dev) && echo "$$python"

wheel: tools ## dist/*.whl with all kernels for sm_90a; every header compiled alone, and the example; no spills, the SASS of matmul
	rm -rf build/wheel dist
	PIP_NO_COMPILE=1 .venv/bin/python -m pip wheel -q --no-deps -w dist . -C build-dir=build/wheel \
		-C cmake.define.PK_JAX_CHECK_HEADERS=ON
	.venv/bin/python scripts/check_kernels.py build/wheel --table
	.venv/bin/python scripts/check_sass.py build/wheel

audit: tools ## what the built wheel contains and links
	.venv/bin/python scripts/audit_wheel.py dist/*.whl

# -S: an editable install in .venv would come before PYTHONPATH.
pure: tools ## the wheel without compiled code builds and imports
	rm -rf build/pure
	PIP_NO_COMPILE=1 PK_JAX_PURE_PYTHON=1 .venv/bin/python -m pip wheel -q --no-deps -w build/pure .
	.venv/bin/python scripts/audit_wheel.py --pure build/pure/*.whl
	.venv/bin/python -m pip install -q --no-deps --target build/pure/site build/pure/*.whl
	cd build/pure && packages=$$(../../.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	PYTHONPATH="site:$$packages" JAX_PLATFORMS=cpu ../../.venv/bin/python -S -W error \
		-c "import pk_jax; print(pk_jax.__file__); assert 'build/pure/site' in pk_jax.__file__"

test-oldest: ## pytest on the built wheel, oldest supported jax; what asks for no JAX runs with the newest
	@$(SETUP) test oldest dist/*.whl jax==0.11.2 jaxlib==0.11.2) && $(PYTEST) -m 'not without_jax'

test-newest: FIND = python=$$(scripts/find_python.sh --newest)
test-newest: ## pytest on the built wheel, newest supported jax, newest Python found
	@$(SETUP) test newest dist/*.whl 'jax>=0.12,<0.13' 'jaxlib>=0.12,<0.13') && $(PYTEST)

# Where pytest-xdist is at hand, four tests at a time: each then takes a small share of the GPUs' memory.
gpu-test: ## the tests that need GPUs, all of this machine's (JOBS=1: one after another)
	@gpus=$$(nvidia-smi -L | grep -c '^GPU ') || { echo "make gpu-test needs a machine with NVIDIA GPUs" >&2; exit 1; }; \
	$(GPU_SETUP) gpu $(IN_PLACE)) && export PK_JAX_REQUIRE_GPUS=$${GPUS:-$$gpus} && jobs= && \
	if [ "$(or $(JOBS),4)" -gt 1 ] && "$$python" -c 'import xdist' 2>/dev/null; then \
		jobs="-n $(or $(JOBS),4) -p no:benchmark"; export XLA_PYTHON_CLIENT_MEM_FRACTION=0.08; fi && \
	$(PYTEST) -m needs_gpus $$jobs

fuzz: ## compare random calls of the collectives with jax.lax: CASES=2000 SEED=0 GPUS=
	@$(if $(GPUS),$(GPU_SETUP) gpu $(IN_PLACE),$(SETUP) fuzz)) && root=$$PWD && cd "$$(mktemp -d)" && \
	PYTHONPATH="$$root/tests" "$$python" -m fuzz --cases $(or $(CASES),2000) --seed $(or $(SEED),0) $(if $(GPUS),--gpus) $(ARGS)

bench: ## check, then time; records go to benchmarks/results/ (OP='psum mixed' for some ops)
	@$(GPU_SETUP) gpu $(IN_PLACE)) && for op in $(or $(OP),collectives mixed host_cost first_use); do \
		"$$python" benchmarks/run.py --op $$op $(ARGS); done

clean: ## remove what was built, and the environments
	rm -rf .venv .venvs build dist

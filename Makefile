# Each target sets up what it needs, in .venv and .venvs/. Python 3.12 or newer is found by scripts/find_python.sh, or named:
#   make demo PYTHON=/usr/bin/python3.13
# CONTRIBUTING.md describes the loop.
.NOTPARALLEL:
.DEFAULT_GOAL := help
.PHONY: help demo test tools lint format dev wheel audit pure test-oldest test-newest gpu-env gpu-test bench clean
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

BOOTSTRAP = python=$$(scripts/find_python.sh) && "$$python" scripts/bootstrap.py
# From an empty folder, so that nothing but the installed package can be imported.
PYTEST = cd "$$(mktemp -d)" && "$(1)" -m pytest -c "$(CURDIR)/pyproject.toml" --rootdir "$(CURDIR)" \
	-p no:cacheprovider "$(CURDIR)/tests"

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

demo: ## train a small language model with pk_jax and with jax.lax, and compare
	@$(BOOTSTRAP) demo
	.venv/bin/python examples/train_lm.py $(ARGS)

test: lint wheel audit pure test-oldest test-newest ## everything that needs no GPU

tools:
	@$(BOOTSTRAP) tools

lint: tools ## the hooks: ruff, clang-format, pyright, text and config files
	.venv/bin/pre-commit run --all-files

format: tools ## let the formatters rewrite the sources
	.venv/bin/ruff check --fix . && .venv/bin/ruff format .
	find cuda ffi -name '*.cu' -o -name '*.cuh' -o -name '*.cc' -o -name '*.h' | xargs .venv/bin/clang-format -i

dev: ## .venv with an editable install that recompiles on import
	@$(BOOTSTRAP) dev

wheel: tools ## dist/*.whl with all kernels for sm_90a; every header compiled alone; no spills, nothing dropped
	rm -rf build/wheel dist
	PIP_NO_COMPILE=1 .venv/bin/python -m pip wheel -q --no-deps -w dist . -C build-dir=build/wheel -C cmake.define.PK_JAX_CHECK_HEADERS=ON
	.venv/bin/python scripts/check_kernels.py build/wheel --table

audit: ## what the built wheel contains and links
	.venv/bin/python scripts/audit_wheel.py dist/*.whl

pure: tools ## the wheel without compiled code builds and imports
	rm -rf build/pure
	PIP_NO_COMPILE=1 PK_JAX_PURE_PYTHON=1 .venv/bin/python -m pip wheel -q --no-deps -w build/pure .
	.venv/bin/python scripts/audit_wheel.py --pure build/pure/*.whl
	.venv/bin/python -m pip install -q --no-deps --target build/pure/site build/pure/*.whl
	cd build/pure && PYTHONPATH=site JAX_PLATFORMS=cpu ../../.venv/bin/python -W error -c "import pk_jax; print(pk_jax.__file__)"

test-oldest: ## pytest on the built wheel, oldest supported jax
	@$(BOOTSTRAP) test oldest "$(CURDIR)"/dist/*.whl jax==0.11.2 jaxlib==0.11.2
	$(call PYTEST,$(CURDIR)/.venvs/oldest/bin/python)

test-newest: ## pytest on the built wheel, newest supported jax, newest Python found
	@python=$$(scripts/find_python.sh --newest) && "$$python" scripts/bootstrap.py test newest "$(CURDIR)"/dist/*.whl 'jax>=0.12,<0.13' 'jaxlib>=0.12,<0.13'
	$(call PYTEST,$(CURDIR)/.venvs/newest/bin/python)

clean: ## remove what was built, and the environments
	rm -rf .venv .venvs build dist

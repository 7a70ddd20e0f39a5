# Everything a newcomer needs: `make demo`, `make test`. Every target works from a clean clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest -q
SUITE ?= dataplane
ARGS ?=

.PHONY: help venv proto docs lint format test test-crash test-slow bench demo clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; name one: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $@

venv: $(STAMP)  ## the virtual environment with all development tools

demo: $(STAMP)  ## see it work: store, restart, load (ARGS= for more)
	$(BIN)/python -m bench.demo $(ARGS)

test: lint  ## linters, types, floors and all quick tests; under five minutes
	$(PYTEST) -n 2 -m 'not slow'

lint: $(STAMP)  ## linters, types and floors alone
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

test-crash: $(STAMP)  ## the daemon killed at random and at named points
	$(PYTEST) -m slow tests/crash

test-slow: $(STAMP)  ## every slow test
	$(PYTEST) -n 2 -m slow

bench: $(STAMP)  ## measure: SUITE=dataplane, or the name of another module in bench/
	$(BIN)/python -m bench.$(SUITE) $(ARGS)

format: $(STAMP)  ## let ruff format and sort
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

proto: $(STAMP)  ## generate kvstore/rpc/*_pb2*.py from proto/
	$(BIN)/python proto/generate.py

docs: $(STAMP)  ## generate docs/configuration.md from kvstore/config.py
	$(BIN)/python docs/generate.py

clean:  ## remove what was built; data directories stay
	rm -rf $(VENV) build dist *.egg-info bench/out .pytest_cache .mypy_cache .ruff_cache \
		.hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

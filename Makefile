# Everything a newcomer needs: `make demo`, `make test`. Every target works from a clean clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help venv proto test lint

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $@

venv: $(STAMP)  ## the virtual environment with all development tools

proto: $(STAMP)  ## generate kvstore/rpc/*_pb2*.py from proto/
	$(BIN)/python proto/generate.py

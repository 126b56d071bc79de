# Everything runs in .venv; `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
PYTEST_WORKERS ?= 2

.DEFAULT_GOAL := help

# Of quantize-27b and rehearse-27b: the number of GPUs, and more of the command line (a card's file, say:
# ARGS="--config recipes/cards/24gb.yaml").
NPROC ?= 1
QWEN := --config recipes/qwen36_27b.yaml $(ARGS) --trainer.devices $(NPROC)

.PHONY: help setup setup-dev quickstart quantize-27b rehearse-27b test test-all bench lint format clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml requirements/constraints.txt requirements/demo.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed; found " + sys.version.split()[0] + ". Try: make PYTHON=python3.12 setup")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint requirements/constraints.txt --editable '.[gguf]'
	$(BIN)/python -m pip install --quiet --no-deps --requirement requirements/demo.txt
	@touch $@

$(DEV_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint requirements/constraints.txt --editable '.[gguf,dev]'
	@touch $@

setup: $(STAMP) ## create .venv and install what the recipes need

setup-dev: $(DEV_STAMP) ## the same, and what tests and lint need

quickstart: $(STAMP) ## quantize SmolLM2-135M to 2 bits, export it, reload it, print the perplexities
	$(BIN)/python recipes/run.py fit --config recipes/smollm2_quickstart.yaml

quantize-27b: $(STAMP) ## quantize Qwen3.6-27B to 2 bits, or go on with it; NPROC=2 for two GPUs
	$(BIN)/python recipes/run.py doctor --run_dir runs/qwen36_27b
	$(BIN)/python recipes/run.py plan $(QWEN)
	$(BIN)/python recipes/run.py fit $(QWEN)

rehearse-27b: $(STAMP) ## before the download: does it fit this machine, how long will it take; NPROC=2 for two GPUs
	$(BIN)/python recipes/run.py rehearse $(QWEN) --model.path recipes/geometry/qwen3.6-27b-text

# One thread a worker: two workers with two threads each get in each other's way on two cores.
test: $(DEV_STAMP) ## run the tests (CPU; a GPU's are marked gpu)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(PYTEST_WORKERS) -m "not gpu and not multi_gpu and not slow"

test-all: $(DEV_STAMP) ## the same and the slow ones: three processes, every way to die
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(PYTEST_WORKERS) -m "not gpu and not multi_gpu"

bench: $(STAMP) ## measure a refinement step, GPTQ and Lightning here (some parts: ARGS="--only step"; all: ARGS=--help)
	$(BIN)/python benchmarks/bench.py $(ARGS)

lint: $(DEV_STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV_STAMP) ## let ruff mend what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove the environment and the caches (not runs/)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache

# Everything runs in .venv; `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST_WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test lint format clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml requirements/constraints.txt requirements/demo.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed; found " + sys.version.split()[0] + ". Try: make PYTHON=python3.12 setup")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint requirements/constraints.txt --editable '.[gguf,dev]'
	$(BIN)/python -m pip install --quiet --no-deps --requirement requirements/demo.txt
	@touch $@

setup: $(STAMP) ## create .venv and install everything

quickstart: $(STAMP) ## quantize SmolLM2-135M to 2 bits, export it, reload it, print the perplexities
	$(BIN)/python recipes/run.py fit --config recipes/smollm2_quickstart.yaml

test: $(STAMP) ## run the tests (CPU; a GPU's are marked gpu)
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) -m "not gpu and not multi_gpu"

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## let ruff mend what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove the environment and the caches (not runs/)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache

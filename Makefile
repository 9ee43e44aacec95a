# Two commands do everything on a fresh machine: `make demo` and `make test`. Each sets up .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Once more if it fails: pip takes an index that does not answer for one that does not have the package.
INSTALL = $(PIP) --editable '.[$(1)]' || { sleep 20 && $(PIP) --editable '.[$(1)]'; }
RUN_STAMP := $(VENV)/.ready-to-run
DEV_STAMP := $(VENV)/.ready-to-develop

.DEFAULT_GOAL := help
.PHONY: help demo test lint format bench audit clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

demo: $(RUN_STAMP)  ## train Naju and its single-gate twin side by side on this CPU (under 5 minutes)
	$(BIN)/naju demo

test: lint  ## lint, type-check and run every test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal  # a core each: two OpenMP teams would spin on one

lint: $(DEV_STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV_STAMP)  ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(DEV_STAMP)  ## measure the scan and the model against their peers; rows go to benchmarks/results
	$(BIN)/naju bench scan
	$(BIN)/naju bench model

audit: $(DEV_STAMP)  ## licences and known vulnerabilities of the dependencies (the latter need the network)
	$(BIN)/python tests/security/audit.py

clean:  ## remove the virtual environment and every cache in this folder
	rm -rf $(VENV) build dist demo-output .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(RUN_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(call INSTALL,report)
	touch $@

$(DEV_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(call INSTALL,dev)
	touch $@ $(RUN_STAMP)

# The two commands of the README. Each sets up what it needs; a second call finds it there.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test long lint types rooms unit clean

demo: $(READY)
	$(BIN)/python examples/demo.py

test: lint types rooms unit

lint: $(READY)
	$(BIN)/ruff check src tests bench examples

types: $(READY)
	$(BIN)/mypy

rooms: $(READY)
	$(BIN)/lint-imports

# One after the other: what forks ranks, from a process without the other tests' threads, and what measures this machine.
ALONE := tests/worker tests/e2e/test_node_check.py
BESIDE := $(addprefix --ignore ,$(ALONE)) --numprocesses 4 --dist worksteal  # many mostly wait

unit: $(READY)
	$(BIN)/python -m pytest $(ALONE) -m "not long"
	$(BIN)/python -m pytest $(BESIDE) -m "not long"

# What `make test` has no time for: further kinds of models, further moments of a kill.
long: $(READY)
	$(BIN)/python -m pytest $(BESIDE) -m long

# torch first and by its exact pin: a looser range, or another package's, would pull a build for accelerators.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	tests/install-packages.sh
	touch $(READY)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

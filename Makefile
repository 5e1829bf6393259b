# The two commands of the README. Each sets up what it needs; a second call finds it there.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# The demo needs torch and Holdfast and nothing else; where the environment of the tests is ready, it takes that.
DEMO := $(if $(wildcard $(READY)),$(VENV),.venv-demo)

.PHONY: demo test thorough long first-contact coverage lint types layers unit clean

demo: $(DEMO)/.ready
	@$(DEMO)/bin/python examples/demo.py

test: lint types layers unit

lint: $(READY)
	$(BIN)/ruff check src tests bench examples
	$(BIN)/ruff format --check --quiet src tests bench examples

types: $(READY)
	$(BIN)/mypy

layers: $(READY)
	$(BIN)/lint-imports

# One after the other: what forks ranks, from a process without the other tests' threads, and what measures this machine.
ALONE := tests/worker tests/e2e/test_node_check.py
BESIDE := $(addprefix --ignore ,$(ALONE)) --numprocesses 4 --dist worksteal  # many mostly wait

unit: $(READY)
	$(BIN)/python -m pytest $(ALONE) -m "not long and not thorough"
	$(BIN)/python -m pytest $(BESIDE) -m "not long and not thorough"

# Further end-to-end tests; .ci/run runs them too.
thorough: $(READY)
	$(BIN)/python -m pytest tests/e2e tests/conformance $(BESIDE) -m "thorough and not long"

# What `make test` has no time for: further kinds of models, further moments of a kill.
long: $(READY)
	$(BIN)/python -m pytest $(BESIDE) -m long

# What a new user does, command by command, in an environment of its own.
first-contact:
	$(PYTHON) tests/first_contact.py

# pip shows its progress in a terminal. Modules are compiled when they are first imported: most never are.
PIP := -m pip install --no-compile $(if $(MAKE_TERMOUT),,--quiet)

.venv-demo/.ready: pyproject.toml
	@echo "1/3  making .venv-demo, an environment for the demo alone"
	@$(PYTHON) -m venv .venv-demo
	@echo "2/3  installing torch, by far the largest part"
	@.venv-demo/bin/python $(PIP) torch==2.13.0
	@echo "3/3  installing Holdfast"
	@.venv-demo/bin/python $(PIP) --editable .
	@touch $@

# The tests of `make test` once more, with every process measured (pyproject.toml says how); fails below its floor.
coverage: $(READY)
	rm -rf .coverage && mkdir .coverage
	$(BIN)/coverage run -m pytest $(ALONE) -m "not long and not thorough"
	$(BIN)/coverage run -m pytest $(BESIDE) -m "not long and not thorough"
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# torch first and by its exact pin: a looser range, or another package's, would pull a build for accelerators.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	tests/install-packages.sh
	touch $(READY)

clean:
	rm -rf $(VENV) .venv-demo .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage

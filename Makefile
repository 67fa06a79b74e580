# make quickstart   set up and train the default recipe
# make test         set up and run everything that CI runs

PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
PYTEST_ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-crash lint clean

help:
	@echo "make quickstart  set up and train: megatron-agent train (ARGS='KEY=VALUE ...' overrides settings)"
	@echo "make test        set up, lint and run all tests (PYTEST_ARGS='...' goes to pytest)"
	@echo "make test-crash  kill -9 of driver, trainer rank and engine at 20 random moments, then resume"
	@echo "make lint        set up, then ruff, mypy and import-linter"
	@echo "make setup       create $(VENV) from requirements/cpu.txt (PYTHON=$(PYTHON))"
	@echo "make clean       remove $(VENV) and all caches; runs/ stays"

setup:
	@requirements/setup.sh "$(PYTHON)" "$(VENV)"

quickstart: setup
	$(BIN)/megatron-agent train $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/pytest --durations=15 $(PYTEST_ARGS)

test-crash: setup
	CRASH_TRIALS=$${CRASH_TRIALS:-20} $(BIN)/pytest -s tests/launch/test_crash.py $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# `make demo` and `make test` need nothing but Python >= 3.10 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-slow check format compat clean

demo: $(READY)
	$(BIN)/bp-convert demo

test: $(READY)
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

test-slow: $(READY)
	$(BIN)/python -m pytest -n auto --dist worksteal -m slow

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The core tests with every torch from the oldest on, each in a venv of its own.
compat: $(READY)
	$(BIN)/python tests/compat.py

clean:
	rm -rf $(VENV) .compat demo-out build *.egg-info .mypy_cache .pytest_cache .ruff_cache

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python 3.10 or newer is needed; name one with: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

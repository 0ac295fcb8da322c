# `make demo` and `make test` need nothing but Python >= 3.10 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo bench test test-slow test-long check docs format compat clean

demo: $(READY)
	$(BIN)/bp-convert demo

test: $(READY)
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow and not long"

test-slow: $(READY)
	$(BIN)/python -m pytest -n auto --dist worksteal -m "slow and not long"

# Layers and models beside their peers, as ratios in one run; best on an idle machine.
bench: $(READY)
	$(BIN)/python -m pip install --quiet '.[bench]'
	$(BIN)/python benchmarks/peers.py --out bench-out

# Before a release: what takes minutes for a single test.
test-long: $(READY)
	$(BIN)/python -m pytest -n auto --dist worksteal -m long

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# A warning fails it: a broken link, a name without a docstring. Nothing is fetched.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The core tests with every torch from the oldest on, each in a venv of its own.
compat: $(READY)
	$(BIN)/python tests/compat.py

clean:
	rm -rf $(VENV) .compat demo-out bench-out site build *.egg-info .mypy_cache .pytest_cache .ruff_cache

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python 3.10 or newer is needed; name one with: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

# The project's commands: everything runs in .venv, which the first target that needs it makes.
# PYTHON is the interpreter to make it with (3.11 or newer).

PYTHON ?= python3
BIN := .venv/bin
# `plsc` itself is installed in place, so only a change of these calls for another install.
INPUTS := setup.py pyproject.toml constraints.txt $(wildcard plsc/*/core/*)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test test-all lint wheel cubin clean

help:
	@echo 'make demo      train, evaluate and export a small model on two ranks (minutes on two cores)'
	@echo 'make test      the tests, without the slow ones'
	@echo 'make test-all  every test'
	@echo 'make lint      ruff, mypy and the import contract'
	@echo 'make wheel     the wheel, into dist/'
	@echo 'make cubin     the CUDA kernels for four GPUs, with nvcc: registers and spills, nothing is kept'
	@echo 'make clean     removes the .venv, builds and caches; keeps your runs'

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("got Python %d.%d, expected 3.11 or newer; try make PYTHON=python3.11" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@$(PYTHON) -m venv .venv || { rm -rf .venv; echo 'no .venv: on Debian and Ubuntu, apt install python3-venv'; exit 1; }

PIP := $(BIN)/python -m pip --disable-pip-version-check -qq

# Two stamps: whoever only wants the demo waits for no linter.
.venv/installed: $(INPUTS) | .venv/bin/python
	@echo 'installing plsc and what it needs into .venv: a minute, or as long as a download of torch takes'
	@$(PIP) install -c constraints.txt -e '.[serve]'
	@touch $@

.venv/installed-dev: $(INPUTS) | .venv/bin/python
	@echo 'installing plsc, what it needs and the tools of its tests into .venv: a minute, or as long as a download of torch takes'
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@touch .venv/installed $@

install: .venv/installed

demo: .venv/installed
	$(BIN)/plsc-train glyphs --nproc 2

# Ranks are threads or processes in the tests: one compute thread each keeps them from fighting over cores.
test test-all: export OMP_NUM_THREADS = 1

test: .venv/installed-dev
	$(BIN)/pytest -m "not slow" -q

test-all: .venv/installed-dev
	$(BIN)/pytest -q

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

wheel: .venv/installed-dev
	rm -rf build
	$(PIP) wheel --no-deps --no-build-isolation -w dist .
	rm -rf build

# Needs nvcc 13, no GPU and no Python package.
cubin:
	@$(PYTHON) tools/cubin.py

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find plsc tests -type d -name __pycache__ -prune -exec rm -rf {} +

# `make help` lists the targets. Everything runs in .venv, which is made on first use.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
C_SOURCES := $(wildcard src/stormtorch/native/csrc/*.[ch])
# One stamp per compiler: `make test CC=false` after `make test` installs anew, without the native kernels.
STAMP := $(VENV)/.installed-$(subst /,_,$(firstword $(CC)))

# Python keeps what it has compiled, whatever the environment says: each worker of a run, and each process that a test
# starts, would compile all sources and tests anew, for 15 s of a processor.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help install demo test test-fast test-wide durations check bench kill clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' | expand -t 12

install: $(STAMP)  ## make the virtual environment and install STORM into it, with the development tools

$(STAMP): pyproject.toml setup.py constraints.txt $(C_SOURCES)
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"STORM needs Python 3.11 or newer; $(PYTHON) is {v[0]}.{v[1]}. Name another: make PYTHON=python3.12")'
	@test -x $(BIN)/python || { $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }; }
	@rm -rf $(VENV)/.installed-* src/stormtorch/native/*.so build
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@$(BIN)/python -c 'from stormtorch.native.library import describe; print(describe())'
	@touch $@

demo: $(STAMP)  ## train a model larger than its device budget, and compare it with plain PyTorch
	@$(BIN)/storm demo

test: $(STAMP)  ## run the suite; GPU tests are skipped where there is no GPU
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal

test-fast: $(STAMP)  ## a first answer: unit tests and a thin slice of the laws, two minutes on two cores
	@OMP_NUM_THREADS=1 STORM_FAST=1 $(BIN)/python -m pytest -n 3 --dist worksteal

test-wide: $(STAMP)  ## every case of every law, and tiny runs of the benchmarks: half an hour on two cores
	@OMP_NUM_THREADS=1 STORM_WIDE=1 $(BIN)/python -m pytest -n 3 --dist worksteal

durations: $(STAMP)  ## run the suite and write what each file takes to tests/durations.json
	@OMP_NUM_THREADS=1 STORM_DURATIONS=tests/durations.json $(BIN)/python -m pytest -n 3 --dist worksteal

check: $(STAMP)  ## lint, format, types, import layers, C warnings
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(CC) -std=c11 -O2 -fsyntax-only -ffp-contract=off -Wall -Wextra -Wconversion -Wshadow -Werror src/stormtorch/native/csrc/*.c

bench: $(STAMP)  ## run the micro benchmarks of this machine and print their table
	@$(BIN)/python -m benchmarks.micro

kill: $(STAMP)  ## kill storm train at random moments, 60 times (STORM_KILLS=N for another number), and compare
	@STORM_KILLS=$${STORM_KILLS:-60} $(BIN)/python -m pytest -q -s --timeout 0 tests/kill

clean:  ## remove the environment and everything built
	rm -rf $(VENV) build dist src/*.egg-info src/stormtorch/native/*.so

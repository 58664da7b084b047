# The same commands for people and for CI. Everything is installed into .venv, from locks/.
#   make setup PYTHON=/path/to/python3.11    another interpreter
#   make setup LOCK=cpu                      the CPU build on a machine with a GPU

PYTHON ?= $(or $(shell command -v python3.11 2>/dev/null),$(shell command -v python3 2>/dev/null),python3.11)
LOCK ?=
BIN := .venv/bin
CACHE := $(CURDIR)/.venv/.cache

# Nothing is written into the working copy: no bytecode of ours, no example databases, no tool caches.
export PYTHONDONTWRITEBYTECODE := 1
export HYPOTHESIS_STORAGE_DIRECTORY := $(CACHE)/hypothesis
PYTEST = $(BIN)/python -m pytest --basetemp=$(CACHE)/pytest-$@ -o tmp_path_retention_policy=failed

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo doctor test chaos check lint types unit format clean

help: ## what there is
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: ## install the locked packages into .venv (at once if they are there)
	@$(PYTHON) -m cluster.install $(if $(LOCK),--lock $(LOCK))

demo: setup ## the whole loop: data, train, evaluate, register, serve, index, search
	@$(BIN)/flywheel demo

doctor: setup ## is this machine ready, and what to do where it is not
	@$(BIN)/flywheel doctor

test: setup ## every test but those for a GPU, and chaos
	@$(PYTEST) -m "not gpu and not chaos"

chaos: setup ## what takes minutes: runs that lose workers, nodes and memory; more meshes on Ray and in memory
	@$(PYTEST) -m chaos -s

check: lint types unit ## lint, types, layers, and the tests without Ray, servers or several ranks

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo --cache-dir $(CACHE)/import-linter

types: setup
	@$(BIN)/mypy

unit: setup
	@$(PYTEST) -m "not integration and not serve and not e2e and not ranks and not gpu and not chaos"

format: setup ## mend what ruff can mend
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean: ## remove .venv; what is under FLYWHEEL_HOME stays
	rm -rf .venv

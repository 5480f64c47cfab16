# The few commands of this checkout. `make install` needs Python 3.11 or later and pip's package index, nothing else.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PYTEST := $(BIN)/pytest
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help install up test test-slow check fmt clean bench-sidekick bench-control bench-shm bench-overlap bench-qwen3-omni

help:  ## show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 18

install:  ## make .venv; does nothing when it is up to date
	@$(PYTHON) scripts/install.py

up: install  ## serve the model in the box; make up ARGS=-d detaches
	@$(BIN)/omnictl up sidekick $(ARGS)

test: install  ## all tests but the slow ones; make test ARGS="-k chat"
	@$(BIN)/omnictl pull sidekick
	@$(PYTEST) -m "not slow and not gpu" $(ARGS)

test-slow: install  ## the tests that take minutes
	@$(BIN)/omnictl pull sidekick
	@$(PYTEST) -m "slow and not gpu" $(ARGS)

check: install  ## format, lint, types, import contracts, packaging and docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PYTEST) -m "not slow" tests/packaging

fmt: install  ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-sidekick: install  ## figures of the model in the box, into docs/measurements
	@$(BIN)/omnictl pull sidekick
	$(BIN)/python -m tests.bench.sidekick --write $(ARGS)

bench-control: install  ## figures of the control plane
	$(BIN)/python -m tests.bench.control --write $(ARGS)

bench-shm: install  ## figures of the shared-memory connector
	$(BIN)/python -m tests.bench.shm --write $(ARGS)

bench-qwen3-omni: install  ## figures of Qwen3-Omni's tiny build, and bench-overlap
	@$(BIN)/omnictl pull qwen3-omni --tiny
	$(BIN)/python -m tests.bench.qwen3_omni --write $(ARGS)
	$(BIN)/python -m tests.bench.overlap --write

bench-overlap: install  ## how well simulated stages overlap, with step times like those of the real model
	$(BIN)/python -m tests.bench.overlap --write $(ARGS)

clean:  ## remove .venv and everything that was made in the checkout; weights stay
	rm -rf .venv dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Everything runs in .venv, which `make setup` makes. Nothing else needs to be installed but Python 3.11+.
.DEFAULT_GOAL := help
.PHONY: help setup serve test lint format demo-model constraints clean

PORT ?= 8000
MODEL ?= demo
ARGS ?=
TESTS ?=
BIN := .venv/bin

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## make .venv with all that serving and testing need (repeatable; PYTHON=...)
	@PYTHON="$(PYTHON)" scripts/setup

serve: setup ## set up, then serve a model (MODEL=demo PORT=8000 ARGS="--max-running 64")
	@exec $(BIN)/equipoise serve --model "$(MODEL)" --port "$(PORT)" $(ARGS)

test: lint ## set up, lint, then run all tests (TESTS=tests/test_demo.py for some)
	$(BIN)/python -m pytest $(TESTS)

lint: setup ## set up, then check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src

format: setup ## set up, then put the code into the project's form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo-model: setup ## train the demo model anew (twelve minutes, one thread)
	$(BIN)/python scripts/train_demo_model.py

constraints: setup ## record the versions in .venv as the tested ones
	$(BIN)/python scripts/freeze.py

clean: ## remove .venv, caches and builds
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

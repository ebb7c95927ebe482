# `make quickstart` and `make test` do all the set-up themselves: they need python3 (3.11 or newer) and nothing else.
PYTHON ?= python3
RECIPE ?= recipes/quickstart.yaml
ARGS ?=
# Of bench-gpu: recorded rollouts and the tokenizer of their texts, where they are at hand.
TRACE ?= $(firstword $(wildcard ../shared/data/rollouts/qwen_math_cot_100x8.jsonl))
TOKENIZER ?= $(firstword $(wildcard ../shared/data/tokenizers/qwen2.5))

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup quickstart train test test-slow check check-gpu-static bench bench-gpu clean
.DEFAULT_GOAL := help

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml .ci/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "srtrl needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing srtrl and its packages into $(VENV): about a minute, once"
	$(BIN)/python -m pip install --quiet --editable ".[dev]" --constraint .ci/constraints.txt
	@touch $@

setup: $(STAMP) ## Make .venv with pinned versions (the other targets do this first)

quickstart: $(STAMP) ## Train the bundled policy on arithmetic, on the CPU, in minutes; then show its report
	$(BIN)/srtrl train recipes/quickstart.yaml --overwrite $(ARGS)
	$(BIN)/srtrl report runs/quickstart --open

train: $(STAMP) ## Run a recipe: make train RECIPE=recipes/grpo_gsm8k.yaml ARGS="train.num_steps=20"
	$(BIN)/srtrl train $(RECIPE) $(ARGS)

test: $(STAMP) ## The tests that need neither network nor GPU
	$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup $(ARGS)

test-slow: $(STAMP) ## All tests that need no GPU, also those that take minutes, and 200 examples of each property
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest -m "not gpu" --numprocesses 2 --dist loadgroup $(ARGS)

check: $(STAMP) ## Lint, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(STAMP) ## Measure the decoder
	$(BIN)/srtrl bench rollout $(ARGS)

check-gpu-static: $(STAMP) ## What can be checked of the CUDA path without a GPU; writes the table of its kernels
	$(BIN)/python -m pytest -m "" tests/test_triton_compile.py
	$(BIN)/python tests/test_triton_compile.py --write-docs docs/performance.md

bench-gpu: $(STAMP) ## Check and measure the CUDA path on one GPU, in nine minutes; writes docs/benchmarks.md
	HYPOTHESIS_PROFILE=thorough TRACE=$(TRACE) TOKENIZER=$(TOKENIZER) $(BIN)/python docs/gpu_stages.py --write-docs docs/benchmarks.md $(ARGS)

clean: ## Remove caches and build output (not runs)
	rm -rf $(STAMP) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find srtrl tests -name __pycache__ -type d -exec rm -rf {} +

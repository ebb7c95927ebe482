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
DEV_STAMP := $(VENV)/.installed-dev
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup quickstart train test test-slow check check-gpu-static bench bench-gpu clean
.DEFAULT_GOAL := help

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# A shell command whose output is shown only where it fails, and then as one line where the reason is a common one.
or_why = output=$$($(1) 2>&1) || { \
  case "$$output$$(df -Pk . | awk 'NR == 2 && $$4 < 65536 { print "No space left" }')" in \
  *"No space left"*|*"Errno 28"*|*"quota exceeded"*) \
    echo "no space left: srtrl and its packages take $(2) GB in $(VENV), and as much in $${TMPDIR:-/tmp} while they are installed; make room, or set TMPDIR, and repeat" ;; \
  *Retrying*|*"name resolution"*|*onnection*|*"from versions: none"*) \
    echo "no packages: pip does not reach its index, so this needs a network (or a mirror, PIP_INDEX_URL); repeat when it is there. pip says: $$(printf %s "$$output" | grep -o ERROR:.* | tail -n 1)" ;; \
  *) printf '%s\n' "$$output" ;; \
  esac >&2; exit 1; }
PIP_INSTALL = $(BIN)/python -m pip install --quiet --constraint .ci/constraints.txt --editable

$(STAMP): pyproject.toml .ci/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "srtrl needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>/dev/null || echo not there). Try: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "installing srtrl and its packages into $(VENV): a minute or two, once"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { $(call or_why,$(PYTHON) -m venv $(VENV),2); }
	@$(call or_why,$(PIP_INSTALL) .,2)
	@touch $@

$(DEV_STAMP): $(STAMP)
	@echo "installing what the tests use besides: a minute, once"
	@$(call or_why,$(PIP_INSTALL) ".[dev]",4)
	@touch $@

setup: $(DEV_STAMP) ## Make .venv with pinned versions (the other targets do this first)

quickstart: $(STAMP) ## Train the bundled policy on arithmetic, on the CPU, in minutes; then show its report
	$(BIN)/srtrl train recipes/quickstart.yaml --overwrite $(ARGS)
	$(BIN)/srtrl report runs/quickstart --open

train: $(STAMP) ## Run a recipe: make train RECIPE=recipes/grpo_gsm8k.yaml ARGS="train.num_steps=20"
	$(BIN)/srtrl train $(RECIPE) $(ARGS)

test: $(DEV_STAMP) ## The tests that need neither network nor GPU
	$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup $(ARGS)

test-slow: $(DEV_STAMP) ## All tests that need no GPU, also those that take minutes, and 200 examples of each property
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest -m "not gpu" --timeout 400 --numprocesses 2 --dist loadgroup $(ARGS)

check: $(DEV_STAMP) ## Lint, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(STAMP) ## Measure the decoder
	$(BIN)/python docs/bench_rollout.py $(ARGS)

check-gpu-static: $(DEV_STAMP) ## Check the CUDA path as far as that goes without a GPU
	$(BIN)/python -m pytest -m "" --numprocesses 2 --dist loadgroup tests/test_engine_cuda.py tests/test_fake_cuda.py tests/test_triton_compile.py

bench-gpu: $(DEV_STAMP) ## Check and measure the CUDA path on one GPU, in nine minutes; writes docs/benchmarks.md
	TRACE=$(TRACE) TOKENIZER=$(TOKENIZER) $(BIN)/python docs/gpu_stages.py --write-docs docs/benchmarks.md $(ARGS)

# Kernels: of all checkouts, as each state of the source has a folder beside the others (srtrl/caches.py).
clean: ## Remove caches, compiled kernels and build output (not runs)
	rm -rf $(STAMP) $(DEV_STAMP) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find srtrl tests -name __pycache__ -type d -exec rm -rf {} +
	rm -rf "$${XDG_CACHE_HOME:-$$HOME/.cache}/srtrl" "$${TMPDIR:-/tmp}/srtrl-kernels-$$(id -u)"
	if [ -n "$$NUMBA_CACHE_DIR" ]; then rm -rf "$$NUMBA_CACHE_DIR"/srtrl-????????????????; fi

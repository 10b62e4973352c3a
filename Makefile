# Every target creates the environment .venv; see tools/environment.sh for PYTHON= and TORCH=.
BIN := .venv/bin
export PYTHON PYTHON312 TORCH

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-ci test-all libraries images mutants lint format house docs bench bench-algorithms chaos gpu-check clean

help:  ## Show these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

quickstart: .venv/ready-base  ## Train a tiny model on sums: SFT, then GRPO (under 5 minutes after the installation)
	@$(BIN)/nemorl quickstart

test: .venv/ready-dev  ## Run tests of every package in two processes (15 to 25 minutes)
	@$(BIN)/pytest -m "not ci and not slow" --numprocesses 2

test-ci: .venv/ready-dev  ## Run all tests but the slow ones, as .ci/run does (about an hour)
	@$(BIN)/pytest -m "not slow" --numprocesses 2

test-all: .venv/ready-dev  ## Run all tests, including the slow ones (hours)
	@$(BIN)/pytest --numprocesses 2

libraries: .venv/ready-dev  ## Test against OpenEnv, NeMo-Gym, lm_eval, trackers and object stores, in environments of their own (needs Python 3.12)
	@tools/libraries.sh

images:  ## Build the container images with buildah and test them (root; tens of GB and an hour or more)
	@containers/images.sh

mutants: .venv/ready-mutants  ## Measure how many small mutations of pure modules the tests detect
	@$(BIN)/python tools/mutants.py

lint: .venv/ready-dev  ## Check style, format, words and types
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/python tools/words.py
	@MYPY=$(CURDIR)/$(BIN)/mypy tools/types.sh

format: .venv/ready-dev  ## Apply automatic fixes of style and format
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

house: .venv/ready-dev  ## Print size, coupling, cycles and the GRPO path of the code
	@$(BIN)/python tools/house.py

docs: .venv/ready-dev  ## Build the site of the documentation into build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: .venv/ready-bench models/smollm2  ## Measure a GRPO step against TRL and a training step against others, on SmolLM2
	@$(BIN)/python benchmarks/step.py
	@$(BIN)/python benchmarks/training.py

bench-algorithms: .venv/ready-dev  ## Train every algorithm on the tiny model and compare its metric (an hour)
	@$(BIN)/python benchmarks/algorithms.py

gpu-check: .venv/ready-base  ## Check and measure the CUDA path on one NVIDIA GPU (under 10 minutes)
	@$(BIN)/python benchmarks/gpu.py

chaos: .venv/ready-dev  ## Kill and stop processes of an asynchronous run for 10 minutes; print the recovery times
	@$(BIN)/python benchmarks/chaos.py

models/smollm2: | .venv/ready-bench
	@$(BIN)/nemorl models fetch smollm2 models/smollm2

clean:  ## Remove the environment and caches; runs/ and models/ stay
	@rm -rf .venv .venv-* build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/ready-%: pyproject.toml tools/environment.sh
	@tools/environment.sh $*

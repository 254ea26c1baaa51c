# Every target sets up what it needs by itself: a virtual environment in .venv, the project, and the shim, which the
# project's build hook compiles. PYTHON chooses the interpreter (3.11 or newer).

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
SOURCES_OF_THE_INSTALL := pyproject.toml constraints.txt hatch_build.py multus_daemon/__init__.py $(wildcard multus_shim/*)

.PHONY: help demo test e2e soak check format bench clean

help:
	@echo "make demo    a pod gets three interfaces, sends packets, and is taken down again"
	@echo "make test    the whole test suite"
	@echo "make e2e     tests against a real API server and node, and the upstream daemon; builds them once (Go 1.25 or newer, minutes)"
	@echo "make soak    the long proofs that nothing is lost (docs/reliability.md); about an hour"
	@echo "make check   format, lint, types, import contracts"
	@echo "make bench   measurements (bench/)"
	@echo "make clean   removes the virtual environment and build results"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	@echo "== making the virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed; on Debian and Ubuntu: apt-get install python3-venv"; rm -rf $(VENV); exit 1; }

$(VENV)/.installed: $(BIN)/python $(SOURCES_OF_THE_INSTALL)
	@echo "== installing multus-daemon and compiling the shim (the compiler is a wheel of 100 MB, fetched once)"
	@PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "== installing what the tests and checks need"
	@PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --editable '.[dev]'
	@touch $@

demo: $(VENV)/.installed
	@$(BIN)/python examples/quickstart/demo.py

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not apiserver and not realnode and not image"

e2e: $(VENV)/.installed-dev
	@$(BIN)/python -m tests.e2e.build_tools
	@$(BIN)/python -m tests.e2e.cluster.daemon_image
	$(BIN)/python -m pytest tests/e2e -m "apiserver or realnode or image"

soak: $(VENV)/.installed-dev
	@$(BIN)/python -m tests.e2e.build_tools
	$(BIN)/python -m tests.soak.churn
	$(BIN)/python -m tests.soak.outages
	$(BIN)/python -m tests.soak.memory
	$(BIN)/python -m tests.soak.steady

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.installed-dev
	$(BIN)/python -m bench.add_latency
	$(BIN)/python -m bench.builtin_plugins
	$(BIN)/python -m bench.networks

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

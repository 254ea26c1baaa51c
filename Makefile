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
	@echo "make bench   measurements against their budgets (bench/); as root"
	@echo "make clean   removes the virtual environment and build results"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	@echo "== making the virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed; on Debian and Ubuntu: apt-get install python3-venv"; rm -rf $(VENV); exit 1; }

# Install $(1), described as $(2). pip's output goes to a log, which is shown if pip fails. The seconds are counted
# meanwhile. NB: a background job of sh ignores a terminal's Ctrl-C, so the counter looks whether its parent lives.
define install
@log=$(VENV)/pip.log; begun=$$(date +%s); \
echo "== installing $(2)"; \
( seconds=0; while sleep 1 && kill -0 $$$$ 2>/dev/null; do seconds=$$((seconds + 1)); \
    if [ -t 1 ]; then printf '\r   %d s' $$seconds; elif [ $$((seconds % 15)) = 0 ]; then echo "   $$seconds s"; fi; \
done ) & counter=$$!; \
PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
  $(BIN)/python -m pip install --editable '$(1)' >$$log 2>&1; \
status=$$?; kill $$counter; wait $$counter 2>/dev/null; \
if [ $$status = 0 ]; then \
  if [ -t 1 ]; then printf '\r'; fi; echo "   done in $$(($$(date +%s) - begun)) s"; exit 0; \
fi; \
{ echo; cat $$log; echo; \
  echo "== pip failed with status $$status; its output is above, and in $$log"; \
  echo "   pip needs a package index that it can reach. Remove the cause and run make again; to start from nothing,"; \
  echo "   run \`make clean\` first."; } >&2; \
exit 1
@touch $@
endef

$(VENV)/.installed: $(BIN)/python $(SOURCES_OF_THE_INSTALL)
	$(call install,.,multus-daemon and compiling the shim (the compiler is a wheel of 100 MB; it is fetched once))

$(VENV)/.installed-dev: $(VENV)/.installed
	$(call install,.[dev],what the tests and checks need)

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
	@$(BIN)/python -m bench

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# Every target sets up what it needs by itself: a virtual environment in .venv, the project, and the shim, which the
# project's build hook compiles. PYTHON chooses the interpreter (3.11 or newer).

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
SOURCES_OF_THE_INSTALL := pyproject.toml constraints.txt hatch_build.py multus_daemon/__init__.py $(wildcard multus_shim/*)

# The tiers of tests/conftest.py, which marks each test by its folder. T takes the place of the folders: a path, or any
# words that pytest knows, as in `make unit T="tests/unit/spec/nad -n 0 --pdb"`.
UNIT        := tests/unit tests/spec tests/repo
# The longest files come first: the last one of a worker decides when the tier ends.
INTEGRATION := tests/vectors tests/fuzz tests/contract tests/system tests/netns tests/reports tests/shim
E2E         := tests/e2e
WIDE        := tests/wide
# A file's tests stay together: some share what one of them has made. Many wait: more workers than two cores.
PYTEST      := $(BIN)/python -m pytest --numprocesses 3 --dist loadfile
PYTEST_E2E  := $(BIN)/python -m pytest --numprocesses auto --dist loadfile
# Unit tests share nothing. Their files are in memory: on a disk, making them is a sixth of the processor time. Memory
# keeps those of failed tests only.
PYTEST_UNIT := $(shell test -w /dev/shm && echo TMPDIR=/dev/shm) \
               $(BIN)/python -m pytest --numprocesses 3 --dist worksteal -o tmp_path_retention_policy=failed -m unit
# pytest keeps the test modules that it has rewritten: half of the time of a start.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo demo-hotplug unit test bare e2e wide kernels watch record soak check site format bench compatibility metrics troubleshooting manifests lock image clean

help:
	@echo "make demo    a pod gets three interfaces, sends packets, and is taken down again; two nodes share a range"
	@echo "make demo-hotplug   a running pod gets, loses and keeps networks"
	@echo "make unit    pure code and the engine on fakes: no root, no process, no namespace; under a minute"
	@echo "make test    the same, and real plugins, namespaces and the shim; under 8 minutes"
	@echo "make bare    make demo and make test in a fresh clone on a machine with nothing installed; as root, needs debootstrap"
	@echo "make e2e     a running daemon, a real API server and node, upstream's daemon; builds them once (Go 1.26.8 or newer, minutes)"
	@echo "make wide    the oldest and the newest Kubernetes, containerd 2, two nodes, plugins of others; Go 1.26.8 or newer"
	@echo "make kernels   tests in Debian's kernels 6.1 and 6.12, by QEMU; under 20 minutes; SHORT=1 under 5"
	@echo "make watch   the unit tests, again after every change"
	@echo "make record    incidents of public reports, on upstream's program and on ours (docs/track-record.md); as root; under 10 minutes"
	@echo "make soak    the long proofs that nothing is lost (docs/reliability.md); about eight hours"
	@echo "make check   format, lint, types, import contracts, the documentation's links"
	@echo "make site    the documentation as a site, in build/site"
	@echo "make bench   measurements against their budgets (bench/); as root"
	@echo "make compatibility   docs/compatibility.md and tests/conformance.txt with the tests that prove each row"
	@echo "make metrics         docs/metrics.md from the declarations of the metrics"
	@echo "make troubleshooting   docs/troubleshooting.md from what the tests of its situations see; as root"
	@echo "make image IMAGE=NAME       the container image, for amd64 and arm64, by docker buildx or buildah; PUSH=1 pushes it"
	@echo "make manifests IMAGE=NAME   puts the image's name into the manifests and the chart; without IMAGE, makes the manifests of the chart, by helm"
	@echo "make lock    the hashes of the image's dependencies, after a change of constraints.txt"
	@echo "make clean   removes the virtual environment and build results"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	@echo "== making the virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { echo "python3 -m venv failed; on Debian and Ubuntu: apt-get install python3-venv"; rm -rf $(VENV); exit 1; }

# Run $(1), described as $(2), which installs into the environment. The output goes to a log, which is shown if it fails.
# The seconds are counted meanwhile. NB: a background job of sh ignores a terminal's Ctrl-C, so the counter looks whether
# its parent lives.
define install
@log=$(VENV)/pip.log; begun=$$(date +%s); \
echo "== installing $(2)"; \
( seconds=0; while sleep 1 && kill -0 $$$$ 2>/dev/null; do seconds=$$((seconds + 1)); \
    if [ -t 1 ]; then printf '\r   %d s' $$seconds; elif [ $$((seconds % 15)) = 0 ]; then echo "   $$seconds s"; fi; \
done ) & counter=$$!; \
export PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1; \
( $(1) ) >$$log 2>&1; \
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

# Python compiles a module when it is first imported: most of them never are.
PIP := $(BIN)/python -m pip install --no-compile
# The requirements of pyproject.toml of one kind: the compiler, what else the daemon needs, or those of an extra. The
# project itself is installed once, without a build environment; a package that comes as source has one.
REQUIRED = $(BIN)/python -c 'import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb")); \
  needed = project["build-system"]["requires"] + project["project"]["dependencies"]; \
  kinds = {"compiler": [name for name in needed if name.startswith("ziglang")], \
           "others": [name for name in needed if not name.startswith("ziglang")]}; \
  print(*(kinds | project["project"]["optional-dependencies"])[sys.argv[1]])'

# The compiler is most of what is fetched and unpacked: the shim is compiled while the dependencies come. The build then
# finds both.
$(VENV)/.installed: $(BIN)/python $(SOURCES_OF_THE_INSTALL)
	$(call install,\
	  { $(PIP) --no-deps $$($(REQUIRED) compiler) && $(BIN)/python -m multus_shim.build; } & compiling=$$!; \
	  $(PIP) $$($(REQUIRED) others); status=$$?; \
	  wait $$compiling && [ $$status = 0 ] && $(PIP) --no-deps --no-build-isolation --editable .,\
	  multus-daemon and compiling the shim (the compiler is a wheel of 100 MB; it is fetched once))

$(VENV)/.installed-dev: $(VENV)/.installed
	$(call install,$(PIP) $$($(REQUIRED) dev),what the tests and checks need)

$(VENV)/.installed-docs: $(VENV)/.installed-dev
	$(call install,$(PIP) $$($(REQUIRED) docs),what makes the documentation a site)

$(VENV)/.installed-kernels: $(VENV)/.installed-dev
	$(call install,$(PIP) $$($(REQUIRED) kernels),what starts other kernels)

demo: $(VENV)/.installed
	@$(BIN)/python examples/quickstart/demo.py
	@$(BIN)/python examples/quickstart/shared.py

demo-hotplug: $(VENV)/.installed
	@$(BIN)/python examples/quickstart/hotplug.py

unit: $(VENV)/.installed-dev
	@HYPOTHESIS_PROFILE=quick $(PYTEST_UNIT) $(or $(T),$(UNIT))

test: $(VENV)/.installed-dev
	@$(if $(T),,$(PYTEST_UNIT) $(UNIT))
	@$(PYTEST) -m "$(if $(T),unit or )integration" $(or $(T),$(INTEGRATION))

# As an ordinary user of that machine, or AS=root. T as for `make test`, without the demo.
bare: $(VENV)/.installed-dev
	@$(BIN)/python -m tests.bare $(if $(filter root,$(AS)),--root) $(if $(T),"make test T='$(T)'")

e2e: $(VENV)/.installed-dev
	@$(BIN)/python -m tests.e2e.build_tools
	@$(BIN)/python -m tests.e2e.cluster.daemon_image
	@$(PYTEST_E2E) -m e2e $(or $(T),$(E2E))

wide: $(VENV)/.installed-dev
	@$(BIN)/python -m tests.e2e.build_tools
	@$(BIN)/python -m tests.e2e.build_tools --wide
	@$(BIN)/python -m tests.e2e.cluster.daemon_image
	@$(PYTEST_E2E) -m wide $(or $(T),$(WIDE))
	@$(if $(T),,for release in plugin earlier-plugin; do \
	  directory=$$($(BIN)/python -m tests.e2e.build_tools --reference $$release) || exit 1; \
	  CNI_REFERENCE_DIR=$$directory $(PYTEST) -m integration tests/netns tests/contract/test_host_local_reference.py || exit 1; \
	done)
	@$(if $(T),,$(BIN)/python -m tests.record)
	@$(if $(T),,$(MAKE) --no-print-directory kernels)
	@$(if $(T),,$(BIN)/python -m tests.lacking)
	@$(if $(T),,$(BIN)/python -m tests.bare)
	@$(if $(T),,$(BIN)/python -m tests.bare --root)

kernels: $(VENV)/.installed-kernels
	@$(BIN)/python -m tests.kernels $(if $(SHORT),--short) $(if $(KERNEL),--kernel $(KERNEL)) $(T)

watch: $(VENV)/.installed-dev
	@$(BIN)/watchfiles --filter python "env HYPOTHESIS_PROFILE=quick $(PYTEST_UNIT) -q $(or $(T),$(UNIT))" multus_daemon tests

record: $(VENV)/.installed-dev
	@$(BIN)/python -m tests.e2e.build_tools
	@$(BIN)/python -m tests.record $(T)

soak: $(VENV)/.installed-dev
	@$(BIN)/python -m tests.e2e.build_tools
	$(BIN)/python -m tests.soak.churn
	$(BIN)/python -m tests.soak.outages
	$(BIN)/python -m tests.soak.memory
	$(BIN)/python -m tests.soak.steady
	$(BIN)/python -m tests.soak.isolation
	$(BIN)/python -m tests.soak.annotation
	$(BIN)/python -m tests.soak.keep_load
	$(BIN)/python -m tests.soak.addresses
	$(BIN)/python -m tests.e2e.addresses.schedule builtin --seconds 600 --seeds $$(seq 24)

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.repo.daemons
	$(BIN)/python -m tests.netns.trace
	@$(MAKE) --no-print-directory site

# NB: with --quiet mkdocs does not see its own warnings, and finds no fault. The variable: news of the theme's authors.
site: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.installed-dev
	@$(BIN)/python -m bench

compatibility:
	@$(PYTHON) -m tests.repo.evidence

metrics: $(VENV)/.installed-dev
	@$(BIN)/python -m tests.repo.metrics_page

troubleshooting: $(VENV)/.installed-dev
	@$(BIN)/python -m tests.e2e.build_tools
	@$(BIN)/python -m tests.e2e.troubleshooting

image:
	@test -n "$(IMAGE)" || { echo 'make image IMAGE=registry.example/multus-daemon:VERSION [PUSH=1] [PLATFORMS=linux/amd64,...]'; exit 2; }
	@$(PYTHON) image/build.py "$(IMAGE)" $(if $(PLATFORMS),--platforms $(PLATFORMS)) $(if $(PUSH),--push) $(if $(DIGEST_FILE),--digest-file $(DIGEST_FILE))

manifests: $(VENV)/.installed
	@$(BIN)/python -m tests.repo.manifests $(if $(IMAGE),--image "$(IMAGE)")

# With the oldest Python that is supported: pip decides by its own version what a package needs.
lock: $(VENV)/.installed
	@$(BIN)/python -m image.lock

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

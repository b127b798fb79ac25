# The project's verbs. Each sets up what it needs, once: a second call starts at once.
#
#   make demo         a real GPT trained while its workers are killed (all scenarios, layout 1,1,4)
#   make test         check, then all tests            make check        lint, types, tidy, formatting
#   make sim          the simulator, 500 seeds         make matrix       every failure point x layout, resumable
#   make leaders      several coordinators, killed, frozen and cut off, resumable (ROUNDS=50 SEED=1)
#   make fuzz         bytes that nobody should send, at decoders and sockets (FUZZ_MINUTES=60)
#   make healthy      a million simulated iterations that must raise no alarm
#   make soak         an hour of real training on a loaded machine that must raise none (SOAK_MINUTES=60)
#   make swarm        20,000 seeds, resumable, into bench/results/swarm.json (MINUTES=... ends it earlier)
#   make upgrade      one version to the next, node by node, under training (FROM=a tag or commit, MEASURED=3)
#   make bench        measurements, 20 minutes         make bench-check  and what became slower since they were kept
#   make test-latest  Python 3.12, newest megatron-core (6 GB)
#   make clean        remove what these made
#
# PYTHON=... chooses the interpreter, PYTEST_ARGS=... goes to pytest (-n 0: one test at a time),
# UNICRON_CUDA=AUTO|ON|OFF to the build.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# The first interpreter that runs, by version; `python3.11` may be a shim that refuses.
runs = $(shell $(1) -c 'print(1)' 2>/dev/null)
first_that_runs = $(firstword $(foreach candidate,$(1),$(if $(call runs,$(candidate)),$(candidate))))
installed = $(wildcard $(HOME)/.pyenv/versions/$(1).*/bin/python /usr/local/bin/python$(1))

PYTHON ?= $(call first_that_runs,python3.11 $(call installed,3.11) python3)
PYTHON_LATEST ?= $(call first_that_runs,python3.12 $(call installed,3.12) python3.13 $(call installed,3.13))

VENV := .venv
VENV_LATEST := .venv-latest
BIN := $(VENV)/bin
NATIVE := CMakeLists.txt setup.py pyproject.toml $(wildcard cmake/*) $(shell find csrc -type f)
# nproc counts what OpenMP was told to use; compilers are not OpenMP's.
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup demo test check matrix sim swarm leaders fuzz healthy soak upgrade bench \
  bench-check test-latest clean

help:
	@sed -n 's/^#   /  /p' Makefile

# ---------------------------------------------------------------- set-up

# $(call make_venv,folder,interpreter): a venv with the pins of its own Python version.
define make_venv
	@test -n "$(2)" || { echo "no Python found for $(1): install python3 (3.11 or later), or give PYTHON=..."; exit 1; }
	@echo "setting up $(1) with $(2) ($$($(2) --version))"
	@test -x $(1)/bin/python || $(2) -m venv $(1) \
	  || { rm -rf $(1); echo "cannot make a venv: install the package python3-venv"; exit 1; }
	@echo "installing what is pinned in requirements/ (torch for CPUs among it: 1.8 GB on the disk, minutes)"
	@$(1)/bin/python -m pip install --quiet -r \
	  requirements/py$$($(1)/bin/python -c 'import sys; print("311" if sys.version_info < (3, 12) else "312")').txt
	@touch $@
endef

# $(call build,folder): the package in place, so that only a change of the core builds again.
define build
	@command -v c++ >/dev/null || { echo "no C++ compiler: install g++ (9 or later) or clang"; exit 1; }
	@echo "compiling the C++ core, and installing unicron in place (about three minutes on two cores)"
	@PATH="$(CURDIR)/$(1)/bin:$$PATH" $(1)/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@
	@echo "unicron is installed in $(1): $(1)/bin/unicron --help"
endef

$(VENV)/.installed: requirements/py311.txt requirements/py312.txt
	$(call make_venv,$(VENV),$(PYTHON))

$(VENV)/.built: $(VENV)/.installed $(NATIVE)
	$(call build,$(VENV))

$(VENV_LATEST)/.installed: requirements/py312.txt
	$(call make_venv,$(VENV_LATEST),$(PYTHON_LATEST))

$(VENV_LATEST)/.built: $(VENV_LATEST)/.installed $(NATIVE)
	$(call build,$(VENV_LATEST))

setup: $(VENV)/.built

# Prometheus and etcd for the tests against them; where they cannot be had, those tests say so and are skipped.
$(VENV)/.servers: tests/servers.sh | $(VENV)/.installed
	tests/servers.sh $(VENV)/servers
	@touch $@

# ---------------------------------------------------------------- verbs

demo: setup
	$(BIN)/unicron demo --scenario all --layout 1,1,4

check: setup
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror \
	  $(shell find csrc tests/cpp tests/fakes -name '*.h' -o -name '*.cc' -o -name '*.cu')
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_tidy.py

# Tests of real processes shall come one after the other, all others beside them (tests/process/conftest.py).
SIDE_BY_SIDE := -n 2 --dist loadgroup

test: check $(VENV)/.servers
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest -q $(SIDE_BY_SIDE) $(PYTEST_ARGS)

sim: setup
	$(BIN)/python -m unicron.sim --seeds 500 --jobs 0

MINUTES ?= 600
swarm: setup
	$(BIN)/python -m unicron.sim --seeds 20000 --record bench/results/swarm.json --minutes $(MINUTES) --keep-going --jobs 0

ROUNDS := 50
SEED := 1
leaders: setup $(VENV)/.servers
	PYTHONPATH=tests/support $(BIN)/python -m leader_rounds --rounds $(ROUNDS) --seed $(SEED) \
	  --record bench/results/leaders.json --minutes $(MINUTES)

FUZZ_MINUTES := 60
fuzz: setup
	PYTHONPATH=tests/support $(BIN)/python -m wire_fuzz --minutes $(FUZZ_MINUTES) --record bench/results/fuzz.json

# Every failure point at every layout; what passed is kept and not run again.
matrix: setup
	$(BIN)/python -m unicron.demo.matrix --into results/matrix.jsonl --folder results/matrix

# FROM: a tag or a commit (0.3.0's); that version's core is built once.
FROM ?= a641caf
MEASURED ?= 3
OLDER = build/upgrade/$(FROM)
$(OLDER)/python: | setup
	mkdir -p $(OLDER) && git archive $(FROM) | tar x -C $(OLDER)
	cd $(OLDER) && UNICRON_CUDA=OFF $(CURDIR)/$(BIN)/python setup.py -q build_ext --inplace || \
	  { rm -r python; exit 1; }

upgrade: setup $(OLDER)/python
	$(BIN)/python bench/bench_upgrade.py --from $(OLDER)/python --runs $(MEASURED)

healthy: setup
	$(BIN)/python bench/bench_detection.py --only none --healthy 1000000

SOAK_MINUTES := 60
soak: setup
	$(BIN)/python bench/bench_detection.py --only none --soak --minutes $(SOAK_MINUTES)

bench: setup
	$(BIN)/python bench/suite.py run --into results/bench

bench-check: setup
	$(BIN)/python bench/suite.py check

test-latest: $(VENV_LATEST)/.built
	PATH="$(CURDIR)/$(VENV_LATEST)/bin:$$PATH" $(VENV_LATEST)/bin/python -m pytest -q $(SIDE_BY_SIDE) $(PYTEST_ARGS)

clean:
	rm -rf build dist results $(VENV) $(VENV_LATEST) .pytest_cache .mypy_cache .ruff_cache .hypothesis \
	  python/*.egg-info python/unicron/_core.*.so

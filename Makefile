# Two commands from a bare checkout: `make demo` and `make test`. All that they need goes into .venv.
# `make test-all` runs the long tests as well, and `make test-gpu` what needs a GPU, on a machine that has one.
#
# PYTHON       the interpreter to build the environment with (3.11 or newer)
# TORCH_INDEX  an extra package index for torch, such as PyTorch's CPU wheels, where the default one would bring
#              CUDA packages to a machine that has no GPU
# TORCH        another torch than that of constraints.txt, as 2.14.1: in an environment of its own, .venv-2.14.1
PYTHON ?= python3
TORCH_INDEX ?=
TORCH ?=
VENV := .venv$(if $(TORCH),-$(TORCH))
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all test-gpu tests types style format-check contracts contracts-and-types up check format hooks browser docs constraints lock clean

demo: $(STAMP)
	$(BIN)/trivet demo

up: $(STAMP)
	$(BIN)/trivet up

# What every change must pass: each promise is shown once, on real parts. `make test-all` adds what is marked slow: long
# combinations, chaos, memory. The checkers of types and imports take one core for half a minute, so tests run beside
# them.
test: format-check browser
	$(MAKE) --no-print-directory --jobs=2 contracts-and-types tests SELECTED='-m "not slow"'

test-all: format-check browser
	$(MAKE) --no-print-directory --jobs=2 contracts-and-types tests

# What needs a GPU, with the interpreter that has torch for it: .venv's if there is one, else PYTHON. Installs nothing.
test-gpu:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) tests/gpu/run.py

# What some thousand processes import is compiled once and not by each of them.
tests: $(STAMP)
	$(BIN)/python -m compileall -q service workers api trivet tests
	OMP_NUM_THREADS=1 $(BIN)/python tests/run.py $(SELECTED)

check: style types

style: format-check contracts

format-check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

contracts: $(STAMP)
	$(BIN)/lint-imports --no-cache

types: $(STAMP)
	$(BIN)/mypy

# One after the other, however many jobs make may run. Types are those of the torch in constraints.txt: each release
# annotates more, or otherwise.
contracts-and-types: $(STAMP)
	$(BIN)/lint-imports --no-cache
	$(if $(TORCH),,$(BIN)/mypy)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Have git look at each commit for marks of a merge, style, spelling and Markdown.
hooks: $(STAMP)
	git config core.hooksPath .githooks

# The browser tests use a Chromium that is already there; else the one that Playwright or the system's packages bring.
browser: $(STAMP)
	@$(BIN)/python tests/ensure_chromium.py

# The documents as a site, with references made from the code, in build/docs; a link that leads nowhere ends it.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

constraints: $(STAMP)
	$(BIN)/python -m pip freeze --all --exclude setuptools --exclude-editable | sed 's/+cpu$$//' > constraints.txt

# What images are built from: exact versions with their digests. Another index for torch has other digests.
lock: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt uv
	$(BIN)/python docker/lock.py $(TORCH_INDEX)

clean:
	rm -rf .venv .venv-* .trivet build *.egg-info

# First a pip that finds versions in a quarter of the time that the one of an older Python's venv takes. It would compile
# all modules, of which we import a quarter: those that a service and its ranks do are compiled here, others as needed.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Trivet needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Set PYTHON=python3.12, for one."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH),sed -e 's/^torch==.*/torch==$(TORCH)/' -e '/^torchvision==/d' constraints.txt > $(CONSTRAINTS))
	@echo "installing about 2 GB of packages (several more where torch brings CUDA), which takes some minutes"
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) pip
	$(BIN)/python -m pip install --quiet --no-compile --constraint $(CONSTRAINTS) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch --editable '.[dev]'
	$(BIN)/python -c 'import api.main, trivet.cli, workers.launcher.preloading as ranks; ranks.preload_every_kind()'
	touch $@

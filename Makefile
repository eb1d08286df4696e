# Holdfast. Each target does its own set-up, into .venv/; `make help` lists them.
# HOLDFAST_HOME and HOLDFAST_ROOT are passed on as they are given.
.DEFAULT_GOAL := help
.PHONY: help setup setup-demo setup-cluster page screenshots demo \
	test test-unit test-more test-all test-slurm test-versions test-gpu \
	bench bench-gpu bench-frameworks check lock clean slurm-up slurm-down docs docs-serve reference

PYTHON := .venv/bin/python
PYTEST := .venv/bin/pytest
SLURM_DIRECTORY ?= $(or $(TMPDIR),/tmp)/holdfast-slurm
ARGS ?=
# After this many minutes, `test-more` starts no further test.
MINUTES ?= inf
# Most tests wait for processes: two files at a time, each file in one process for
# its servers, in the order of tests/conftest.py.
TWO_AT_A_TIME := -n 2 --dist loadfile --no-loadscope-reorder
# Half of the time of the unit tests' slowest files is waiting.
THREE_AT_A_TIME := -n 3 --dist loadfile --no-loadscope-reorder

help:  ## This list
	@sed -n 's/^\([a-z-]*\):.*##  *\(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

setup:  ## .venv with everything in requirements.lock
	@infra/setup/setup.sh

setup-demo:  ## .venv with only what the demo needs
	@infra/setup/setup.sh --demo

setup-cluster:  ## All of `setup`, and Slurm and PostgreSQL for the tests (needs root or sudo)
	@infra/setup/setup.sh --cluster

page:  ## The web page, from web/ into the package (needs Node 18 or newer)
	@infra/setup/setup.sh --page

screenshots: setup-cluster docs  ## Pictures of the web page and of the site, into docs/screenshots
	PYTHONPATH=. $(PYTHON) -m tests.web.screenshots docs/screenshots

demo: setup-demo  ## A run that is preempted and relaunched on fewer ranks: about a minute
	$(PYTHON) examples/demo.py $(ARGS)

test: setup-cluster  ## Each mechanism once, in ten minutes; ARGS="-k name" narrows them
	$(PYTEST) $(TWO_AT_A_TIME) -m "not slow and not more" --durations=25 $(ARGS)

test-unit: setup  ## Tests that start no server and no run, in two minutes; needs no root
	$(PYTEST) $(THREE_AT_A_TIME) tests/unit -m "not slow and not more and not root" --durations=10 $(ARGS)

test-more: setup-cluster  ## The tests that `test` leaves out, without the long ones: an hour
	$(PYTEST) $(TWO_AT_A_TIME) -m "more and not slow" --minutes=$(MINUTES) --durations=25 $(ARGS)

test-all: setup-cluster  ## All tests: also soaks and matrices, and at the end a drill of 200 faults
	$(PYTEST) $(TWO_AT_A_TIME) -m "not alone" --durations=40 $(ARGS)
	$(PYTEST) -m alone $(ARGS) || test $$? -eq 5  # 5: ARGS selects no such test

test-slurm: setup-cluster  ## The tests on Slurm, with VERSION=20.11, 22.05, 24.11 or 26.05 of it
	$(PYTHON) infra/slurm/other_version.py run $(VERSION) -- $(PYTEST) tests/slurm --durations=20 $(ARGS)

test-versions: setup  ## Core tests with the newest and lowest packages on each Python: an hour
	$(PYTHON) infra/versions/matrix.py --page $(ARGS)

test-gpu: setup  ## What only a GPU can show, in about ten minutes; without one, one skipped test
	$(PYTEST) tests/gpu --durations=10 $(ARGS)

bench-gpu: setup  ## Saves of a state on GPUs against a page-locked copy, and the memory they take
	$(PYTHON) -m holdfast_bench.limits --gpu $(ARGS)

bench: setup  ## Saves and loads against this machine's limits and stock DCP; ARGS=--json
	@infra/setup/bench_peers.sh
	@.venv/bin/holdfast bench $(ARGS)

bench-frameworks: setup  ## Saves and steps of each framework's adapter beside the bare framework
	$(PYTHON) -m holdfast_bench.frameworks $(ARGS)

docs: reference  ## The documentation site, into build/docs; a broken link or any warning fails
	$(PYTHON) infra/docs/build_site.py $(ARGS)

reference: setup  ## The reference pages that the code generates, into docs/generated
	$(PYTHON) infra/docs/write_reference.py

docs-serve: reference  ## Build the documentation site and serve it on localhost; ARGS=8080 is a port
	$(PYTHON) infra/docs/build_site.py
	$(PYTHON) -m http.server --bind 127.0.0.1 --directory build/docs $(or $(ARGS),8000)

check: setup  ## Style, types and import layers
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	$(PYTEST) -q tests/unit/test_style.py tests/unit/test_layers.py

lock: setup  ## Write requirements.lock and the demo's part of it from .venv
	$(PYTHON) infra/setup/lock.py

slurm-up: setup-cluster  ## A real Slurm cluster on this machine, in SLURM_DIRECTORY
	$(PYTHON) infra/slurm/cluster.py start $(SLURM_DIRECTORY) $(ARGS)

slurm-down:  ## Stop it and remove its files
	$(PYTHON) infra/slurm/cluster.py stop $(SLURM_DIRECTORY)

clean:  ## Remove .venv, caches and built files; runs and databases stay
	rm -rf .venv .setup build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache \
		.import_linter_cache .hypothesis web/node_modules src/holdfast/api/static \
		benchmarks/build benchmarks/src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

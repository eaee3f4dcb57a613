# make demo   the built-in models answer a sum in every mode (simulated ranks where there are no GPUs)
# make test   ruff and mypy, then the tests on the main environment and on the newest Triton
# make sweep  every combination of what the tests sample, in one to two hours
# make contracts  tests of what weft relies on in Triton, on the versions between those two, put into build/
# make docs   the API reference of all public names, as HTML in build/reference
# make clean  remove both environments
#
# PYTHON=python3.12 picks the interpreter; otherwise scripts/bootstrap.py takes the newest of 3.10 to 3.13.

# What lies on the first two would hide what the environments have. Without bytecode each process compiles weft and the tests anew,
# and collecting the tests takes twice as long.
unexport PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE

PYTHON ?=
WORKERS ?= 2
TRITONS := 3.7.0 3.7.1 3.8.0
BOOTSTRAP := $(or $(PYTHON),python3) scripts/bootstrap.py $(if $(PYTHON),--python $(PYTHON))
PYTEST := -m pytest -q -n $(WORKERS) --dist worksteal -m "not gpu and not sweep"

.PHONY: demo docs test about-test test-gpu sweep contracts lint format env clean

demo: .venv/.ready
	@echo "weft: the demo takes about a minute without GPUs"
	.venv/bin/python scripts/demo.py

# weft is installed there; pip adds what the extra names.
docs: .venv/.ready
	.venv/bin/python -m pip install --quiet 'weft[docs]'
	.venv/bin/python scripts/reference.py build/reference

test: about-test lint .venv/.ready .venv-newest/.ready
	.venv/bin/python $(PYTEST) tests
	.venv-newest/bin/python $(PYTEST) --triton-sensitive tests

# Before its first prerequisite is made.
about-test:
	@echo "weft: the tests take 4 to 8 minutes on two idle cores, twice as long beside other work, and three more the first time; WORKERS=8 takes more cores"

# One process: every GPU test starts a process per GPU itself.
test-gpu: .venv/.ready
	.venv/bin/python -m pytest -q -m gpu tests

# All commands run; those that failed are listed at the end.
sweep: .venv/.ready .venv-newest/.ready
	@failed=; \
	try() { echo "$$*"; "$$@" || failed="$$failed$$(printf '\n  %s' "$$*")"; }; \
	try .venv/bin/python -m pytest -q -n $(WORKERS) -m "sweep and not gpu" tests; \
	try .venv-newest/bin/python -m pytest -q -n $(WORKERS) -m "sweep and not gpu" --triton-sensitive tests; \
	try .venv/bin/python -m tests.check.sweep --jobs $(WORKERS) --schedules 16; \
	try .venv/bin/python -m tests.check.sweep --table --jobs $(WORKERS) --schedules 8; \
	try .venv/bin/python -m tests.check.sweep --world-size 4 --node-size 2 --jobs $(WORKERS) --schedules 16; \
	try .venv/bin/python -m tests.check.sweep --world-size 2 --node-size 1 --jobs $(WORKERS) --schedules 24; \
	try .venv/bin/python scripts/package_check.py; \
	[ -z "$$failed" ] || { echo "weft: these commands of the sweep failed:$$failed"; exit 1; }

contracts: $(TRITONS:%=build/triton-%)
	for triton in $^; do \
	    PYTHONPATH=$$triton .venv/bin/python -m pytest -q -n 0 tests/simulator/test_triton_contracts.py || exit; \
	done

# --no-deps: a Triton in front of what .venv has.
build/triton-%: | .venv/.ready
	.venv/bin/python -m pip install --quiet --no-deps --target $@ triton==$*

lint: .venv/.ready
	.venv/bin/python -m ruff check --quiet .
	.venv/bin/python -m ruff format --check --quiet .
	.venv/bin/python -m mypy --no-error-summary

format: .venv/.ready
	.venv/bin/python -m ruff check --quiet --fix .
	.venv/bin/python -m ruff format --quiet .

env: .venv/.ready

.venv/.ready: pyproject.toml scripts/bootstrap.py
	@$(BOOTSTRAP) main

.venv-newest/.ready: .venv/.ready
	@$(BOOTSTRAP) newest

clean:
	rm -rf .venv .venv-newest

# Each target makes what it needs in .venv/ and installs nothing twice. PYTHON chooses the interpreter.
PYTHON ?= python3
PYTEST_ARGS ?=
BENCH_ARGS ?=

RUN  := .venv/run
LINT := .venv/lint
SAYS := pyproject.toml constraints.txt Makefile

# torch comes first and from constraints.txt; nothing later may bring another one.
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint bench clean

demo: $(RUN)/demo.done  ## A CNN on handwritten digits, in two processes
	$(RUN)/bin/python examples/digits.py --accelerator cpu --devices 2

test: $(RUN)/test.done  ## All tests; PYTEST_ARGS='-k seed' for some
	$(RUN)/bin/python -m pytest $(PYTEST_ARGS)

bench: $(RUN)/bench.done  ## Ratios against raw PyTorch, and against others where they are installed
	$(RUN)/bin/python tests/benchmarks $(BENCH_ARGS)

lint: $(LINT)/copy.done  ## Style, and types of the package as it is installed
	$(LINT)/bin/ruff format --check .
	$(LINT)/bin/ruff check .
	cd $(LINT) && bin/mypy --config-file ../../pyproject.toml --package fabric

clean:
	rm -rf .venv build dist *.egg-info

$(RUN)/torch.done $(LINT)/torch.done: %/torch.done: constraints.txt
	$(PYTHON) -m venv --clear $*
	$*/bin/python $(PIP_INSTALL) torch
	touch $@

$(RUN)/demo.done: $(RUN)/torch.done $(SAYS)
	$(RUN)/bin/python $(PIP_INSTALL) --editable '.[examples]'
	touch $@

# Building DeepSpeed and FairScale imports torch, the one that is here.
$(RUN)/test.done: $(RUN)/torch.done $(SAYS)
	$(RUN)/bin/python $(PIP_INSTALL) --editable '.[test]'
	$(RUN)/bin/python $(PIP_INSTALL) --no-build-isolation --editable '.[deepspeed,fairscale]'
	touch $@

$(RUN)/bench.done: $(RUN)/test.done
	$(RUN)/bin/python $(PIP_INSTALL) --editable '.[bench]'
	touch $@

$(LINT)/lint.done: $(LINT)/torch.done $(SAYS)
	$(LINT)/bin/python $(PIP_INSTALL) '.[dev]'
	touch $@

$(LINT)/copy.done: $(LINT)/lint.done $(shell find fabric strategies launchers -name '*.py')
	$(LINT)/bin/python $(PIP_INSTALL) --no-deps --force-reinstall .
	touch $@

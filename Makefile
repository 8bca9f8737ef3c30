# Every target but device-check sets up what it needs: a virtual environment, the pinned requirements and the built
# extension.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := setup.py pyproject.toml $(shell find csrc -type f)
CPP := $(shell find csrc tests/cuda_on_cpu -name '*.cpp' -o -name '*.h' -o -name '*.cu')

.PHONY: demo test test-slow test-all bench docs device-check lint format wheel clean

demo: $(VENV)/built
	$(BIN)/loco-ext demo --out runs

# Two processes begin at the first and at the middle test, so that what a file builds is shared among its tests, and the
# one that is done first takes over tests of the other.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test: $(VENV)/built
	$(PYTEST) -m "not slow"

test-slow: $(VENV)/built
	$(PYTEST) -m slow

test-all: $(VENV)/built
	$(PYTEST)

bench: $(VENV)/built
	$(BIN)/python -m bench.bench_optim_step
	$(BIN)/python -m bench.bench_ring_prox
	$(BIN)/python -m bench.bench_compact
	$(BIN)/python -m bench.bench_block_sparse

docs: $(VENV)/built
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --nitpicky --quiet docs build/docs
	@echo "The site is in build/docs/index.html"

# On a machine with an NVIDIA GPU, with what is installed there: nothing is downloaded. See bench/device_check.py.
device-check:
	$(PYTHON) -m bench.device_check

lint: $(VENV)/built
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/mypy

format: $(VENV)/built
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

wheel: $(VENV)/requirements
	$(BIN)/python -m pip wheel --no-build-isolation --no-deps --wheel-dir dist .

# Modules are compiled when they are first imported, and kept: to compile all of them takes pip more than a minute.
unexport PYTHONDONTWRITEBYTECODE

$(VENV)/requirements: requirements-dev.txt
	$(PYTHON) -c "import sys; v = sys.version_info; sys.exit(None if (3, 11) <= v < (3, 15) else \
	  f'loco_ext needs Python 3.11 to 3.14, {v.major}.{v.minor} found: run make with PYTHON=python3.12, say')"
	$(PYTHON) -m venv $(VENV)
	@echo "Installing the pinned requirements, torch among them"
	$(BIN)/python -m pip install --quiet --no-compile -r requirements-dev.txt
	touch $@

$(VENV)/built: $(VENV)/requirements $(SOURCES)
	@echo "Compiling the C++ library, which takes minutes"
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	touch $@

clean:
	rm -rf build dist runs *.egg-info loco_ext/*.so

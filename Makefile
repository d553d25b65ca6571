# Two commands do everything on a machine with Python 3.11:  make run   and   make test
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN = $(VENV)/bin
export OMP_NUM_THREADS ?= 2

.PHONY: run test slow lint bench mutants models clean

run: $(VENV)/.ready            ## a real run on tiny-dense, then moe-30b simulated
	$(BIN)/bench run --system pivot --model tiny-dense
	$(BIN)/bench run --system pivot --model moe-30b

test: $(VENV)/.ready           ## the default tests, under 10 minutes on 2 cores
	$(BIN)/python -m pytest

slow: $(VENV)/.ready           ## what the default tests leave out
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/.ready           ## style, types, and the direction of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.ready          ## timings; they decide no test
	$(BIN)/python -m pytest tests/bench --benchmark-only -m ""

mutants: $(VENV)/.ready        ## do the tests notice 500 small faults? takes an hour; goes on where it stopped
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[live,dev,mutants]'
	$(BIN)/python -m tests.mutation | tee results/mutants.json

models: $(VENV)/.ready         ## make the shipped tiny models again, from seeds
	$(BIN)/python -m workloads.hops.make_models | tee workloads/hops/models/EVIDENCE.txt

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[live,dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks

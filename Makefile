# Everything below works on a fresh machine with Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test bench browser compiler lint format clean

demo: $(READY)  ## compare all methods on embedded real data: a leaderboard and figures in demo/
	rm -rf demo
	$(BIN)/perfed demo --out demo

test: $(READY) browser compiler lint  ## the whole check: format, lint, types, tests
	$(BIN)/pytest -n 2 --dist worksteal

bench: $(READY)  ## measure speed beside other simulators (DATA_DIR=DIR with MNIST); fills docs/benchmarks.md
	$(BIN)/python benchmarks/bench.py --data-dir $(or $(DATA_DIR),data)
	$(BIN)/python benchmarks/kernels.py --data-dir $(or $(DATA_DIR),data)
	$(BIN)/python benchmarks/modes.py bfloat16
	$(BIN)/python benchmarks/modes.py compiled
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python docs/tables.py

browser:  # the report page is tested in a real one
	(command -v chromium && command -v chromedriver) > /dev/null || (apt-get update -qq && apt-get install -y -qq chromium chromium-driver > /dev/null)

compiler:  # kernels = "compiled" is tested with a real one
	command -v cc > /dev/null || (apt-get update -qq && apt-get install -y -qq gcc libc6-dev > /dev/null)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) demo runs .mypy_cache .ruff_cache .pytest_cache .hypothesis

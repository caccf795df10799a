# One virtual environment, made from pinned versions; every target makes it when it is missing or out of date: `minimal`
# holds what penstock itself needs, `install` also what tests, linters and benchmarks do.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: minimal install train test lint types imports unit zoo bench pictures clean

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

minimal: .venv/.minimal

install: .venv/.installed

.venv/.minimal: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) --editable .
	$(BIN)/penstock simulate --schedule 1f1b --stages 16 --microbatches 512 --json > /dev/null  # compiles, and keeps it
	touch $@

.venv/.installed: .venv/.minimal
	$(PIP) --editable '.[dev]'
	touch $@

train: minimal
	$(BIN)/penstock train examples/gpt.toml --report gpt.html

test: lint types imports unit

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

imports: install
	$(BIN)/lint-imports

unit: install
	$(BIN)/python -m pytest -n 2 --dist worksteal

zoo: install
	$(BIN)/python tests/wide/run.py --table

bench: install
	$(BIN)/python -m benchmarks.simulator --large
	$(BIN)/python -m benchmarks.simulator_sizes
	$(BIN)/python -m benchmarks.auto --sets 6
	$(BIN)/python -m benchmarks.split_backward
	$(BIN)/python -m benchmarks.inline
	$(BIN)/python -m benchmarks.reductions
	$(BIN)/python -m benchmarks.data_parallel

pictures: install
	$(BIN)/penstock simulate --schedule zb-v --stages 4 --microbatches 8 --svg docs/pictures/zb-v.svg > /dev/null
	$(BIN)/python -m benchmarks.simulator_sizes docs/pictures/simulator-sizes.svg
	$(BIN)/python examples/predicted_and_measured.py sleeping docs/pictures/predicted-measured.svg
	$(BIN)/python examples/predicted_and_measured.py gpt docs/pictures/predicted-measured-gpt.svg

clean:
	rm -rf .venv

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test clean

# Plans and runs the bundled prompts on a tiny model built here, and prints the report.
demo: $(VENV)/engine
	$(BIN)/batchbound demo

# Checks the style, the types and the tests.
test: $(VENV)/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

$(VENV)/engine: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'batchbound needs Python 3.11 or newer; say make PYTHON=python3.11')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[engine]'
	touch $@

$(VENV)/dev: $(VENV)/engine
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[engine,predict,encoder,dev]'
	touch $@

clean:
	rm -rf $(VENV) demo-output

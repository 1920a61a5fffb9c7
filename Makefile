PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Tests start hundreds of processes: each module is compiled when the first of them imports it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo style test test-all test-lowest test-core attack site mutants clean

# Plans and runs the bundled prompts on a tiny model built here, and prints the report.
demo: $(VENV)/engine
	$(BIN)/batchbound demo --overwrite

# Checks the style and the types, and runs the fast tests: under three minutes on two cores.
test: style
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4

# The same with every test that needs no GPU. Tests of Ray and of servers mostly wait: a third process fills two cores.
test-all: style
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 3 --dist worksteal -m "not gpu"

# The fast tests on the lowest versions that pyproject.toml declares, of those that come as wheels. TORCH names
# another torch where the lowest is not to be had: make test-lowest TORCH=torch==2.13.0. What old libraries warn of
# in new ones is no failure.
TORCH ?= torch>=2.11
test-lowest:
	$(PYTHON) -m venv --clear build/lowest
	build/lowest/bin/pip install --quiet uv
	build/lowest/bin/uv pip install --quiet --python build/lowest/bin/python --only-binary :all: \
		--resolution lowest-direct '$(TORCH)' --requirements pyproject.toml \
		--extra engine --extra parquet --extra solvers --extra predict --extra encoder --extra ray --extra grammar \
		--extra dev
	OMP_NUM_THREADS=1 build/lowest/bin/python -m pytest --numprocesses auto --maxprocesses 4 -o filterwarnings=default

# The tests of the compiled search on a build that recomputes its invariants, with sanitizers.
CORE := solvers/search/core
CORE_DEBUG := -std=c++17 -O0 -g1 -DCORE_CHECKS -fsanitize=address,undefined -fno-sanitize-recover=undefined
test-core: $(VENV)/dev
	mkdir -p build/core
	$(CXX) $(CORE_DEBUG) -ffp-contract=off -shared -fPIC -o build/core/libcore.so $(CORE)/core.cpp
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=1 \
		BATCHBOUND_CORE=build/core/libcore.so $(BIN)/python -m pytest -m "not gpu" \
		tests/solvers/test_compiled_search.py tests/solvers/test_exact_searches.py

# Kills, damaged files, failing models, full disks, in minutes: docs/reliability.md says how to try more.
attack: $(VENV)/dev
	cd benchmarks && OMP_NUM_THREADS=1 $(abspath $(BIN))/python -m attack $(ATTACK)

style: $(VENV)/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	MYPY_NUM_WORKERS=auto $(BIN)/mypy

# Python compiles a module when it is first imported: compiling all of them takes most of an installation.
$(VENV)/engine: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'batchbound needs Python 3.11 or newer; say make PYTHON=python3.11')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt torch
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[engine]'
	touch $@

# Tests turn warnings into errors, those of a compiler too, so modules are compiled here, but for parts of packages
# that few tests import and that compile without one. A few that packages carry for other Pythons fail.
UNCOMPILED := /tests?/|/transformers/models/|/ray/(rllib|data|serve|tune|train|air|dashboard)/|/pip/
$(VENV)/dev: $(VENV)/engine
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt \
		'batchbound[engine,solvers,predict,encoder,ray,trl,grammar,mutation,dev]'
	-$(BIN)/python -m compileall -qq -j 0 -x '$(UNCOMPILED)' $(VENV)/lib
	touch $@

# Builds the documentation into build/site; a warning is an error.
site: $(VENV)/docs
	$(BIN)/python docs/make_site.py
	SITE_VERSION="$$($(BIN)/batchbound --version)" $(BIN)/zensical build --strict --clean

$(VENV)/docs: $(VENV)/engine
	$(BIN)/pip install --quiet --constraint constraints.txt 'batchbound[engine,docs]'
	touch $@

# Changes the judges line by line and says which changes no test notices: docs/mutation.md.
mutants: $(VENV)/dev
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/mutation_score.py $(MUTANTS)

clean:
	rm -rf $(VENV) demo-output

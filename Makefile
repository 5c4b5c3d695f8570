# Everything that a checkout can do. Needs CPython >= 3.10, a C++ compiler and make.
#   PYTHON       the interpreter that makes the virtual environment (default: python3)
#   VENV         where that environment lies (default: .venv)
#   PYTEST_ARGS  more arguments for pytest, as in: make test PYTEST_ARGS='-k layout -x'
#   WORKERS      how many tests run at a time (default: 8, of soak 5, since many of them wait: on two
#                cores the suite took 738 s with 8 and 790 s with 5; 0: in one process)
#   TORCH_VERSIONS, TORCH_INDEX   of torch-versions: which (default: all), and an index besides pip's
#   ENGINES      of engines: which (default: all, and then the report is written)
#   MUTANTS_ARGS of mutants: such as --workers 4, --again, --against OLD.json
#   BACKEND, COUNT, LOOPS, EXITS, SEED   of soak-faults: over what (shm, gloo, mpi; hosts: two, made of
#                namespaces), how many faults, faults in programs of join contexts and models,
#                and exits, drawn from what

PYTHON      ?= python3
VENV        ?= .venv
PYTEST_ARGS ?=
BACKEND        ?= shm
COUNT       ?= 1000
LOOPS       ?= 300
EXITS       ?= 300
SEED        ?= 1

# The tests start some hundred processes: without compiled files each compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.DEFAULT_GOAL := help
.PHONY: help demo lint test quick soak soak-faults torch-conformance trainers engines mutants sanitize bench docs wheels newcomer torch-versions clean

help: ## show this list
	@echo "meshdist: N-D parallel programs on a named device mesh"
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 28

demo: $(VENV)/.installed-demo ## train a small transformer on four processes, mesh (dp=2, tp=2)
	$(BIN)/meshdist run -n 4 examples/train_lm.py --mesh dp=2,tp=2 --check

lint: $(VENV)/.installed-test ## format, lint, words, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python packaging/lint_docstrings.py
	$(BIN)/python packaging/lint_prose.py
	$(BIN)/mypy

test: WORKERS ?= 8
test: $(VENV)/.rewritten lint ## format, lint, words, types, and every test but the soak
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(PYTEST_ARGS)

quick: $(VENV)/.rewritten lint ## format, lint, types, pure rooms, simulated ranks, shared memory; says what it left out
	$(BIN)/python -m pytest -p tests.quick --quiet --numprocesses 4 --dist worksteal $(PYTEST_ARGS)

soak: WORKERS ?= 5
soak: $(VENV)/.installed-test ## the long tables, stress tests and long programs; drawn tests with 300 draws
	$(BIN)/python -m pytest -m "soak or hypothesis" --hypothesis-profile soak --timeout 3600 -o faulthandler_timeout=3660 --numprocesses $(WORKERS) --dist worksteal $(PYTEST_ARGS)

soak-faults: $(VENV)/.installed-test ## ranks that are killed, stopped, raise or leave, at random; writes a report
	$(BIN)/python -m tests.faults.run --backend $(BACKEND) --faults $(COUNT) --loops $(LOOPS) --exits $(EXITS) --seed $(SEED) \
		--report tests/faults/report-$(BACKEND).md

torch-conformance: $(VENV)/.installed-conformance ## torch's own process-group tests on our backends, and on Gloo
	$(BIN)/python tests/conformance/run.py

trainers: $(VENV)/.installed-test $(VENV)/.installed-trainers ## accelerate, Lightning and transformers on our backends
	$(BIN)/python -m tests.trainers

engines: $(VENV)/.installed-test ## the programs of docs/how-to/schedulers.md, each under its engine; see packaging/engines.md
	$(BIN)/python packaging/engines.py $(ENGINES)

mutants: $(VENV)/.installed-test ## 200 small faults in copies of the checkout, which tests must catch; see packaging/mutants.md
	$(BIN)/python packaging/mutants.py --seed $(SEED) $(MUTANTS_ARGS)

sanitize: $(VENV)/.installed-test ## the native core under ThreadSanitizer and AddressSanitizer
	@mkdir -p build; set -e; for kind in thread address,undefined; do \
		dir=build/sanitize-$${kind%%,*}; \
		cmake -S . -B $$dir -DPython_EXECUTABLE=$(abspath $(BIN)/python) -DCMAKE_BUILD_TYPE=None \
			-DCMAKE_CXX_FLAGS="-g -O1 -fsanitize=$$kind" > $$dir.log 2>&1 || { cat $$dir.log; exit 1; }; \
		cmake --build $$dir --target meshdist_stress --parallel 2 > $$dir.log || { cat $$dir.log; exit 1; }; \
		echo "== $$kind"; $$dir/meshdist_stress 8 60; \
	done

bench: $(VENV)/.installed-bench ## run every benchmark; each writes its report beside it
	@set -e; for script in $(filter-out %/before_after.py,$(wildcard benchmarks/[!_]*.py)); do echo "== $$script"; $(BIN)/python "$$script"; done

docs: $(VENV)/.installed-docs ## the documentation as a site in build/site; a warning, a broken link, or a failed search is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	$(BIN)/python packaging/site_search.py
	@echo "build/site/index.html, or: $(BIN)/python -m http.server --directory build/site"

wheels: $(VENV)/.made ## an sdist, a wheel for each Python that is here, a pure one; each is tested; see dist/wheels.md
	$(BIN)/python packaging/wheels.py

newcomer: $(VENV)/.made ## what the README and the tutorial say to type, in an empty folder, with a built wheel
	$(BIN)/python packaging/newcomer.py

torch-versions: $(VENV)/.made ## tests, demo and torch programs under torch 2.11 to 2.15; see packaging/torch_versions.md
	$(BIN)/python packaging/torch_versions.py $(TORCH_VERSIONS) $(if $(TORCH_INDEX),--index $(TORCH_INDEX))

clean: ## remove the virtual environment, build output and caches
	rm -rf $(VENV) build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find meshdist tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# Pytest keeps the test files that it has compiled, asserts rewritten. In a fresh clone this does it
# once, on the core that the type checker leaves idle; else each worker would do it.
$(VENV)/.rewritten: $(VENV)/.installed-test
	@$(BIN)/python -m pytest --collect-only --quiet --quiet > /dev/null & $(BIN)/mypy > /dev/null; wait
	@touch $@

# The environment is made anew only when what it is made from changes. The install is editable: it
# is pip's real install of this checkout (metadata, dependencies, the `meshdist` command), and edits
# and new files are seen at once.
$(VENV)/.made: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(f"meshdist needs CPython >= 3.10; {sys.executable} is {sys.version.split()[0]}. Choose another: make PYTHON=python3.12" if sys.version_info < (3, 10) else 0)'
	@echo "Making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) install --upgrade --constraint constraints.txt pip
	@touch $@

$(VENV)/.installed-demo: EXTRA = examples
$(VENV)/.installed-test: EXTRA = test
$(VENV)/.installed-bench: EXTRA = bench
$(VENV)/.installed-conformance: EXTRA = conformance
$(VENV)/.installed-docs: EXTRA = docs
$(VENV)/.installed-trainers: EXTRA = trainers
$(VENV)/.installed-%: $(VENV)/.made CMakeLists.txt pyproject.toml $(wildcard native/*)
	@echo "Installing meshdist[$(EXTRA)] and its dependencies (the first time takes a while: torch)"
	@$(PIP) install --root-user-action=ignore --constraint constraints.txt \
		--build-constraint constraints.txt --editable '.[$(EXTRA)]'
	@touch $@

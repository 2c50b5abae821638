# The index of habits: make setup | demo | fast | test | coverage | bench | hooks
PYTHON ?= python3
BIN := .venv/bin
FAST_TESTS := tests/test_arrows.py tests/test_habits.py tests/base/test_registry.py tests/training/test_schedules.py \
	tests/models/test_structure.py tests/models/test_models.py tests/test_relaxations.py tests/certification/test_attack.py tests/engine/test_hbox.py \
	tests/engine/test_exact.py tests/exchange/test_vnnlib.py tests/losses/test_taps.py
# Ray keeps the authentication token of a process's first session: one process for each of these.
RAY_TESTS := tests/estimators/test_actors.py tests/bench/test_ray.py tests/exchange/test_cli.py tests/training/test_gls.py

.PHONY: setup dev demo fast test coverage bench hooks zoo dist docs notebooks clean

setup: .venv/.setup
dev: .venv/.dev

.venv/.setup: setup.cfg pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[all]'
	$(BIN)/python -m pip install -q --no-deps auto_LiRPA==0.3
	touch $@

.venv/.dev: .venv/.setup
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@

demo: .venv/.setup
	rm -rf runs/demo
	$(BIN)/glscert train --out runs/demo
	$(BIN)/glscert certify runs/demo

# Under a minute, for everyday work: what most mistakes are caught by.
fast: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(FAST_TESTS)

# make test LIRPA=path/to/auto_LiRPA's/repository: against that version instead of the installed one
test: export PYTHONPATH := $(LIRPA)
test: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(RAY_TESTS:%=--ignore=%)
	for file in $(RAY_TESTS); do OMP_NUM_THREADS=1 $(BIN)/python -m pytest $$file || exit 1; done

# Lines that tests in this process reach, the least covered files first; code in Ray's actors is not seen.
coverage: .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --cov --cov-report= $(RAY_TESTS:%=--ignore=%)
	$(BIN)/python -m coverage report --sort=cover --skip-covered

bench: .venv/.setup
	@$(BIN)/glscert bench --list
	@echo; echo "Scripts:"
	@for file in benchmarks/*.py; do echo "  $(BIN)/python $$file"; sed -n '1s/^"""/      /p' $$file; done

hooks: .venv/.dev
	$(BIN)/python -m pip install -q -c constraints.txt pre-commit
	$(BIN)/pre-commit install

# Train, certify and add the networks of gls_lirpa/zoo; see benchmarks/make_zoo.py
zoo: .venv/.setup
	$(BIN)/python benchmarks/make_zoo.py $(ZOO)

# Wheel and source distribution in dist/
dist: .venv/.dev
	rm -rf dist build
	$(BIN)/python -c "from setuptools import build_meta as b; b.build_wheel('dist'); b.build_sdist('dist')"
	rm -rf build

# Run the notebooks and keep their outputs
notebooks: .venv/.dev
	$(BIN)/jupyter-execute --inplace examples/*.ipynb

# The documentation as pages, without network, in site/
docs: .venv/.dev
	$(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf .venv build *.egg-info runs

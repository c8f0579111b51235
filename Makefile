# make train | make test | make test-all: each makes its environment in .venv first.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
ARGS   ?=
# Tests run side by side, one thread each; see tests/conftest.py.
JOBS   ?= 2

.PHONY: env train test test-all lint typecheck clean

env: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --progress-bar off -c constraints.txt -e ".[dev]" 2>&1 | grep -v "^WARNING: Location" || true
	@$(PY) -c "import lmtrain, torch, lightning, transformers, pytest"
	@touch $@

train: env
	$(PY) -m lmtrain.train $(ARGS)

test: env lint typecheck
	$(PY) -m pytest -q -n $(JOBS) -m "not slow and not gpu" $(ARGS)

test-all: env
	$(PY) -m pytest -q -n $(JOBS) -m "slow" $(ARGS)

lint: env
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

typecheck: env
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache dist build
